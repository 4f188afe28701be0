//! Configuration space that the guest reads without leaving it.
//!
//! Linux reads some two hundred registers of each function at its start. Those of functions in this
//! process change by the guest's writes alone. So KVM has a copy of them as memory that the guest
//! can read: a write leaves the guest as before, and what it changed is copied.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, VmFd};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use super::Slot;
use crate::layout::{self, DEVICE_SHIFT, FUNCTION_SHIFT};
use crate::lock::lock;
use crate::{Error, Result};

/// Bytes of a function's configuration space (PCIe Base 5.0, 7.2.2).
const FUNCTION_SIZE: usize = 1 << FUNCTION_SHIFT;
/// Bytes of the part that is not extended, behind which nothing changes.
const CHANGING: usize = 256;
const WORD: usize = size_of::<u32>();

/// The copy of the configuration space of some devices.
pub(super) struct Shadow {
    devices: Range<u8>,
    words: &'static [AtomicU32],
    vm: Arc<VmFd>,
    /// KVM has the copy. Locked while it changes, so that the last of several CPUs copies what all
    /// of them have written.
    active: Mutex<bool>,
}

impl Shadow {
    /// Gives KVM a copy of the configuration space of `devices`, of which each is in `slots` or
    /// absent. Returns `None` if this KVM has no memory that only its host can write.
    ///
    /// # Errors
    /// [`Error::System`], [`Error::Kvm`].
    pub(super) fn new<'a>(
        vm: &Arc<VmFd>,
        devices: Range<u8>,
        slots: impl Iterator<Item = &'a Arc<Slot>>,
    ) -> Result<Option<Self>> {
        if !vm.check_extension(Cap::ReadonlyMem) {
            return Ok(None);
        }
        let words = map(devices.len() << DEVICE_SHIFT)?;
        let active = Mutex::new(true);
        let shadow = Self { devices, words, vm: Arc::clone(vm), active };
        // Nothing answers reads of functions that are not there.
        shadow.words.iter().for_each(|word| word.store(u32::MAX, Ordering::Relaxed));
        slots.for_each(|slot| shadow.copy(slot, FUNCTION_SIZE));
        let bytes = shadow.words.len() * WORD;
        shadow.tell_kvm(bytes).map_err(Error::kvm("map configuration space"))?;
        Ok(Some(shadow))
    }

    /// Returns whether KVM has the copy.
    pub(super) fn is_active(&self) -> bool {
        *lock(&self.active)
    }

    /// Follows a write of the guest to register `offset` of `slot`.
    pub(super) fn written(&self, slot: &Slot, offset: u16) {
        if !self.devices.contains(&slot.number()) {
            return;
        }
        let mut active = lock(&self.active);
        if !*active {
            return;
        }
        if slot.is_window(offset) {
            // Without the copy each read is served.
            *active = self.tell_kvm(0).is_err();
        } else {
            self.copy(slot, CHANGING);
        }
    }

    fn copy(&self, slot: &Slot, len: usize) {
        let mut bytes = [0; FUNCTION_SIZE];
        slot.config_read(0, &mut bytes[..len]);
        let first = (usize::from(slot.number() - self.devices.start) << DEVICE_SHIFT) / WORD;
        let (values, _) = bytes[..len].as_chunks::<WORD>();
        for (word, value) in self.words[first..].iter().zip(values) {
            word.store(u32::from_le_bytes(*value), Ordering::Relaxed);
        }
    }

    fn tell_kvm(&self, bytes: usize) -> std::result::Result<(), kvm_ioctls::Error> {
        let first = u64::from(self.devices.start) << DEVICE_SHIFT;
        let region = kvm_userspace_memory_region {
            slot: layout::CONFIG_MEMORY_SLOT,
            flags: KVM_MEM_READONLY,
            guest_phys_addr: layout::ECAM.start + first,
            memory_size: bytes as u64,
            userspace_addr: self.words.as_ptr().addr() as u64,
        };
        // SAFETY: the words are atomic and never unmapped while KVM has them: `drop` takes them
        // from KVM first.
        unsafe { self.vm.set_user_memory_region(region) }
    }
}

impl Drop for Shadow {
    fn drop(&mut self) {
        if !*lock(&self.active) || self.tell_kvm(0).is_ok() {
            let start = self.words.as_ptr().cast_mut().cast();
            // SAFETY: the mapping that `map` made; nothing refers to it after this object.
            unsafe { slipway_ram::unmap(start, size_of_val(self.words)) };
        }
    }
}

/// Maps `len` bytes, a multiple of a page.
fn map(len: usize) -> Result<&'static [AtomicU32]> {
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, flags) };
    let start = start.map_err(Error::system("memory for configuration space"))?;
    // SAFETY: the mapping is zeroed and aligned, and `Shadow` unmaps it as its last act.
    Ok(unsafe { std::slice::from_raw_parts(start.cast(), len / WORD) })
}
