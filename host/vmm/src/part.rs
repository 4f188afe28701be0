//! A range of the guest's addresses that holds bytes of a file: RAM, or memory that is only read.

use std::io;
use std::os::fd::BorrowedFd;

use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use slipway_ram::{Access, DmaMap, Permissions, Region, Span};

use crate::{Error, Result};

/// A range of guest-physical addresses that holds bytes of a file.
pub struct Part {
    /// The guest-physical address of the first byte.
    pub start: u64,
    /// The number of bytes.
    pub len: u64,
    /// The offset of the first byte in the file.
    pub offset: u64,
    is_writable: bool,
    pub(crate) span: Span,
}

impl Part {
    /// Maps `len` bytes at `offset` of `file` and adds them to `map` at the
    /// guest-physical address `start`.
    ///
    /// # Errors
    /// The reason.
    pub(crate) fn new(
        map: &mut DmaMap,
        file: BorrowedFd<'_>,
        (start, offset, len): (u64, u64, u64),
        permissions: Permissions,
    ) -> io::Result<Self> {
        let region = Region::mapped(file, offset, len, permissions)?;
        map.add(start, region).map_err(io::Error::other)?;
        let access = if permissions.write { Access::Write } else { Access::Read };
        let mut spans = Vec::with_capacity(1);
        map.memory().pin(start, len as usize, access, &mut spans).map_err(io::Error::other)?;
        let span = spans.pop().ok_or_else(|| io::Error::other("nothing was mapped"))?;
        Ok(Self { start, len, offset, is_writable: permissions.write, span })
    }

    /// Returns whether `len` bytes from the guest-physical address `start` on are all in the part.
    pub(crate) fn holds(&self, start: u64, len: u64) -> bool {
        let end = start.checked_add(len);
        start >= self.start && end.is_some_and(|end| end <= self.start + self.len)
    }

    /// Gives the part to KVM as memory slot `slot` of `vm`.
    ///
    /// # Errors
    /// [`Error::Kvm`].
    ///
    /// # Safety
    /// The part outlives the CPUs of `vm`.
    pub(crate) unsafe fn give_to(&self, vm: &VmFd, slot: usize) -> Result<()> {
        let flags = if self.is_writable { 0 } else { KVM_MEM_READONLY };
        // SAFETY: by this function's own contract.
        unsafe { self.tell(vm, slot, flags) }
    }

    /// Has KVM note the pages of the writable part that the guest and KVM itself write to, or stop
    /// doing so. KVM has the part as memory slot `slot` of `vm`. This process notes no writes
    /// meanwhile, since asking for the part's address counts as one.
    ///
    /// # Errors
    /// [`Error::Kvm`].
    ///
    /// # Safety
    /// As for [`Part::give_to`].
    pub(crate) unsafe fn set_log(&self, vm: &VmFd, slot: usize, log: bool) -> Result<()> {
        let flags = if log { KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
        // SAFETY: by this function's own contract.
        unsafe { self.tell(vm, slot, flags) }
    }

    /// # Safety
    /// As for [`Part::give_to`].
    unsafe fn tell(&self, vm: &VmFd, slot: usize, flags: u32) -> Result<()> {
        let region = kvm_userspace_memory_region {
            slot: slot as u32,
            flags,
            guest_phys_addr: self.start,
            memory_size: self.len,
            userspace_addr: self.span.io_vector().0.addr() as u64,
        };
        // SAFETY: the range is a shared mapping that no Rust reference points into; the span pins
        // it as long as the guest runs, by this function's own contract.
        unsafe { vm.set_user_memory_region(region) }.map_err(Error::kvm("map the guest's memory"))
    }
}
