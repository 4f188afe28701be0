//! The description of a virtual machine.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use slipway_machine::{HotRegion, MAX_HOT_REGIONS};

use crate::{AccelChoice, CpuTemplate, Error, GuestMemory, Result, SharedPages, VmRecord};

/// The user and group that a VM's process runs as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The user id.
    pub uid: u32,
    /// The group id; the process has no supplementary groups.
    pub gid: u32,
}

/// The pages that a guest does not use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FreePages {
    /// The guest has no device to report them to.
    #[default]
    Unreported,
    /// The guest may report them, and keeps them.
    Kept,
    /// The guest reports them, and the VMM gives them back to the host, but not those of a pool's
    /// recycled memory. Nothing pins the guest's memory.
    GivenBack,
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

/// A network interface whose device the VMM emulates itself: the reference that Slipway's devices
/// are measured against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmulatedNic {
    /// The device that the guest sees.
    pub model: NicModel,
    /// The name of the TAP interface of the host behind the device, 1 to 15 bytes. The launcher
    /// creates it; it goes with the VM.
    pub tap: String,
    /// The MAC address of the guest's interface, as `52:54:00:00:00:01`.
    pub mac: String,
}

/// A network device that a VMM emulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NicModel {
    /// An 82540EM.
    E1000,
    /// A virtio-net device with one queue pair.
    VirtioNet,
}

/// A PCI function of the host that the VMM has by VFIO itself: the reference that functions of
/// hardware which Slipway serves are measured against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssignedFunction {
    /// The address on the host, as `0000:01:10.0`. The function is bound to vfio-pci, and nobody
    /// else has its IOMMU group.
    pub address: String,
    /// The guest has an IOMMU in front of its devices. Its kernel uses that for no device, until it
    /// is told to in the guest (the type of an IOMMU group in sysfs).
    pub iommu: bool,
}

/// The complete description of a VM that a hypervisor starts.
#[derive(Clone, Debug)]
pub struct VmSpec {
    /// The name of the sandbox, shown in process lists and logs. Letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// The guest memory: a multiple of 1 MiB, at least [`VmSpec::MIN_MEMORY`] bytes.
    pub memory: GuestMemory,
    /// The regions of memory that the guest is given, and gives back, while it runs
    /// ([`crate::Vm::set_memory`]), up to [`MAX_HOT_REGIONS`]. Their bytes are the last
    /// ones of [`VmSpec::memory`], which no pool has given; the bytes before are the guest's from
    /// the start. Only `slipway-vmm` runs a VM with regions.
    pub hot_memory: Vec<HotRegion>,
    /// The treatment of pages that the guest does not use. A machine that goes on from a saved
    /// state has the device for reports exactly if the saved one had it. Only `slipway-vmm` runs a
    /// VM whose guest reports.
    pub free_pages: FreePages,
    /// Pages that the guest reads in place and shares with others, as the persistent memory
    /// `/dev/pmem0`. Only a VMM that [can be given them](crate::Capabilities::shares_pages) runs
    /// such a VM.
    pub shared: Option<SharedPages>,
    /// The file with the state of a machine that was [saved](crate::Vm::save), with which this one
    /// begins in place of booting. It had the same CPUs, the same functions in the same order, and
    /// as much memory, whose content is that of [`VmSpec::memory`]. Only `slipway-vmm` runs such a
    /// VM.
    pub restore: Option<Arc<File>>,
    /// The number of virtual CPUs: 1 to [`VmSpec::MAX_CPUS`].
    pub cpus: u32,
    /// The processor that the guest sees. Only `slipway-vmm` gives another than that of the host.
    pub cpu_template: CpuTemplate,
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
    /// The number of functions that can be added while the VM runs ([`crate::Vm::plug`]), beside
    /// those of [`VmSpec::vfio_user_sockets`]. With any, `slipway-vmm` can be asked to remove those
    /// of the sockets, too. The guest's start takes longer with each.
    pub plug_slots: usize,
    /// The number of CPUs that can be added while the VM runs ([`crate::Vm::plug_cpu`]), beside
    /// [`VmSpec::cpus`].
    pub plug_cpus: u32,
    /// Disks that the VMM itself emulates, behind the functions on the bus.
    pub disks: Vec<EmulatedDisk>,
    /// A network interface that the VMM itself emulates, behind these disks.
    pub nic: Option<EmulatedNic>,
    /// A PCI function of the host that the VMM itself has by VFIO, behind that interface. All of
    /// the VM's memory is pinned from its start.
    pub assigned: Option<AssignedFunction>,
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

/// The words on the kernel command line of every guest. The reasons:
/// - `console=ttyS0 loglevel=3`: what ends the guest reaches the console log, and errors do once
///   the agent runs; no other messages. A character costs two traps, and Linux has an error to
///   report where PCI has no legacy access;
/// - `panic=-1`: a panicked guest resets at once instead of hanging, and a reset ends its VM;
/// - `cryptomgr.notests`: saves 0.3 to 0.6 s of self-tests of ciphers under emulation;
/// - `tsc=reliable no_timer_check`: no calibration against timers that a busy host delays;
/// - `random.trust_cpu=on`: the guest's random numbers are ready at once;
/// - `maxcpus=1`: the kernel starts with one CPU, and the agent brings the others online before
///   it says hello. Linux changes its own code again and again while it starts, and waits for all
///   CPUs each time: on a host that has others to run, each wait may take a turn of the scheduler;
/// - `damon_stat.enabled=0`: no statistics of which memory is used (Linux 6.17 and later, where the
///   distribution has them on): they take a reference on pages chosen at random 200 times a second,
///   which writes to all descriptions of pages, so that each fork had 2.6 MiB more of its own;
/// - `initcall_blacklist`: work at every start that a sandbox has no use for: a search of all
///   traced functions for those that the linker has replaced, numbers for names in the formats of
///   trace events, and a source of random numbers for machines without another.
///
/// A word for every guest is added here, one for a VMM's machine where its own are (`MACHINE_WORDS`
/// of `host/vmm`, `machine::make`; `qemu::args`), and one that depends on the sandbox in
/// `resize::kernel_words` of `sandbox/runtime`. Guests that begin with a template or a snapshot
/// have the words with which that machine booted. Tests: below, and those of both `args`.
const COMMON_WORDS: &str = "console=ttyS0 loglevel=3 panic=-1 cryptomgr.notests tsc=reliable \
     no_timer_check random.trust_cpu=on maxcpus=1 damon_stat.enabled=0 \
     initcall_blacklist=ftrace_check_for_weak_functions,trace_eval_init,jent_mod_init";

impl VmSpec {
    /// Returns the PCI address in the guest of function `index` of [`VmSpec::vfio_user_sockets`].
    pub fn function_address(index: usize) -> String {
        format!("0000:00:{:02x}.0", Self::FIRST_SLOT + index)
    }

    /// Returns whether the VMM emulates devices itself, or has a function by VFIO, which only QEMU
    /// does.
    pub(crate) fn emulates_devices(&self) -> bool {
        !self.disks.is_empty() || self.nic.is_some() || self.assigned.is_some()
    }

    /// Returns whether the VMM makes holes in the guest's memory: it gives back what the guest has
    /// unplugged, or reported as free.
    pub(crate) fn makes_holes(&self) -> bool {
        self.free_pages == FreePages::GivenBack || !self.hot_memory.is_empty()
    }

    /// The slot of the first function on the root bus; lower slots belong to the agent's port and
    /// other devices.
    pub(crate) const FIRST_SLOT: usize = 4;

    /// Returns the kernel command line: the words of every guest, then `own`, those of a VMM, then
    /// the spec's.
    pub(crate) fn kernel_words(&self, own: &[&str]) -> String {
        let words = std::iter::once(COMMON_WORDS).chain(own.iter().copied());
        words.chain(self.cmdline.iter().map(String::as_str)).collect::<Vec<_>>().join(" ")
    }

    /// Refuses an invalid spec before anything is started.
    pub(crate) fn check(&self) -> Result<()> {
        let bad = |what: String| Err(Error::BadSpec { what });
        let mib = 1 << 20;
        let hot = self.hot_memory.iter().map(|region| region.bytes);
        let hot = hot.fold(0, |sum: u64, bytes| sum.saturating_add(bytes));
        if self.hot_memory.len() > MAX_HOT_REGIONS {
            return bad(format!("more than {MAX_HOT_REGIONS} regions of hot-plug memory"));
        }
        let bytes = self.memory.bytes().saturating_sub(hot);
        if bytes < Self::MIN_MEMORY || !bytes.is_multiple_of(mib) {
            let least = Self::MIN_MEMORY / mib;
            return bad(format!(
                "{bytes} bytes of memory: a sandbox needs at least {least} MiB, in whole MiB"
            ));
        }
        let most = self.cpus.saturating_add(self.plug_cpus);
        if self.cpus == 0 || most > Self::MAX_CPUS {
            return bad(format!("{most} CPUs: 1 to {} are possible", Self::MAX_CPUS));
        }
        let count = self.vfio_user_sockets.len() + self.disks.len();
        let count = count + usize::from(self.nic.is_some());
        let count = count + usize::from(self.assigned.is_some());
        let count = count.saturating_add(self.plug_slots);
        if count > Self::MAX_FUNCTIONS {
            let most = Self::MAX_FUNCTIONS;
            let what = "functions, disks and slots for more";
            return bad(format!("{count} {what}: at most {most} fit on the bus"));
        }
        // The name becomes part of option lists, where commas separate.
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if self.name.is_empty() || self.name.len() > 128 || !self.name.chars().all(plain) {
            let name = &self.name;
            return bad(format!("'{name}' is no name of a sandbox: use letters, digits, - _ ."));
        }
        if self.cmdline.iter().any(|word| word.chars().any(char::is_control)) {
            return bad("a control character in the kernel's command line".into());
        }
        Ok(())
    }

    /// The largest number of functions and disks: the root bus has 32 slots, some of which are
    /// taken.
    pub(crate) const MAX_FUNCTIONS: usize = 24;

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
    /// The sockets of the functions that it began with, [`VmSpec::vfio_user_sockets`], in the same
    /// order. A VMM that can be given new connections is given them from there. The record has
    /// the sockets of those that were plugged.
    pub vfio_user_sockets: Vec<PathBuf>,
    /// The console's log, [`VmSpec::console_log`]; console output of the time between launchers is
    /// appended to it.
    pub console_log: PathBuf,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn spec() -> VmSpec {
        VmSpec {
            name: "web-1".into(),
            memory: GuestMemory::new(256 << 20).unwrap(),
            hot_memory: Vec::new(),
            free_pages: FreePages::Unreported,
            shared: None,
            restore: None,
            cpus: 2,
            cpu_template: CpuTemplate::Host,
            kernel: "/k/vmlinux".into(),
            initramfs: "/k/initramfs,with comma.cpio".into(),
            cmdline: vec!["slipway.debug=1".into()],
            agent_socket: "/run/x/agent".into(),
            vfio_user_sockets: vec!["/run/x/a,b".into(), "/run/x/c".into()],
            plug_slots: 0,
            plug_cpus: 0,
            disks: Vec::new(),
            nic: None,
            assigned: None,
            console_log: "/run/x/console".into(),
            run_dir: PathBuf::from("/run/x"),
            credentials: None,
            cgroup_procs: Vec::new(),
            accel: AccelChoice::Auto,
        }
    }

    fn spec_with(hot_memory: Vec<HotRegion>) -> VmSpec {
        VmSpec { hot_memory, ..spec() }
    }

    #[test]
    fn impossible_machines_are_refused() {
        spec().check().unwrap();
        let region = |bytes| HotRegion { bytes, node: 1 };
        spec_with(vec![region(128 << 20)]).check().unwrap();
        for regions in [vec![region(161 << 20)], vec![region(u64::MAX); 2], vec![region(0); 9]] {
            let checked = spec_with(regions).check();
            assert!(matches!(checked, Err(Error::BadSpec { .. })), "{checked:?}");
        }
        let refused: [fn(&mut VmSpec); 12] = [
            |s| s.memory = GuestMemory::new(1).unwrap(),
            |s| s.memory = GuestMemory::new((96 << 20) - (1 << 20)).unwrap(),
            |s| s.memory = GuestMemory::new((96 << 20) + 1).unwrap(),
            |s| s.cpus = 0,
            |s| s.cpus = 256,
            |s| s.plug_cpus = 254,
            |s| s.name = String::new(),
            |s| s.name = "a,debug-threads=on".into(),
            |s| s.name = "a".repeat(129),
            |s| s.vfio_user_sockets = vec!["/x".into(); 25],
            |s| s.plug_slots = 23,
            |s| s.cmdline = vec!["a\nb".into()],
        ];
        for spoil in refused {
            let mut spec = spec();
            spoil(&mut spec);
            assert!(matches!(spec.check(), Err(Error::BadSpec { .. })), "{spec:?}");
        }
    }

    #[test]
    fn words_of_a_vmm_come_before_the_specs() {
        let words = spec().kernel_words(&["reboot=t"]);
        assert!(words.ends_with("jent_mod_init reboot=t slipway.debug=1"), "{words}");
        assert!(!spec().kernel_words(&[]).contains("reboot="));
    }
}
