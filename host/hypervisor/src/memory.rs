//! The memory of a guest.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::thread::CpuSet;
use slipway_numa::Topology;
use slipway_pool_wire::{Completion, Lease, Page, Request, TemplateName};

use crate::{Error, Result};

/// The memory of one guest: a file in memory whose size cannot be changed. Clones are the same
/// memory, which is freed with the last descriptor and mapping of the file.
#[derive(Clone, Debug)]
pub struct GuestMemory {
    file: Arc<OwnedFd>,
    bytes: u64,
    lease: Option<Arc<Mutex<Option<OwnedFd>>>>,
    /// The CPUs of the NUMA node that the memory is on.
    near: Option<CpuSet>,
}

impl GuestMemory {
    /// Makes memory of `bytes` bytes, which does not use memory of the host yet.
    ///
    /// # Errors
    /// [`Error::System`]: no descriptor is left, or the size is impossible for a file.
    pub fn new(bytes: u64) -> Result<Self> {
        let failed = |errno| Error::system("making the guest's memory", errno);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(c"guest-memory", flags).map_err(failed)?;
        rustix::fs::ftruncate(&file, bytes).map_err(failed)?;
        // Sealed: no process can shrink the file under those that have mapped it, or grow it past
        // its limit.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(failed)?;
        Ok(Self { file: Arc::new(file), bytes, lease: None, near: None })
    }

    /// Takes memory of `bytes` bytes of the pool whose socket is at `path`: a multiple of 64 KiB,
    /// or of 2 MiB for huge pages. Its pages are zeroed when the VM first sees them; only
    /// `slipway-vmm` can have it. Waits for the pool.
    ///
    /// If all CPUs that this thread may run on belong to one NUMA node of `topology`, the memory is
    /// on that node, else on the one that the pool chooses. A VM whose CPUs the node has enough for
    /// then runs there.
    ///
    /// # Errors
    /// [`Error::Pool`]; [`WireError::Refused`](crate::WireError::Refused) within it has the pool's
    /// reason, such as that too few huge pages are free.
    pub fn of_pool(path: &Path, bytes: u64, page: Page, topology: &Topology) -> Result<Self> {
        Self::leased(path, (bytes, page), None, topology)
    }

    /// Takes memory of the pool whose socket is at `path`, like [`GuestMemory::of_pool`], that
    /// begins as the pool's template `template`, whose size is `bytes`: memory of a VM that was
    /// saved. Its pages are copied when the VM or a device first needs them.
    ///
    /// # Errors
    /// As for [`GuestMemory::of_pool`]; the pool has no template of this name or size.
    pub fn of_template(
        path: &Path,
        bytes: u64,
        template: TemplateName,
        topology: &Topology,
    ) -> Result<Self> {
        Self::leased(path, (bytes, Page::Base), Some(template), topology)
    }

    /// Returns the file of a VM's memory that began as a template ([`GuestMemory::of_template`]),
    /// by its identity, once the pool has copied all of the template: for a process other than the
    /// pool's that serves the VM's guest. Waits for the copy.
    ///
    /// # Errors
    /// [`Error::Pool`].
    pub fn complete(path: &Path, (device, inode): (u64, u64)) -> Result<OwnedFd> {
        Ok(slipway_pool_wire::complete(path, Completion { device, inode })?)
    }

    fn leased(
        path: &Path,
        (bytes, page): (u64, Page),
        template: Option<TemplateName>,
        topology: &Topology,
    ) -> Result<Self> {
        let allowed = topology.allowed_cpus();
        let near = allowed.and_then(|allowed| topology.node_of(&allowed));
        let request = Request { bytes, page, near, template };
        let Lease { file, connection, home } = Lease::ask(path, request)?;
        let lease = Some(Arc::new(Mutex::new(Some(connection))));
        let near = home.zip(allowed).map(|(home, allowed)| topology.cpus_among(home, &allowed));
        Ok(Self { file: Arc::new(file), bytes, lease, near })
    }

    /// Returns the CPUs that a VM of at most `cpus` virtual CPUs should run on: those of the NUMA
    /// node that the memory is on, if they are enough. Returns `None` if the VM may run on any.
    pub(crate) fn cpus_for(&self, cpus: u32) -> Option<CpuSet> {
        self.near.filter(|near| near.count() >= cpus.max(1))
    }

    /// Returns whether the memory is a pool's.
    pub fn is_of_pool(&self) -> bool {
        self.lease.is_some()
    }

    /// Returns the connection to the memory's pool, once: the VMM alone holds it from then on.
    pub(crate) fn take_lease(&self) -> Option<OwnedFd> {
        self.lease.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the device and inode number of the file, which no other file has while this one
    /// exists.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn identity(&self) -> Result<(u64, u64)> {
        let found = rustix::fs::fstat(&*self.file);
        let found = found.map_err(|errno| Error::system("looking at the guest's memory", errno))?;
        Ok((found.st_dev, found.st_ino))
    }

    /// Returns a descriptor of the file.
    ///
    /// # Errors
    /// [`Error::System`]: no descriptor is left.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        let copy = self.file.try_clone();
        copy.map_err(|source| Error::system("duplicating a descriptor", source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_size_is_final_and_no_other_is_the_same() {
        let memory = GuestMemory::new(1 << 20).unwrap();
        for size in [0, 2 << 20] {
            assert!(rustix::fs::ftruncate(memory.descriptor().unwrap(), size).is_err());
        }
        assert_eq!(memory.bytes(), 1 << 20);
        assert_eq!(memory.identity().unwrap(), memory.clone().identity().unwrap());
        let other = GuestMemory::new(1 << 20).unwrap();
        assert_ne!(memory.identity().unwrap(), other.identity().unwrap());
        assert!(GuestMemory::new(u64::MAX).is_err());
    }

    #[test]
    fn a_vm_runs_on_the_node_of_its_memory_if_that_has_cpus_enough() {
        let topology = Topology::of(&[(0, &[0, 2]), (1, &[1, 3])]);
        let near = topology.nodes().next().and_then(|node| topology.cpus(node)).copied();
        let memory = GuestMemory { near, ..GuestMemory::new(1 << 20).unwrap() };
        for (cpus, expected) in [(0, near), (1, near), (2, near), (3, None), (u32::MAX, None)] {
            assert_eq!(memory.cpus_for(cpus), expected, "{cpus}");
        }
        let none = GuestMemory { near: Some(CpuSet::new()), ..memory };
        assert_eq!(none.cpus_for(0), None);
        assert_eq!(GuestMemory::new(1 << 20).unwrap().cpus_for(1), None);
    }
}
