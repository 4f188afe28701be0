//! The launcher's side of `slipway-vmm`: this test program in the VMM's place speaks the control
//! protocol and uses what it is given. What a guest does is left to the tests of the VMM itself.
#![allow(clippy::unwrap_used)] // A failed unwrap in a test is the failure report.
#![allow(unsafe_code)] // The program takes over descriptors by their numbers.

mod program;
mod spare;
mod wait;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use slipway_hypervisor::native::SlipwayVmm;
use slipway_hypervisor::{
    Accel, AccelChoice, CpuTemplate, Credentials, FreePages, GuestMemory, Hypervisor, LeftVm,
    ShutdownReason, VmEvent, VmRecord, VmSpec, Vmms,
};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(120);
const MEMORY: u64 = 128 << 20;

/// `nobody` and `nogroup`, on every Debian.
const NOBODY: Credentials = Credentials { uid: 65534, gid: 65534 };

fn open_to_all(path: &Path) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Copies this program so that any user may run it, and makes a script that runs it as the VMM.
fn vmm(directory: &Path) -> PathBuf {
    let (copy, text) = (directory.join("program"), directory.join("text"));
    let script = directory.join("slipway-vmm");
    let line = format!(
        "#!/bin/sh\nVMM_ARGUMENTS=\"$*\" exec {} --exact program::main --ignored --nocapture\n",
        copy.display()
    );
    fs::write(&text, line).unwrap();
    // Copied by another process: our own descriptor could be inherited by a child, and then the
    // file could not be executed.
    for (from, to) in [(&std::env::current_exe().unwrap(), &copy), (&text, &script)] {
        assert!(Command::new("cp").args([from, to]).status().unwrap().success());
        open_to_all(to);
    }
    script
}

fn spec(directory: &Path, functions: &[PathBuf]) -> VmSpec {
    let run_dir = directory.join("vm");
    fs::create_dir(&run_dir).unwrap();
    let (kernel, initramfs) = (directory.join("kernel"), directory.join("initramfs"));
    for (path, content) in [(&kernel, "the kernel"), (&initramfs, "the initramfs")] {
        fs::write(path, content).unwrap();
        // For the launcher only.
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    }
    VmSpec {
        name: "native".into(),
        memory: GuestMemory::new(MEMORY).unwrap(),
        cpus: 1,
        cpu_template: CpuTemplate::Host,
        kernel,
        initramfs,
        cmdline: Vec::new(),
        agent_socket: run_dir.join("agent"),
        vfio_user_sockets: functions.to_vec(),
        hot_memory: Vec::new(),
        free_pages: FreePages::Unreported,
        shared: None,
        restore: None,
        plug_slots: 0,
        plug_cpus: 0,
        disks: Vec::new(),
        nic: None,
        assigned: None,
        console_log: directory.join("console"),
        run_dir,
        credentials: rustix::process::geteuid().is_root().then_some(NOBODY),
        cgroup_procs: Vec::new(),
        accel: AccelChoice::Only(Accel::Kvm),
    }
}

/// A vfio-user server that looks at nothing but the first bytes of a connection.
struct Server {
    listener: UnixListener,
    path: PathBuf,
}

impl Server {
    fn new(path: PathBuf) -> Self {
        Self { listener: UnixListener::bind(&path).unwrap(), path }
    }

    /// Accepts a connection, and checks what comes over it first.
    fn accept(&self, expected: &str) -> UnixStream {
        let wanted = PollFlags::IN;
        let limit = Timespec { tv_sec: LIMIT.as_secs().cast_signed(), tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(&self.listener, wanted)], Some(&limit)).unwrap();
        assert_eq!(ready, 1, "nobody connects, who would have said {expected}");
        let (mut stream, _) = self.listener.accept().unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut said = vec![0; expected.len()];
        stream.read_exact(&mut said).unwrap();
        assert_eq!(String::from_utf8_lossy(&said), expected);
        stream
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Does `work` in a runtime that ends with it, as in a process that is killed: none of its tasks
/// continues.
fn and_dies<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = { runtime }.worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(LIMIT, work).await.expect("not done in time") })
}

/// Waits on this thread, while other threads drive the VM.
fn meanwhile<T>(work: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(work)
}

fn is_missing(test: &str) -> bool {
    let device = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    if device.is_err() {
        println!("SKIPPED: {test}: needs /dev/kvm, of which nothing is used");
    }
    device.is_err()
}

/// Returns the VM of a launcher that has died.
fn left(spec: &VmSpec, record: VmRecord) -> LeftVm {
    LeftVm {
        record,
        run_dir: spec.run_dir.clone(),
        agent_socket: spec.agent_socket.clone(),
        vfio_user_sockets: spec.vfio_user_sockets.clone(),
        console_log: spec.console_log.clone(),
    }
}

fn directory() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    open_to_all(directory.path());
    directory
}

#[test]
fn a_function_is_connected_again_whoever_the_launcher_is() {
    if is_missing("a_function_is_connected_again_whoever_the_launcher_is") {
        return;
    }
    let directory = directory();
    let native = SlipwayVmm::new(vmm(directory.path()), directory.path());
    let servers = ["one", "two"].map(|name| Server::new(directory.path().join(name)));
    let spec = spec(directory.path(), &servers.each_ref().map(|server| server.path.clone()));
    let (record, first, second) = and_dies(async {
        let vm = native.launch(&spec).await.unwrap();
        assert_eq!((vm.accel(), &*vm.record().hypervisor), (Accel::Kvm, "slipway-vmm"));
        assert!(vm.record().reconnects());
        let kept = meanwhile(|| {
            let first = servers[0].accept("hello 0");
            drop(servers[1].accept("hello 1"));
            (first, servers[1].accept("again 1"))
        });
        vm.detach();
        (vm.record(), kept.0, kept.1)
    });
    // No launcher runs when the connection ends, and no server listens at first when the next
    // launcher comes.
    drop(second);
    let [one, two] = servers;
    let path = two.path.clone();
    drop(two);
    let left = left(&spec, record);
    let vmms = Vmms::new("qemu".parse().unwrap(), Err("none".into()), directory.path());
    let exit = and_dies(async {
        let vm = vmms.adopt(&left).await.unwrap();
        assert_eq!(vm.accel(), Accel::Kvm);
        let again = meanwhile(|| {
            std::thread::sleep(Duration::from_millis(100));
            Server::new(path).accept("again 1")
        });
        vm.quit().await.unwrap();
        let exit = vm.wait().await;
        drop(again);
        exit
    });
    assert_eq!(exit.reason, Some(ShutdownReason::GuestReset), "{exit:?}");
    let console = fs::read_to_string(&spec.console_log).unwrap();
    for fact in ["memory 134217728", "kernel the kernel", "initramfs the initramfs", "runs"] {
        assert!(console.contains(fact), "{fact} is not in {console}");
    }
    // The connection that never ended is the first one.
    one.listener.set_nonblocking(true).unwrap();
    assert!(one.listener.accept().is_err());
    drop(first);
}

#[test]
fn a_function_that_broke_while_no_launcher_ran_is_known_to_the_next() {
    if is_missing("a_function_that_broke_while_no_launcher_ran_is_known_to_the_next") {
        return;
    }
    let directory = directory();
    let native = SlipwayVmm::new(vmm(directory.path()), directory.path());
    let servers = ["one", "two"].map(|name| Server::new(directory.path().join(name)));
    let spec = spec(directory.path(), &servers.each_ref().map(|server| server.path.clone()));
    let (record, first, mut second) = and_dies(async {
        let vm = native.launch(&spec).await.unwrap();
        let both = meanwhile(|| (servers[0].accept("hello 0"), servers[1].accept("hello 1")));
        assert_eq!(vm.broken_functions(), Vec::<PathBuf>::new());
        vm.detach();
        (vm.record(), both.0, both.1)
    });
    second.write_all(b"!").unwrap();
    // The program closes the connection when it has noted that the function is broken.
    assert_eq!(second.read(&mut [0]).unwrap(), 0);
    let left = left(&spec, record);
    and_dies(async {
        let vm = native.adopt(&left).await.unwrap();
        assert_eq!(vm.broken_functions(), [servers[1].path.clone()]);
        vm.quit().await.unwrap();
        vm.wait().await;
    });
    drop(first);
}

/// The CPUs that the program of these tests says it has: numbers, and whether they are there.
const CPUS: [(u32, bool); 2] = [(0, true), (1, false)];

#[test]
fn a_plugged_function_is_connected_again_whoever_the_launcher_is() {
    if is_missing("a_plugged_function_is_connected_again_whoever_the_launcher_is") {
        return;
    }
    let directory = directory();
    let native = SlipwayVmm::new(vmm(directory.path()), directory.path());
    let spec = VmSpec { plug_slots: 1, plug_cpus: 1, ..spec(directory.path(), &[]) };
    let server = Server::new(directory.path().join("more"));
    let (record, connection) = and_dies(async {
        let vm = native.launch(&spec).await.unwrap();
        assert_eq!(vm.record().plugged.len(), 0);
        let absent = vm.plug("more", &directory.path().join("absent")).await.unwrap_err();
        assert!(absent.to_string().contains("absent"), "{absent}");
        assert_eq!(vm.plug("more", &server.path).await.unwrap(), "0000:00:06.0");
        let connection = meanwhile(|| {
            drop(server.accept("hello 2"));
            server.accept("again 2")
        });
        vm.detach();
        (vm.record(), connection)
    });
    // The next launcher knows the function by the record.
    drop(connection);
    let left = left(&spec, record);
    and_dies(async {
        let vm = native.adopt(&left).await.unwrap();
        let mut events = vm.events();
        assert_eq!(vm.record(), left.record);
        let again = meanwhile(|| server.accept("again 2"));
        let cpus = vm.cpus().await.unwrap();
        assert_eq!(cpus.iter().map(|one| (one.cpu, one.present)).collect::<Vec<_>>(), CPUS);
        vm.plug_cpu("cpu", 1).await.unwrap();
        let refused = vm.plug_cpu("more", 2).await.unwrap_err().to_string();
        assert!(refused.contains("no place for CPU 2"), "{refused}");
        vm.unplug("more").await.unwrap();
        while events.recv().await.unwrap() != VmEvent::Unplugged("more".into()) {}
        vm.quit().await.unwrap();
        vm.wait().await;
        drop(again);
    });
}

#[test]
fn a_function_that_nobody_serves_is_named_before_anything_starts() {
    if is_missing("a_function_that_nobody_serves_is_named_before_anything_starts") {
        return;
    }
    let directory = directory();
    let native = SlipwayVmm::new("/nowhere/slipway-vmm".into(), directory.path());
    let absent = directory.path().join("absent");
    let mut spec = spec(directory.path(), std::slice::from_ref(&absent));
    let error = and_dies(native.launch(&spec)).err().expect("no server").to_string();
    let expected = format!("cannot use the vfio-user socket {}", absent.display());
    assert!(error.starts_with(&expected), "{error}");
    spec.vfio_user_sockets.clear();
    let error = and_dies(native.launch(&spec)).err().expect("no program").to_string();
    assert!(error.starts_with("cannot start /nowhere/slipway-vmm"), "{error}");
    assert_eq!(fs::read_dir(&spec.run_dir).unwrap().count(), 0);
}

#[test]
fn a_machine_is_saved_with_its_memory_and_without() {
    if is_missing("a_machine_is_saved_with_its_memory_and_without") {
        return;
    }
    let directory = directory();
    let native = SlipwayVmm::new(vmm(directory.path()), directory.path());
    let spec = spec(directory.path(), &[]);
    and_dies(async {
        let vm = native.launch(&spec).await.unwrap();
        assert_eq!(vm.save().await.unwrap(), b"state");
        let (tell, told) = std::sync::mpsc::channel();
        let keep = move |offset: u64, page: &[u8]| {
            tell.send((offset, page.to_vec())).map_err(std::io::Error::other)
        };
        let state = vm.save_with_memory(MEMORY, Box::new(keep)).await.unwrap();
        assert_eq!(state, b"state");
        assert_eq!(told.iter().collect::<Vec<_>>(), [(4096, vec![7; 4096])]);
        // Most of it ahead, in two rounds.
        let (tell, told) = std::sync::mpsc::channel();
        for rest in [false, true] {
            let tell = tell.clone();
            let keep = Box::new(move |offset: u64, page: &[u8]| {
                tell.send((offset, page[0])).map_err(std::io::Error::other)
            });
            match rest {
                false => vm.copy_ahead(MEMORY, keep).await.unwrap(),
                true => assert_eq!(vm.save_rest(MEMORY, keep).await.unwrap(), b"state"),
            }
        }
        drop(tell);
        assert_eq!(told.iter().collect::<Vec<_>>(), [(8192, 5), (8192, 6), (4096, 8)]);
        // A page behind the memory.
        let none = |_: u64, _: &[u8]| -> std::io::Result<()> { panic!("it was taken") };
        let refused = vm.save_with_memory(4096, Box::new(none)).await.unwrap_err().to_string();
        assert!(refused.contains("with a page at 4096"), "{refused}");
        vm.quit().await.unwrap();
        vm.wait().await;
    });
}
