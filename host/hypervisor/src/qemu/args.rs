//! QEMU's command line: the lightest machine that supports vfio-user functions.
//!
//! The machine is a q35 with everything optional switched off, started through the PVH entry with
//! qboot as firmware: 0.1 s less than SeaBIOS under software emulation, and an uncompressed kernel
//! saves 0.3 to 1 s more. `microvm` is no gain: to have PCI it needs ACPI tables, and with these
//! Debian's uncompressed kernels (6.1 to 7.2) did not reach their init on it.
//!
//! Nearly everything that the machine may touch arrives as an open descriptor, so that QEMU needs
//! no right on any path but kernel, initramfs and its own program files. vfio-user sockets and
//! guest memory have to be named by paths, since QEMU opens them itself. It gets a path-only
//! descriptor of each socket, and the memory's descriptor, and reaches them through
//! `/proc/self/fd`, which also lifts the 107-byte limit of socket paths. The exception is a
//! function of the host: QEMU opens its IOMMU group by the path, for which it has the right during
//! the start only (`crate::assigned`). All paths are used before the guest runs.

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::Path;

use serde_json::{Value, json};

use crate::accel::is_emulated;
use crate::launch::Common;
use crate::qmp::PORT;
use crate::{Accel, AssignedFunction, DiskModel, EmulatedNic, NicModel, VmSpec};

/// The name of the virtio-serial port that the agent serves.
pub(super) const AGENT_PORT: &str = "slipway.agent";

/// The first of QEMU's descriptor sets for disks; set 1 is the KVM device.
const FIRST_DISK_SET: usize = 2;

/// A q35 without the parts that a sandbox never uses. `smm=off` saves 0.06 s of start-up under
/// emulation.
const MACHINE: &str = "q35,memory-backend=ram,usb=off,sata=off,smbus=off,vmport=off,hpet=off,\
                       i8042=off,graphics=off,smm=off";

/// The words that QEMU's machine adds to the kernel command line. A guest resets itself by a triple
/// fault, which needs no device, and QEMU, which runs with `-no-reboot`, then ends.
const WORDS: [&str; 1] = ["reboot=t"];

/// The words for a guest with an IOMMU, in place of [`WORDS`]. The IOMMU translates for no device
/// until the type of the device's group is changed in sysfs. If it translated for all devices, the
/// guest would have to map and unmap each buffer at the servers of its vfio-user functions.
const IOMMU_WORDS: [&str; 3] = [WORDS[0], "intel_iommu=on", "iommu=pt"];

/// The numbers of the child's descriptors.
#[derive(Clone, Debug)]
pub(super) struct Passed {
    /// The descriptors that any VMM has.
    pub(super) common: Common,
    /// Path-only descriptors of the vfio-user sockets.
    pub(super) functions: Vec<RawFd>,
    /// The files of the emulated disks, each with a flag that it is a block device.
    pub(super) disks: Vec<(RawFd, bool)>,
    /// The TAP interface of the emulated network interface.
    pub(super) tap: Option<RawFd>,
}

/// Builds the command line for a checked spec.
pub(super) fn build(spec: &VmSpec, accel: Accel, passed: &Passed) -> Vec<OsString> {
    let mut arguments = Arguments::default();
    base(&mut arguments, spec, accel, &passed.common);
    if has_iommu(spec) {
        iommu(&mut arguments);
    }
    boot(&mut arguments, spec);
    channels(&mut arguments, &passed.common);
    // The function of the host comes before functions over vfio-user. In the other order, QEMU 11
    // takes the first vfio-user function for a container of VFIO, and crashes.
    if let Some(function) = &spec.assigned {
        assigned(&mut arguments, spec, function);
    }
    for (index, function) in passed.functions.iter().enumerate() {
        let socket = json!({ "type": "unix", "path": format!("/proc/self/fd/{function}") });
        let addr = slot(index);
        let device = json!({ "driver": "vfio-user-pci", "socket": socket, "addr": addr });
        arguments.json("-device", &device);
    }
    for (index, file) in passed.disks.iter().enumerate() {
        disk(&mut arguments, spec, index, *file);
    }
    if let Some((own, tap)) = spec.nic.as_ref().zip(passed.tap) {
        nic(&mut arguments, spec, own, tap);
    }
    for index in 0..spec.plug_slots {
        port(&mut arguments, spec, index);
    }
    arguments.0
}

/// Returns the slot of the device `index` in QEMU's notation. Devices are in this order: functions
/// over vfio-user, disks, the network interface, the function of the host, ports.
fn slot(index: usize) -> String {
    format!("{:x}", VmSpec::FIRST_SLOT + index)
}

/// Returns the index, for [`slot`], of the first device behind the disks.
fn behind_disks(spec: &VmSpec) -> usize {
    spec.vfio_user_sockets.len() + spec.disks.len()
}

/// Adds a network interface that QEMU emulates, without the threads of vhost: QEMU's own device is
/// what is measured.
fn nic(arguments: &mut Arguments, spec: &VmSpec, nic: &EmulatedNic, tap: RawFd) {
    arguments.pair("-netdev", format!("tap,id=nic,fd={tap},vhost=off"));
    let driver = match nic.model {
        NicModel::E1000 => "e1000",
        NicModel::VirtioNet => "virtio-net-pci",
    };
    let addr = slot(behind_disks(spec));
    let device = json!({
        "driver": driver, "netdev": "nic", "mac": nic.mac, "addr": addr, "romfile": "",
    });
    arguments.json("-device", &device);
}

/// Returns whether the guest has an IOMMU.
fn has_iommu(spec: &VmSpec) -> bool {
    spec.assigned.as_ref().is_some_and(|function| function.iommu)
}

/// Adds an IOMMU, which must precede the devices behind it. Its caching mode tells VFIO of the
/// guest's mappings. Its addresses have 39 bits, as few as those of any host's IOMMU. It does not
/// remap interrupts, as KVM's own interrupt controller requires.
fn iommu(arguments: &mut Arguments) {
    let device = json!({
        "driver": "intel-iommu", "caching-mode": true, "intremap": "off", "aw-bits": 39,
    });
    arguments.json("-device", &device);
}

/// Adds a function of the host, which QEMU opens by VFIO.
fn assigned(arguments: &mut Arguments, spec: &VmSpec, function: &AssignedFunction) {
    let addr = slot(behind_disks(spec) + usize::from(spec.nic.is_some()));
    let device = json!({
        "driver": "vfio-pci", "host": function.address, "addr": addr, "romfile": "",
    });
    arguments.json("-device", &device);
}

/// Adds a port to which a function can be added while the VM runs: QEMU's root bus takes none.
fn port(arguments: &mut Arguments, spec: &VmSpec, index: usize) {
    let single = usize::from(spec.nic.is_some()) + usize::from(spec.assigned.is_some());
    let device = json!({
        "driver": "pcie-root-port",
        "id": format!("{PORT}{index}"),
        "chassis": index + 1,
        "addr": slot(behind_disks(spec) + single + index),
    });
    arguments.json("-device", &device);
}

/// Adds a disk that QEMU emulates, configured for speed as QEMU's documentation recommends: no page
/// cache, io_uring, and for virtio-blk a thread of its own (QEMU's NVMe controller cannot have
/// one).
fn disk(arguments: &mut Arguments, spec: &VmSpec, index: usize, (file, device): (RawFd, bool)) {
    let (disk, set, node) = (&spec.disks[index], FIRST_DISK_SET + index, format!("disk{index}"));
    arguments.pair("-add-fd", format!("fd={file},set={set}"));
    let block = json!({
        "driver": if device { "host_device" } else { "file" },
        "node-name": node,
        "filename": format!("/dev/fdset/{set}"),
        "read-only": disk.read_only,
        "aio": "io_uring",
        "cache": { "direct": true },
        // The launcher decides who may use a file.
        "locking": "off",
        "discard": "unmap",
    });
    arguments.json("-blockdev", &block);
    let addr = slot(spec.vfio_user_sockets.len() + index);
    let front = match disk.model {
        DiskModel::Nvme => json!({
            "driver": "nvme", "serial": node, "drive": node, "addr": addr,
        }),
        DiskModel::VirtioBlk => {
            let thread = format!("thread{index}");
            arguments.json("-object", &json!({ "qom-type": "iothread", "id": thread }));
            json!({ "driver": "virtio-blk-pci", "drive": node, "iothread": thread, "addr": addr })
        }
    };
    arguments.json("-device", &front);
}

/// Adds the machine: its sandbox, CPUs and memory.
fn base(arguments: &mut Arguments, spec: &VmSpec, accel: Accel, passed: &Common) {
    arguments.flag("-nodefaults").flag("-no-user-config").flag("-no-reboot");
    // The guest executes no instruction until the launcher has closed the cage and sends `cont`.
    arguments.flag("-S");
    arguments.pair("-display", "none");
    arguments.pair("-name", format!("slipway-{}", spec.name));
    arguments.pair(
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    );
    arguments.pair("-machine", MACHINE);
    accelerator(arguments, accel, passed.kvm);
    arguments.pair("-smp", processors(spec));
    arguments.pair("-m", format!("{}M", spec.memory.bytes() >> 20));
    // The memory is shared, so that the plane can map it.
    let memory = json!({
        "qom-type": "memory-backend-file",
        "id": "ram",
        "mem-path": format!("/proc/self/fd/{}", passed.memory),
        "size": spec.memory.bytes(),
        "share": true,
    });
    arguments.json("-object", &memory);
}

/// Adds the accelerator and the CPU model. `kvm` is the descriptor of the KVM device.
fn accelerator(arguments: &mut Arguments, accel: Accel, kvm: Option<RawFd>) {
    match (accel, kvm) {
        (Accel::Kvm, Some(device)) => {
            arguments.pair("-add-fd", format!("fd={device},set=1"));
            // An emulated host delivers some interrupts twice to a guest that uses KVM's PV EOI.
            let cpu = if is_emulated() { "host,kvm-pv-eoi=off" } else { "host" };
            arguments.pair("-accel", "kvm,device=/dev/fdset/1").pair("-cpu", cpu);
        }
        // The CPU has all features of the emulation, so that programs built for recent CPUs run,
        // but no 57-bit addresses, which only make page walks longer.
        _ => {
            arguments.pair("-accel", "tcg").pair("-cpu", "max,la57=off");
        }
    }
}

/// Returns the value of `-smp`. If CPUs can be added later, each CPU is a core, so that `core-id`
/// tells them apart.
fn processors(spec: &VmSpec) -> String {
    match (spec.cpus, spec.cpus + spec.plug_cpus) {
        (cpus, most) if most == cpus => cpus.to_string(),
        (cpus, most) => format!("cpus={cpus},maxcpus={most},sockets=1,cores={most},threads=1"),
    }
}

/// Adds the firmware, the kernel, the initramfs and the kernel command line.
fn boot(arguments: &mut Arguments, spec: &VmSpec) {
    arguments.pair("-bios", "qboot.rom");
    arguments.path("-kernel", &spec.kernel).path("-initrd", &spec.initramfs);
    let own: &[&str] = if has_iommu(spec) { &IOMMU_WORDS } else { &WORDS };
    arguments.pair("-append", spec.kernel_words(own));
}

/// Adds the control channel (QMP), the console, the agent's port and the source of random bytes.
fn channels(arguments: &mut Arguments, passed: &Common) {
    arguments.pair("-chardev", format!("socket,id=qmp,fd={},server=on,wait=off", passed.control));
    arguments.pair("-mon", "chardev=qmp,mode=control");
    // The console is standard output, which the launcher reads into a bounded log.
    arguments.pair("-chardev", "stdio,id=console,signal=off,mux=off");
    arguments.pair("-serial", "chardev:console");
    arguments.pair("-chardev", format!("socket,id=agent,fd={},server=on,wait=off", passed.agent));
    arguments.json("-device", &json!({ "driver": "virtio-serial-pci", "max_ports": 2 }));
    let port = json!({ "driver": "virtserialport", "chardev": "agent", "name": AGENT_PORT });
    arguments.json("-device", &port);
    arguments.json("-device", &json!({ "driver": "virtio-rng-pci" }));
}

/// A command line under construction.
#[derive(Default)]
struct Arguments(Vec<OsString>);

impl Arguments {
    fn flag(&mut self, flag: &str) -> &mut Self {
        self.0.push(flag.into());
        self
    }

    fn pair(&mut self, option: &str, value: impl Into<OsString>) -> &mut Self {
        self.flag(option);
        self.0.push(value.into());
        self
    }

    /// Adds an option with a path, which is made absolute, since QEMU runs in another directory.
    fn path(&mut self, option: &str, path: &Path) -> &mut Self {
        let absolute = std::path::absolute(path);
        self.pair(option, absolute.unwrap_or_else(|_| path.to_owned()))
    }

    fn json(&mut self, option: &str, value: &Value) -> &mut Self {
        self.pair(option, value.to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::spec::tests::spec;
    use crate::{EmulatedDisk, Error};

    fn line(accel: Accel, kvm: Option<RawFd>) -> String {
        lined(&spec(), &[], accel, kvm)
    }

    fn lined(spec: &VmSpec, disks: &[(RawFd, bool)], accel: Accel, kvm: Option<RawFd>) -> String {
        let functions = vec![7, 8];
        let disks = disks.to_vec();
        let common = Common { memory: 3, lease: None, control: 5, agent: 6, kvm };
        let tap = spec.nic.as_ref().map(|_| 13);
        let passed = Passed { common, functions, disks, tap };
        let arguments = build(spec, accel, &passed);
        arguments.iter().map(|a| a.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn every_function_is_a_device_on_its_own_descriptor() {
        let line = line(Accel::Tcg, None);
        for (addr, path) in [(4, "/proc/self/fd/7"), (5, "/proc/self/fd/8")] {
            let socket = format!(r#"{{"path":"{path}","type":"unix"}}"#);
            let device = format!(
                r#"-device {{"addr":"{addr}","driver":"vfio-user-pci","socket":{socket}}}"#
            );
            assert!(line.contains(&device), "{line}");
        }
    }

    #[test]
    fn an_emulated_disk_is_a_descriptor_behind_the_functions() {
        let path = PathBuf::from("/d,isk");
        let disk = |model| EmulatedDisk { model, path: path.clone(), read_only: false };
        let disks = vec![disk(DiskModel::Nvme), disk(DiskModel::VirtioBlk)];
        let spec = VmSpec { disks, ..spec() };
        let line = lined(&spec, &[(11, false), (12, true)], Accel::Tcg, None);
        assert!(!line.contains("d,isk"), "{line}");
        assert!(line.contains("-add-fd fd=11,set=2 -blockdev {"), "{line}");
        assert!(line.contains(r#""driver":"file","filename":"/dev/fdset/2""#), "{line}");
        assert!(line.contains(r#""driver":"host_device","filename":"/dev/fdset/3""#), "{line}");
        assert!(line.contains(r#"{"addr":"6","drive":"disk0","driver":"nvme""#), "{line}");
        assert!(line.contains(r#"{"addr":"7","drive":"disk1","driver":"virtio-blk-pci""#));
        let many = VmSpec { disks: vec![disk(DiskModel::Nvme); 23], ..spec };
        assert!(matches!(many.check(), Err(Error::BadSpec { .. })), "2 + 23 functions");
    }

    #[test]
    fn functions_that_may_come_have_ports_behind_disks_and_an_interface() {
        let disk =
            EmulatedDisk { model: DiskModel::Nvme, path: PathBuf::from("/d"), read_only: true };
        let spec = VmSpec { disks: vec![disk], plug_slots: 2, ..spec() };
        let line = lined(&spec, &[(11, false)], Accel::Tcg, None);
        let nic = |model| {
            let (tap, mac) = ("tap0".to_owned(), "52:54:00:00:00:01".to_owned());
            VmSpec { nic: Some(EmulatedNic { model, tap, mac }), ..spec.clone() }
        };
        for (model, driver) in [(NicModel::E1000, "e1000"), (NicModel::VirtioNet, "virtio-net-pci")]
        {
            let line = lined(&nic(model), &[(11, false)], Accel::Tcg, None);
            assert!(line.contains("-netdev tap,id=nic,fd=13,vhost=off"), "{line}");
            assert!(line.contains(&format!(r#"-device {{"addr":"7","driver":"{driver}","mac""#)));
            assert!(line.contains(r#"-device {"addr":"8","chassis":1,"#), "{line}");
        }
        for port in [
            r#"-device {"addr":"7","chassis":1,"driver":"pcie-root-port","id":"port-0"}"#,
            r#"-device {"addr":"8","chassis":2,"driver":"pcie-root-port","id":"port-1"}"#,
        ] {
            assert!(line.contains(port), "{line}");
        }
    }

    #[test]
    fn a_function_of_the_host_is_behind_an_iommu_if_asked() {
        let with = |iommu| {
            let assigned = Some(AssignedFunction { address: "0000:01:10.0".into(), iommu });
            lined(&VmSpec { assigned, plug_slots: 1, ..spec() }, &[], Accel::Tcg, None)
        };
        let device = r#"{"addr":"6","driver":"vfio-pci","host":"0000:01:10.0","romfile":""}"#;
        let plain = with(false);
        assert!(plain.contains(&format!("-device {device}")), "{plain}");
        assert!(plain.contains(r#"-device {"addr":"7","chassis":1,"#), "{plain}");
        let (own, served) = (plain.find("\"vfio-pci\""), plain.find("\"vfio-user-pci\""));
        assert!(own.is_some() && own < served, "{plain}");
        assert!(!plain.contains("iommu"), "{plain}");
        let behind = with(true);
        let first = behind.find("-device ").unwrap();
        assert!(behind[first..].starts_with(r#"-device {"aw-bits":39,"caching-mode":true,"#));
        assert!(behind.contains("reboot=t intel_iommu=on iommu=pt"), "{behind}");
    }

    #[test]
    fn memory_is_shared_the_sandbox_is_on_and_the_guest_waits() {
        let line = line(Accel::Tcg, None);
        let file = r#""mem-path":"/proc/self/fd/3","qom-type":"memory-backend-file""#;
        let memory = format!(r#"{file},"share":true,"size":268435456"#);
        assert!(line.contains(&memory), "{line}");
        assert!(line.contains(" -S "), "{line}");
        assert!(line.contains("-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny"));
        assert!(line.contains("-initrd /k/initramfs,with comma.cpio"));
        assert!(line.contains("jent_mod_init reboot=t slipway.debug=1"));
    }

    #[test]
    fn cpus_that_may_come_are_cores() {
        let fixed = line(Accel::Tcg, None);
        assert!(fixed.contains("-smp 2 "), "{fixed}");
        let more = lined(&VmSpec { plug_cpus: 2, ..spec() }, &[], Accel::Tcg, None);
        assert!(more.contains("-smp cpus=2,maxcpus=4,sockets=1,cores=4,threads=1 "), "{more}");
    }

    #[test]
    fn kvm_is_handed_over_as_a_descriptor() {
        let kvm = line(Accel::Kvm, Some(9));
        assert!(kvm.contains("-add-fd fd=9,set=1 -accel kvm,device=/dev/fdset/1 -cpu host"));
        assert!(line(Accel::Tcg, None).contains("-accel tcg"));
    }
}
