//! Registers of a device in a file that is mapped: accesses reach the device without a message.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

/// A mapped part of a region of a PCI function: a store to it reaches the device without a message.
///
/// The file belongs to the server. A server that shrinks it takes the page away from this process,
/// which then dies of SIGBUS at its next access: a client that maps a window trusts its server that
/// far.
#[derive(Debug)]
pub struct RegisterWindow {
    base: *mut u8,
    len: usize,
    /// The offset of the mapped part in its region.
    offset: u64,
}

// SAFETY: the memory is accessed through atomics only.
unsafe impl Send for RegisterWindow {}
// SAFETY: the memory is accessed through atomics only.
unsafe impl Sync for RegisterWindow {}

impl RegisterWindow {
    /// Maps `len` bytes at `file_offset` of `file`, which are those at `offset` of a region. The
    /// file may be a server's, or one that the kernel provides for a PCI function's registers.
    ///
    /// # Errors
    /// Any error of mmap(2).
    pub fn map(
        file: impl AsFd,
        file_offset: u64,
        offset: u64,
        len: usize,
    ) -> rustix::io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let any = std::ptr::null_mut();
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours.
        let base =
            unsafe { rustix::mm::mmap(any, len, protection, MapFlags::SHARED, file, file_offset)? };
        Ok(Self { base: base.cast(), len, offset })
    }

    /// Stores to the 32-bit register at byte `at` of the region, with release ordering: a device
    /// that sees the value also sees the memory that was written before.
    ///
    /// # Panics
    /// If the register is not aligned or not in the window: the caller's error.
    #[inline]
    pub fn store_u32(&self, at: u64, value: u32) {
        self.word(at).store(value.to_le(), Ordering::Release);
    }

    /// Loads the 32-bit register at byte `at` of the region, with acquire ordering.
    ///
    /// # Panics
    /// If the register is not aligned or not in the window: the caller's error.
    #[inline]
    pub fn load_u32(&self, at: u64) -> u32 {
        u32::from_le(self.word(at).load(Ordering::Acquire))
    }

    /// Returns whether the window holds an aligned 32-bit register at byte `at` of the region.
    pub fn holds_u32(&self, at: u64) -> bool {
        self.within(at).is_some()
    }

    /// Returns the place in the window of the register at byte `at` of the region.
    fn within(&self, at: u64) -> Option<usize> {
        let within = at.checked_sub(self.offset).and_then(|within| usize::try_from(within).ok());
        let fits = |at: &usize| {
            at.is_multiple_of(4) && at.checked_add(4).is_some_and(|end| end <= self.len)
        };
        within.filter(fits)
    }

    fn word(&self, at: u64) -> &AtomicU32 {
        let within = self.within(at);
        assert!(within.is_some(), "register {at:#x} is not in the window");
        // SAFETY: in bounds and aligned (the mapping begins at a page), valid until drop; atomics
        // tolerate concurrent stores by others.
        unsafe { &*self.base.add(within.unwrap_or(0)).cast::<AtomicU32>() }
    }
}

impl Drop for RegisterWindow {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; borrows of its words have ended.
        unsafe { crate::unmap(self.base, self.len) };
    }
}
