//! What a virtual machine is to be.

use std::path::PathBuf;

use crate::{AccelChoice, GuestMemory, VmRecord};

/// User and group that a VM's process runs as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// User id.
    pub uid: u32,
    /// Group id; the process has no supplementary groups.
    pub gid: u32,
}

/// A disk whose device the VMM emulates itself: the peers that ours are measured against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmulatedDisk {
    /// The device that the guest sees.
    pub model: DiskModel,
    /// A file or a block device; opened with the launcher's rights, past the host's page cache.
    pub path: PathBuf,
    /// The guest cannot write it.
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

/// Everything a hypervisor needs to know to start one VM.
#[derive(Clone, Debug)]
pub struct VmSpec {
    /// Name of the sandbox: shown in process lists and logs. Letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// Guest memory: a multiple of 1 MiB, at least [`VmSpec::MIN_MEMORY`] bytes.
    pub memory: GuestMemory,
    /// Virtual CPUs: 1 to [`VmSpec::MAX_CPUS`].
    pub cpus: u32,
    /// Kernel image; an uncompressed ELF with a PVH entry starts fastest.
    pub kernel: PathBuf,
    /// Initial RAM file system.
    pub initramfs: PathBuf,
    /// Words added to the kernel's command line after the hypervisor's own.
    pub cmdline: Vec<String>,
    /// Where the agent's port (virtio-serial `slipway.agent`) is reached. The launcher makes the
    /// socket, mode 0600, and listens on it before the VM starts, so that a client may connect as
    /// soon as `launch` returns. A stale socket there is replaced.
    pub agent_socket: PathBuf,
    /// vfio-user servers, one PCI function each, in this order on the bus. Whoever runs the VM
    /// must have write permission on the socket itself; its parent directories may be closed.
    pub vfio_user_sockets: Vec<PathBuf>,
    /// Disks of the VMM's own making, behind the functions on the bus.
    pub disks: Vec<EmulatedDisk>,
    /// The guest's serial console is written here, at most [`VmSpec::CONSOLE_CAP`] bytes: when it
    /// is full the older half is dropped.
    pub console_log: PathBuf,
    /// Directory of the VM. The launcher keeps there what reaches the VM, for itself and for a
    /// successor: nobody else, the VM's own user included, may have rights there.
    pub run_dir: PathBuf,
    /// Who runs the VM; `None`: the launcher's own user.
    pub credentials: Option<Credentials>,
    /// `cgroup.procs` files that the VM's process joins before it runs anything.
    pub cgroup_procs: Vec<PathBuf>,
    /// Which accelerator to use.
    pub accel: AccelChoice,
}

impl VmSpec {
    /// PCI address in the guest of function `index` of [`VmSpec::vfio_user_sockets`].
    pub fn function_address(index: usize) -> String {
        format!("0000:00:{:02x}.0", Self::FIRST_SLOT + index)
    }

    /// PCI address in the guest of disk `index` of [`VmSpec::disks`].
    pub fn disk_address(&self, index: usize) -> String {
        Self::function_address(self.vfio_user_sockets.len() + index)
    }

    /// Slot of the first function on the root bus; those below are the agent's port's and such.
    pub(crate) const FIRST_SLOT: usize = 4;

    /// The least memory that Debian's kernel boots in together with an agent, in bytes.
    pub const MIN_MEMORY: u64 = 96 << 20;
    /// More virtual CPUs than this are refused.
    pub const MAX_CPUS: u32 = 255;
    /// Most that the console log may occupy, in bytes. A hostile guest must not fill the disk.
    pub const CONSOLE_CAP: u64 = 1 << 20;
}

/// A VM whose launcher has ended: what it was launched with, as far as it takes to reach it.
#[derive(Clone, Debug)]
pub struct LeftVm {
    /// Its process.
    pub record: VmRecord,
    /// [`VmSpec::run_dir`].
    pub run_dir: PathBuf,
    /// [`VmSpec::agent_socket`].
    pub agent_socket: PathBuf,
    /// [`VmSpec::console_log`]; what the guest said meanwhile is added to it.
    pub console_log: PathBuf,
}
