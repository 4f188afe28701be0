//! Interrupts without an asynchronous I/O context, by which an eventfd is usually raised: any user
//! can take all contexts of the node (io_setup(2), `fs.aio-max-nr`). The client of another endpoint
//! has an eventfd with a full counter, set to blocking: a write(2) to it waits for ever.
//!
//! Each case is a process of its own, since a process keeps the context that it once had.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed
#![allow(unsafe_code)] // io_setup(2), setuid(2) and a filter of system calls have no wrapper

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use slipway_reactor::{Reactor, Settings};
use slipway_vfio_user::testing::{DOORBELLS, Scratch};
use slipway_vfio_user::{Config, Control, Endpoint, EndpointParts};
use slipway_vfio_user_client::{Client, ClientError};
use slipway_vfio_user_spec::irq;

const ROLE: &str = "SLIPWAY_TEST_ROLE";
const PATIENCE: Duration = Duration::from_secs(60);
/// The register of the test function that signals an interrupt.
const SIGNAL: u64 = 0x58;

/// Starts this test program again, in a role.
fn again(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "role", "--nocapture", "--test-threads=1"]).env(ROLE, role);
    command
}

fn passes(role: &str) {
    let output = again(role).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("played"), "{role}: {output:?}");
}

#[test]
fn without_a_context_interrupts_come_by_a_ring() {
    passes("ring");
}

#[test]
fn without_any_means_nobody_is_served() {
    passes("none");
}

/// Takes the node's contexts, for less than a second.
#[test]
fn with_all_contexts_taken_by_another_user_interrupts_come_as_root() {
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: with_all_contexts_taken_by_another_user_interrupts_come_as_root: needs root"
        );
        return;
    }
    let mut hog = again("hog");
    let mut hog = Ends(hog.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let lines = BufReader::new(hog.0.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("taken")), "they are not taken");
    passes("node");
}

/// A process that is expected to end with a given value.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The code of the processes that the tests above start. Without a role it does nothing.
#[test]
fn role() {
    match std::env::var(ROLE).as_deref() {
        Ok("ring") => {
            refuse(&[libc::SYS_io_setup]);
            interrupts_come();
        }
        Ok("node") => interrupts_come(),
        Ok("none") => {
            refuse(&[libc::SYS_io_setup, libc::SYS_io_uring_setup]);
            nobody_is_served();
        }
        Ok("hog") => hog(),
        _ => return,
    }
    println!("played");
}

/// Takes a context for `requests` requests. Returns whether that succeeded.
fn take_context(requests: u32) -> bool {
    let mut id: libc::c_ulong = 0;
    // SAFETY: the kernel writes one word to `id`.
    unsafe { libc::syscall(libc::SYS_io_setup, requests, &raw mut id) == 0 }
}

fn hog() {
    // SAFETY: changes the user of this process, and no memory.
    assert_eq!(unsafe { libc::setuid(65534) }, 0);
    for requests in (0..=16).rev().map(|power| 1 << power) {
        while take_context(requests) {}
    }
    println!("taken");
    // Until this process is killed, or the one that started it has ended.
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Has these system calls fail with EAGAIN in this thread and in those that it starts.
fn refuse(calls: &[libc::c_long]) {
    let step =
        |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let answer = |value: u32| step(libc::BPF_RET | libc::BPF_K, value, 0, 0);
    let mut program = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for call in calls {
        program.push(step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, *call as u32, 0, 1));
        program.push(answer(libc::SECCOMP_RET_ERRNO | libc::EAGAIN as u32));
    }
    program.push(answer(libc::SECCOMP_RET_ALLOW));
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the kernel reads the program, which outlives the calls.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter, 0, 0), 0);
    }
}

fn serve(reactor: &Reactor, path: PathBuf) -> Control {
    let config = Config::at(path);
    let mut parts = EndpointParts::new(&config);
    let doorbells = parts.doorbells(DOORBELLS).unwrap();
    let function = Scratch::new(parts.memory(), &parts.interrupts(), doorbells, Arc::default());
    let (function, home) = (Box::new(function), reactor.handle());
    let endpoint = Endpoint::new(config, parts, function, Vec::new(), &home).unwrap();
    let control = endpoint.control();
    home.add(Box::new(endpoint)).unwrap();
    control
}

/// Connects a client with its first interrupt routed to this eventfd.
fn client(path: &std::path::Path, file: &OwnedFd) -> Client {
    let mut client = Client::connect(path, PATIENCE).unwrap();
    client.route_irqs(irq::MSIX, 0, 1, &[file.as_fd()]).unwrap();
    client
}

fn interrupts_come() {
    assert!(!take_context(16), "there is a context");
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = (dir.path().join("victim"), dir.path().join("attacker"));
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let _controls = [serve(&reactor, ours.clone()), serve(&reactor, theirs.clone())];
    let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let counter = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let (mut victim, mut attacker) = (client(&ours, &counter), client(&theirs, &full));
    for _ in 0..100 {
        attacker.write(0, SIGNAL, &0_u32.to_le_bytes()).unwrap();
        victim.write(0, SIGNAL, &0_u32.to_le_bytes()).unwrap();
    }
    let mut count = [0; 8];
    rustix::io::read(&counter, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 100);
}

fn nobody_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let control = serve(&reactor, path.clone());
    assert!(matches!(Client::connect(&path, PATIENCE), Err(ClientError::Connection(_))));
    let stats = control.stats();
    assert_eq!((stats.connections, stats.refused), (0, 1));
    let why = stats.last_disconnect.unwrap();
    assert!(why.contains("interrupts cannot be delivered"), "{why}");
}
