//! A VMM that was taken over: this test program itself in the place of QEMU and of `slipway-vmm`,
//! started by the launcher as they are, tries to reach resources of its host and of other
//! sandboxes. Each attack succeeds from a process of the same user without the cage,
//! which the test checks first.
#![allow(clippy::unwrap_used)] // A failed unwrap in a test is the failure report.
#![allow(unsafe_code)] // An attacker's system calls.

mod attacks;
mod taken_over;
#[path = "../native/wait.rs"]
mod wait;

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use slipway_hypervisor::native::SlipwayVmm;
use slipway_hypervisor::qemu::Qemu;
use slipway_hypervisor::{
    Accel, AccelChoice, CpuTemplate, Credentials, FreePages, GuestMemory, Hypervisor, Spare,
    SpareSpec, VmSpec, reap_leftover,
};

use attacks::Targets;

const LIMIT: Duration = Duration::from_secs(120);
/// A user that no other program has.
const USER: Credentials = Credentials { uid: 1_879_048_111, gid: 1_879_048_111 };
/// The last line that the program prints.
const DONE: &str = "every way was tried";

/// The host's resources, which the program attacks.
struct Host {
    directory: tempfile::TempDir,
    targets: Targets,
    victim: Child,
    queue: String,
    _listeners: (UnixListener, UnixListener, TcpListener),
}

impl Host {
    fn new() -> Self {
        static HOSTS: AtomicU32 = AtomicU32::new(0);
        let number = HOSTS.fetch_add(1, Ordering::Relaxed);
        let directory = tempfile::tempdir().unwrap();
        open_to_all(directory.path(), 0o755);
        let file = directory.path().join("file");
        fs::write(&file, "precious").unwrap();
        open_to_all(&file, 0o666);
        let socket = directory.path().join("slipway.sock");
        let path = UnixListener::bind(&socket).unwrap();
        open_to_all(&socket, 0o666);
        let name = format!("slipway-cage-{}-{number}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let hidden = UnixListener::bind_addr(&address).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut victim = Command::new("sleep");
        let victim = victim.arg("1000").uid(USER.uid).gid(USER.gid).spawn().unwrap();
        let queue = format!("/{name}");
        let targets = Targets {
            file,
            socket,
            abstract_name: name,
            port: tcp.local_addr().unwrap().port(),
            process: victim.id() as i32,
            shared_memory: attacks::make_shared_memory(number),
            queue: queue.clone(),
        };
        attacks::make_queue(&queue);
        Self { directory, targets, victim, queue, _listeners: (path, hidden, tcp) }
    }

    /// Copies this program so that USER may run it, and makes a script that runs it in a
    /// VMM's place.
    fn program(&self) -> PathBuf {
        let (copy, script) =
            (self.directory.path().join("program"), self.directory.path().join("qemu"));
        let copied = Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&copy).status();
        assert!(copied.unwrap().success());
        open_to_all(&copy, 0o755);
        let copy = copy.display();
        let text = format!(
            "#!/bin/sh\n\
             case $1 in --version) echo QEMU emulator version 99.0.0; exit;; -device) exit;; esac\n\
             VMM_ARGUMENTS=\"$*\" exec {copy} --exact taken_over::program --ignored --nocapture\n"
        );
        let written = self.directory.path().join("text");
        fs::write(&written, text).unwrap();
        // Copied by another process: our own descriptor could be inherited by a child, and then the
        // script could not be executed.
        assert!(Command::new("cp").args([&written, &script]).status().unwrap().success());
        open_to_all(&script, 0o755);
        script
    }

    fn spec(&self, accel: Accel) -> VmSpec {
        let run_dir = self.directory.path().join("vm");
        fs::create_dir(&run_dir).unwrap();
        open_to_all(&run_dir, 0o700);
        VmSpec {
            name: "taken-over".into(),
            memory: GuestMemory::new(128 << 20).unwrap(),
            cpus: 1,
            cpu_template: CpuTemplate::Host,
            kernel: "/dev/null".into(),
            initramfs: "/dev/null".into(),
            cmdline: self.targets.words(),
            agent_socket: run_dir.join("agent"),
            vfio_user_sockets: vec![self.targets.socket.clone()],
            hot_memory: Vec::new(),
            free_pages: FreePages::Unreported,
            shared: None,
            restore: None,
            plug_slots: 0,
            plug_cpus: 0,
            disks: Vec::new(),
            nic: None,
            assigned: None,
            console_log: self.directory.path().join("console"),
            run_dir,
            credentials: Some(USER),
            cgroup_procs: Vec::new(),
            accel: AccelChoice::Only(accel),
        }
    }

    /// Returns the program's output when the same user runs it outside of a cage.
    fn outside(&self) -> Vec<String> {
        let mut program = Command::new(self.directory.path().join("program"));
        let program = program
            .args(["--exact", "taken_over::outside", "--ignored", "--nocapture"])
            .env("VMM_ARGUMENTS", self.targets.words().join(" "))
            .uid(USER.uid)
            .gid(USER.gid)
            .stdout(Stdio::piped());
        let mut child = program.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let lines = lines.map(Result::unwrap).collect();
        child.wait().unwrap();
        lines
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.victim.kill();
        let _ = self.victim.wait();
        attacks::remove_shared_memory(self.targets.shared_memory);
        attacks::remove_queue(&self.queue);
    }
}

fn open_to_all(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Returns the attacks that succeeded.
fn reached<'a>(lines: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    lines.into_iter().filter_map(|line| line.strip_prefix("REACHED ")).map(String::from).collect()
}

async fn console(spec: &VmSpec) -> String {
    let told = async {
        loop {
            let text = fs::read_to_string(&spec.console_log).unwrap();
            if text.contains(DONE) {
                return text;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LIMIT, told).await.expect("the program does not end")
}

#[tokio::test]
async fn a_qemu_that_was_taken_over_reaches_nothing() {
    let name = "a_qemu_that_was_taken_over_reaches_nothing";
    if !rustix::process::geteuid().is_root() {
        return println!("SKIPPED: {name}: needs root");
    }
    let host = Host::new();
    let qemu = Qemu::at(&host.program(), &host.directory.path().join("cache")).unwrap();
    reaches_nothing(&host, &qemu, Accel::Tcg, None).await;
}

#[tokio::test]
async fn a_slipway_vmm_that_was_taken_over_reaches_nothing() {
    let name = "a_slipway_vmm_that_was_taken_over_reaches_nothing";
    let kvm = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    if !rustix::process::geteuid().is_root() || kvm.is_err() {
        return println!("SKIPPED: {name}: needs root, and /dev/kvm, of which nothing is used");
    }
    let host = Host::new();
    let native = SlipwayVmm::new(host.program(), &host.directory.path().join("cache"));
    reaches_nothing(&host, &native, Accel::Kvm, None).await;
}

#[tokio::test]
async fn a_slipway_vmm_that_was_started_ahead_reaches_nothing() {
    let name = "a_slipway_vmm_that_was_started_ahead_reaches_nothing";
    let kvm = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    if !rustix::process::geteuid().is_root() || kvm.is_err() {
        return println!("SKIPPED: {name}: needs root, and /dev/kvm, of which nothing is used");
    }
    let host = Host::new();
    let native = SlipwayVmm::new(host.program(), &host.directory.path().join("cache"));
    let ahead = SpareSpec { credentials: Some(USER), cgroup_procs: Vec::new(), gives_back: false };
    let spare = native.launch_spare(&ahead).await.unwrap();
    // Its cage is closed before it knows of any VM.
    assert_eq!(fs::read_dir(format!("/proc/{}/root", spare.pid())).unwrap().count(), 0);
    reaches_nothing(&host, &native, Accel::Kvm, Some(spare)).await;
}

/// Launches the program in the place of `vmm`, in the spare if there is one, and checks that none
/// of its attacks succeeds.
async fn reaches_nothing(host: &Host, vmm: &dyn Hypervisor, accel: Accel, spare: Option<Spare>) {
    let open = reached(host.outside().iter().map(String::as_str));
    println!("open without the cage: {open:?}");
    for way in attacks::OPEN_WITHOUT_A_CAGE {
        assert!(open.iter().any(|reached| reached == way), "{way} proves nothing: {open:?}");
    }
    let spec = host.spec(accel);
    let ahead = spare.as_ref().map(Spare::pid);
    let launched = match spare {
        Some(spare) => vmm.launch_in(spare, &spec),
        None => vmm.launch(&spec),
    };
    let vm = tokio::time::timeout(LIMIT, launched).await.unwrap().unwrap();
    let pid = vm.record().pid;
    assert!(ahead.is_none_or(|ahead| ahead == pid));
    let text = console(&spec).await;
    assert_eq!(reached(text.lines()), Vec::<String>::new(), "{text}");
    let tried = text.lines().filter(|line| line.starts_with("refused ")).count();
    assert!(tried >= attacks::OPEN_WITHOUT_A_CAGE.len(), "{text}");
    // A shell adds variables of its own to an empty environment.
    let environment = fs::read_to_string(format!("/proc/{pid}/environ")).unwrap();
    let words = environment.split_terminator('\0').filter_map(|word| word.split_once('='));
    let inherited: Vec<_> =
        words.filter(|(key, _)| !["VMM_ARGUMENTS", "PWD", "SHLVL", "_"].contains(key)).collect();
    assert!(inherited.is_empty(), "{inherited:?}");
    for namespace in ["net", "mnt", "pid", "ipc", "uts", "cgroup"] {
        let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{namespace}")).unwrap();
        assert_ne!(of(&pid.to_string()), of("self"), "{namespace}");
    }
    assert_eq!(fs::read_dir(format!("/proc/{pid}/root")).unwrap().count(), 0);
    assert_eq!(fs::read(&host.targets.file).unwrap(), b"precious");
    // Process 1 of its namespace, without handlers for signals: it is ended nevertheless.
    let record = vm.record();
    vm.detach();
    drop(vm);
    assert!(reap_leftover(&record, LIMIT).unwrap());
}
