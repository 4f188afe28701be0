//! A real QEMU boots a real kernel. The tests are skipped, with a message, if one of them is
//! missing.
#![allow(clippy::unwrap_used)] // A failed unwrap in a test is the failure report.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use slipway_hypervisor::qemu::Qemu;
use slipway_hypervisor::{
    Accel, AccelChoice, CpuTemplate, Credentials, DiskModel, EmulatedDisk, Error, FreePages,
    GuestMemory, Hypervisor, LeftVm, ShutdownReason, Vm, VmEvent, VmSpec, reap_leftover,
};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(120);

/// `nobody` and `nogroup`, on every Debian.
const NOBODY: Credentials = Credentials { uid: 65534, gid: 65534 };

/// An initramfs without an init: the kernel finds no root and panics, at the end of its start-up.
const NO_INIT: &[u8] = b"07070100000000000000000000000000000000000000010000000000000000\
00000000000000000000000000000000000000000000000b00000000TRAILER!!!\0\0\0\0";

struct Machine {
    qemu: Qemu,
    directory: TempDir,
    kernel: PathBuf,
}

impl Machine {
    /// Finds QEMU and the kernel. Returns `None` after printing what is missing.
    fn new(test: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let kernel = std::env::var_os("SLIPWAY_KERNEL")
            .map_or_else(|| "/var/lib/slipway/kernel/vmlinuz".into(), PathBuf::from);
        let qemu = match Qemu::find(&directory.path().join("cache")) {
            Ok(qemu) => qemu,
            Err(error) => return skip(test, &error.to_string()),
        };
        if !kernel.exists() {
            return skip(test, &format!("the guest kernel {}", kernel.display()));
        }
        Some(Self { qemu, directory, kernel })
    }

    fn spec(&self, name: &str) -> VmSpec {
        let run_dir = self.directory.path().join(name);
        fs::create_dir(&run_dir).unwrap();
        let initramfs = self.directory.path().join(format!("{name}.cpio"));
        fs::write(&initramfs, NO_INIT).unwrap();
        VmSpec {
            name: name.into(),
            memory: GuestMemory::new(128 << 20).unwrap(),
            cpus: 1,
            cpu_template: CpuTemplate::Host,
            kernel: self.kernel.clone(),
            initramfs,
            cmdline: Vec::new(),
            agent_socket: run_dir.join("agent"),
            vfio_user_sockets: Vec::new(),
            hot_memory: Vec::new(),
            free_pages: FreePages::Unreported,
            shared: None,
            restore: None,
            plug_slots: 0,
            plug_cpus: 0,
            disks: Vec::new(),
            nic: None,
            assigned: None,
            console_log: run_dir.join("console"),
            run_dir,
            credentials: is_root().then_some(NOBODY),
            cgroup_procs: Vec::new(),
            accel: AccelChoice::Auto,
        }
    }

    async fn launch(&self, spec: &VmSpec) -> Box<dyn Vm> {
        self.qemu.launch(spec).await.unwrap()
    }
}

fn skip<T>(test: &str, what: &str) -> Option<T> {
    println!("SKIPPED: {test}: needs {what}");
    None
}

fn is_root() -> bool {
    fs::read_to_string("/proc/self/status").unwrap().contains("Uid:\t0\t0")
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, future).await.expect("not done in time")
}

/// Returns the value of a line of `/proc/PID/status`.
fn status(pid: i32, key: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    line.trim_start_matches(':').split_whitespace().collect::<Vec<_>>().join(" ")
}

#[tokio::test]
async fn qemu_boots_a_kernel_and_reports_its_end() {
    let Some(machine) = Machine::new("qemu_boots_a_kernel_and_reports_its_end") else { return };
    let spec = machine.spec("boot");
    let vm = within(machine.launch(&spec)).await;
    println!("{}: vmm {:?}", vm.accel(), vm.times().map(|times| times.vmm()));
    // The agent's port accepts a connection whatever its guest does.
    UnixStream::connect(&spec.agent_socket).unwrap();
    let exit = within(vm.wait()).await;
    let console = fs::read_to_string(&spec.console_log).unwrap();
    assert!(console.contains("Unable to mount root fs"), "{exit}\n{console}");
    assert_eq!((exit.code, exit.reason), (Some(0), Some(ShutdownReason::GuestReset)), "{exit:?}");
    assert!(!spec.agent_socket.exists());
    assert!(!vm.record().is_running().unwrap());
    vm.kill().unwrap();
}

/// QEMU uses its own disks through descriptors: it has no right to open them itself.
#[tokio::test]
async fn qemu_emulates_disks_that_it_may_not_open() {
    let Some(machine) = Machine::new("qemu_emulates_disks_that_it_may_not_open") else { return };
    let mut spec = machine.spec("disks");
    for (name, model) in [("nvme", DiskModel::Nvme), ("virtio", DiskModel::VirtioBlk)] {
        let path = machine.directory.path().join(name);
        fs::write(&path, vec![0; 1 << 20]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        spec.disks.push(EmulatedDisk { model, path, read_only: false });
    }
    // The disk is empty: the kernel waits for it and then finds no file system on it.
    spec.cmdline = ["root=/dev/nvme0n1", "rootwait"].map(String::from).to_vec();
    let vm = within(machine.launch(&spec)).await;
    let exit = within(vm.wait()).await;
    let console = fs::read_to_string(&spec.console_log).unwrap();
    let found = "Unable to mount root fs on unknown-block(259,";
    assert!(console.contains(found), "{exit}\n{console}");
    spec.disks[0].path = machine.directory.path().join("absent");
    let error = machine.qemu.launch(&spec).await.err().expect("no launch").to_string();
    assert!(error.contains("cannot use the disk") && error.contains("absent"), "{error}");
}

#[tokio::test]
async fn qemu_is_paused_resumed_and_quits_without_rights() {
    let Some(machine) = Machine::new("qemu_is_paused_resumed_and_quits_without_rights") else {
        return;
    };
    let vm = within(machine.launch(&machine.spec("control"))).await;
    let pid = vm.record().pid;
    // QEMU has its seccomp filter, no privileges, and a session of its own.
    assert_eq!((status(pid, "Seccomp").as_str(), status(pid, "NoNewPrivs").as_str()), ("2", "1"));
    assert!(status(pid, "NSsid").starts_with(&pid.to_string()));
    assert!(fs::read(format!("/proc/{pid}/environ")).unwrap().is_empty());
    if is_root() {
        for namespace in ["net", "mnt", "pid", "ipc", "uts", "cgroup"] {
            let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{namespace}")).unwrap();
            assert_ne!(of(&pid.to_string()), of("self"), "{namespace}");
        }
        assert_eq!(status(pid, "NSpid"), format!("{pid} 1"));
        // The cage's filter and QEMU's own.
        assert_eq!(status(pid, "Seccomp_filters"), "2");
        for place in ["root", "cwd"] {
            assert_eq!(fs::read_dir(format!("/proc/{pid}/{place}")).unwrap().count(), 0, "{place}");
        }
        let mounts = fs::read_to_string(format!("/proc/{pid}/mounts")).unwrap();
        assert_eq!(mounts.lines().count(), 1, "{mounts}");
        assert_eq!(status(pid, "Uid"), "65534 65534 65534 65534");
        assert_eq!(status(pid, "Gid"), "65534 65534 65534 65534");
        assert_eq!(status(pid, "Groups"), "");
        assert_eq!(status(pid, "CapPrm"), "0000000000000000");
    }
    let mut events = vm.events();
    vm.pause().await.unwrap();
    assert_eq!(within(events.recv()).await.unwrap(), VmEvent::Stopped);
    let refused = vm.plug("more", Path::new("/nowhere")).await.unwrap_err();
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
    assert!(matches!(vm.plug_cpu("more", 1).await, Err(Error::Refused { .. })));
    vm.unplug("more").await.unwrap_err();
    vm.resume().await.unwrap();
    assert_eq!(within(events.recv()).await.unwrap(), VmEvent::Resumed);
    vm.quit().await.unwrap();
    let exit = within(vm.wait()).await;
    assert_eq!((exit.code, exit.reason), (Some(0), Some(ShutdownReason::Host)), "{exit:?}");
    assert!(matches!(vm.quit().await, Err(Error::Control(_))));
}

/// A machine that was made for more CPUs gets one, in the cage. Its guest is paused, so it keeps
/// the CPU that it is asked to give up on KVM. Under software emulation it is not asked.
#[tokio::test]
async fn qemu_is_given_a_cpu() {
    let Some(machine) = Machine::new("qemu_is_given_a_cpu") else { return };
    let mut spec = machine.spec("cpus");
    spec.plug_cpus = 2;
    let vm = within(machine.launch(&spec)).await;
    vm.pause().await.unwrap();
    let present = async || {
        let cpus = vm.cpus().await.unwrap();
        assert!(cpus.iter().map(|one| one.cpu).eq(0..3), "{cpus:?}");
        cpus.iter().map(|one| one.present).collect::<Vec<_>>()
    };
    assert_eq!(present().await, [true, false, false]);
    vm.plug_cpu("cpu-1", 1).await.unwrap();
    assert_eq!(present().await, [true, true, false]);
    for (name, cpu) in [("cpu-1", 2), ("again", 1), ("beyond", 3)] {
        let refused = vm.plug_cpu(name, cpu).await.unwrap_err();
        assert!(matches!(refused, Error::Refused { .. }), "{name}: {refused}");
    }
    match vm.unplug("cpu-1").await {
        Err(Error::Unsupported { .. }) => assert_eq!(vm.accel(), Accel::Tcg),
        asked => asked.unwrap(),
    }
    assert_eq!(present().await, [true, true, false]);
    vm.quit().await.unwrap();
    within(vm.wait()).await;
}

#[tokio::test]
async fn qemu_dies_with_its_object_unless_detached() {
    let Some(machine) = Machine::new("qemu_dies_with_its_object_unless_detached") else { return };
    let dropped = within(machine.launch(&machine.spec("dropped"))).await;
    let record = dropped.record();
    drop(dropped);
    within(async {
        while record.is_running().unwrap() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;

    let mut spec = machine.spec("detached");
    spec.cpus = 2;
    let detached = within(machine.launch(&spec)).await;
    let record = detached.record();
    detached.pause().await.unwrap();
    detached.detach();
    drop(detached);
    assert!(record.is_running().unwrap());
    assert!(reap_leftover(&record, LIMIT).unwrap());
    assert!(!record.is_running().unwrap());
}

/// Does `work` in a runtime that ends with it, as in a process that is killed: none of its tasks
/// continues.
fn and_dies<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(within(work))
}

/// After the launcher is gone, one process after the other takes the VM over, and the last one
/// learns of its end.
#[test]
fn qemu_is_taken_over_by_one_after_the_other() {
    let Some(machine) = Machine::new("qemu_is_taken_over_by_one_after_the_other") else { return };
    let spec = machine.spec("adopted");
    let record = and_dies(async {
        let vm = machine.launch(&spec).await;
        // Paused, so that the console text comes after the launcher has ended.
        vm.pause().await.unwrap();
        vm.detach();
        vm.record()
    });
    let left = LeftVm {
        record,
        run_dir: spec.run_dir.clone(),
        agent_socket: spec.agent_socket.clone(),
        vfio_user_sockets: Vec::new(),
        console_log: spec.console_log.clone(),
    };
    and_dies(async { machine.qemu.adopt(&left).await.unwrap().detach() });
    assert!(left.record.is_running().unwrap());
    let exit = and_dies(async {
        let vm = machine.qemu.adopt(&left).await.unwrap();
        assert!(vm.times().is_none());
        UnixStream::connect(&spec.agent_socket).unwrap();
        vm.resume().await.unwrap();
        vm.wait().await
    });
    let console = fs::read_to_string(&spec.console_log).unwrap();
    assert!(console.contains("Unable to mount root fs"), "{exit}\n{console}");
    assert_eq!(exit.reason, Some(ShutdownReason::GuestReset), "{exit:?}");
    assert!(!spec.agent_socket.exists());
    let gone = and_dies(machine.qemu.adopt(&left)).err().expect("nothing to take over");
    assert!(gone.to_string().contains("ended"), "{gone}");
}

#[tokio::test]
async fn qemu_says_what_it_does_not_like() {
    let Some(machine) = Machine::new("qemu_says_what_it_does_not_like") else { return };
    let mut spec = machine.spec("bad");
    spec.accel = AccelChoice::Only(Accel::Tcg);
    spec.kernel = PathBuf::from("/dev/null");
    let error = within(machine.qemu.launch(&spec)).await.err().expect("no kernel, no VM");
    assert!(matches!(error, Error::Died { .. }), "{error}");
    assert!(error.to_string().contains("/dev/null"), "{error}");
    assert!(!Path::new(&spec.agent_socket).exists());
}

#[tokio::test]
async fn accelerator_probe_gives_its_reason() {
    let Some(machine) = Machine::new("accelerator_probe_gives_its_reason") else { return };
    let report = within(machine.qemu.probe(&machine.kernel)).await;
    println!("{report}");
    assert!(!report.reason.is_empty());
}

/// QEMU has no right to the directory of the socket, only to the socket itself, whose path is
/// longer than a socket address can hold.
#[tokio::test]
async fn qemu_reaches_a_vfio_user_socket_in_a_closed_directory() {
    let name = "qemu_reaches_a_vfio_user_socket_in_a_closed_directory";
    let Some(machine) = Machine::new(name) else { return };
    let closed = machine.directory.path().join("c".repeat(60)).join("d".repeat(60));
    fs::create_dir_all(&closed).unwrap();
    let mut spec = machine.spec("function");
    let short = machine.directory.path().join("socket");
    let listener = std::os::unix::net::UnixListener::bind(&short).unwrap();
    fs::set_permissions(&short, fs::Permissions::from_mode(0o666)).unwrap();
    let long = closed.join("cntrl");
    fs::rename(&short, &long).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
    spec.vfio_user_sockets = vec![long];
    // The header of VFIO_USER_VERSION: message id, command 1, size, flags 0. Then the server hangs
    // up.
    let server = std::thread::spawn(move || {
        let mut header = [0; 16];
        let (mut client, _) = listener.accept().unwrap();
        std::io::Read::read_exact(&mut client, &mut header).unwrap();
        u16::from_le_bytes([header[2], header[3]])
    });
    let error = within(machine.qemu.launch(&spec)).await.err().expect("no server, no VM");
    assert!(matches!(error, Error::Died { .. }), "{error}");
    assert_eq!(server.join().unwrap(), 1, "{error}");
}
