//! A virtual machine of KVM's before anything is in it.

use std::os::fd::OwnedFd;

use kvm_ioctls::{Kvm, VmFd};

use super::make::{check, split_interrupt_controller};
use crate::{Error, Result};

/// A virtual machine of KVM's without memory and CPUs. All that the kernel waits for when it makes
/// a machine is over. Any [`Config`](super::Config) can have it, once.
#[derive(Debug)]
pub struct EmptyVm {
    pub(super) kvm: Kvm,
    pub(super) vm: VmFd,
}

impl EmptyVm {
    /// Makes the machine on the KVM device `kvm`. It belongs to the calling process alone.
    ///
    /// # Errors
    /// [`Error::NoKvm`], [`Error::KvmLacks`], [`Error::Kvm`].
    pub fn new(kvm: OwnedFd) -> Result<Self> {
        let kvm = check(kvm)?;
        let vm = kvm.create_vm().map_err(Error::kvm("make a virtual machine"))?;
        split_interrupt_controller(&vm)?;
        Ok(Self { kvm, vm })
    }
}
