//! The description of a virtual machine.

use std::path::PathBuf;

use crate::{AccelChoice, GuestMemory, VmRecord};

/// The user and group that a VM's process runs as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The user id.
    pub uid: u32,
    /// The group id; the process has no supplementary groups.
    pub gid: u32,
}

/// A disk whose device the VMM emulates itself: the reference that Slipway's devices are measured
/// against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmulatedDisk {
    /// The device that the guest sees.
    pub model: DiskModel,
    /// The path of a file or a block device; opened with the launcher's rights, without the host's
    /// page cache.
    pub path: PathBuf,
    /// The guest cannot write to the disk.
    pub read_only: bool,
}

/// A device that a VMM emulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskModel {
    /// An NVMe controller with one namespace, number 1.
    Nvme,
    /// A virtio block device, on a thread of its own in the VMM.
    VirtioBlk,
}

/// The complete description of a VM that a hypervisor starts.
#[derive(Clone, Debug)]
pub struct VmSpec {
    /// The name of the sandbox, shown in process lists and logs. Letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// The guest memory: a multiple of 1 MiB, at least [`VmSpec::MIN_MEMORY`] bytes.
    pub memory: GuestMemory,
    /// The number of virtual CPUs: 1 to [`VmSpec::MAX_CPUS`].
    pub cpus: u32,
    /// The kernel image; an uncompressed ELF with a PVH entry starts fastest.
    pub kernel: PathBuf,
    /// The initial RAM file system.
    pub initramfs: PathBuf,
    /// Words added to the kernel's command line after the hypervisor's own.
    pub cmdline: Vec<String>,
    /// The socket of the agent's port (virtio-serial `slipway.agent`). The launcher makes the
    /// socket, mode 0600, and listens on it before the VM starts, so that a client may connect as
    /// soon as `launch` returns. A stale socket there is replaced.
    pub agent_socket: PathBuf,
    /// The sockets of vfio-user servers, one PCI function each, in this order on the bus. The user
    /// that runs the VM must have write permission on the socket itself; its parent directories may
    /// be closed to that user.
    pub vfio_user_sockets: Vec<PathBuf>,
    /// Disks that the VMM itself emulates, behind the functions on the bus.
    pub disks: Vec<EmulatedDisk>,
    /// The log of the guest's serial console, at most [`VmSpec::CONSOLE_CAP`] bytes: when it is
    /// full, its older half is dropped.
    pub console_log: PathBuf,
    /// The directory of the VM. The launcher keeps there the sockets and FIFOs that lead to the VM,
    /// for itself and for a successor: no other user, including the VM's own, may have rights
    /// there.
    pub run_dir: PathBuf,
    /// The user that runs the VM; `None` selects the launcher's own user.
    pub credentials: Option<Credentials>,
    /// `cgroup.procs` files that the VM's process joins before it runs anything.
    pub cgroup_procs: Vec<PathBuf>,
    /// The accelerator to use.
    pub accel: AccelChoice,
}

impl VmSpec {
    /// Returns the PCI address in the guest of function `index` of [`VmSpec::vfio_user_sockets`].
    pub fn function_address(index: usize) -> String {
        format!("0000:00:{:02x}.0", Self::FIRST_SLOT + index)
    }

    /// Returns the PCI address in the guest of disk `index` of [`VmSpec::disks`].
    pub fn disk_address(&self, index: usize) -> String {
        Self::function_address(self.vfio_user_sockets.len() + index)
    }

    /// The slot of the first function on the root bus; lower slots belong to the agent's port and
    /// other devices.
    pub(crate) const FIRST_SLOT: usize = 4;

    /// The least memory in bytes in which Debian's kernel boots together with an agent.
    pub const MIN_MEMORY: u64 = 96 << 20;
    /// The largest number of virtual CPUs.
    pub const MAX_CPUS: u32 = 255;
    /// The largest size of the console log in bytes. A hostile guest must not fill the disk.
    pub const CONSOLE_CAP: u64 = 1 << 20;
}

/// A VM whose launcher has ended: the parts of its spec that are needed to reach it.
#[derive(Clone, Debug)]
pub struct LeftVm {
    /// The record of its process.
    pub record: VmRecord,
    /// The VM's directory, [`VmSpec::run_dir`].
    pub run_dir: PathBuf,
    /// The agent's socket, [`VmSpec::agent_socket`].
    pub agent_socket: PathBuf,
    /// The console's log, [`VmSpec::console_log`]; console output of the time between launchers is
    /// appended to it.
    pub console_log: PathBuf,
}
