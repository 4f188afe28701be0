//! A program forks while its threads use epoll sets, under `libslipway.so`: neither the program nor
//! a child waits for a lock that nobody will release.
#![allow(clippy::unwrap_used, unsafe_code)] // the test calls fork(2) and epoll_ctl(2) itself

#[path = "../../../host/socket/tests/engine/mod.rs"]
mod engine;
mod library;

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

const ROLE: &str = "SLIPWAY_TEST_FORKS";
/// The number of children.
const TURNS: usize = 200;
/// The seconds after which a process that waits for ever is killed.
const PATIENCE: u32 = 60;

#[test]
fn a_child_has_no_lock_of_its_parents_threads() {
    const TEST: &str = "a_child_has_no_lock_of_its_parents_threads";
    if std::env::var_os(ROLE).is_some() {
        return program();
    }
    let Some(library) = library::library() else {
        return println!("SKIPPED: {TEST}: needs libslipway.so");
    };
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let engine = engine::Engine::new(&socket);
    let (end, stop) = rustix::pipe::pipe().unwrap();
    let engine = std::thread::spawn(move || engine.run(&end));
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(["--exact", TEST, "--nocapture"]).env(ROLE, "1");
    let ran = program.env("LD_PRELOAD", library).env("SLIPWAY_SOCKET", &socket).output().unwrap();
    drop(stop);
    engine.join().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{}: {said}", ran.status);
}

/// Makes a connection that is the library's, and an epoll set with it that has two numbers.
fn connection_in_a_set() -> (TcpStream, TcpStream, [RawFd; 2]) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (server, _) = listener.accept().unwrap();
    let fd = client.as_raw_fd();
    let link = std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap();
    assert!(link.to_string_lossy().contains("eventfd"), "{link:?} is the kernel's");
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
    // SAFETY: plain system calls on this program's descriptors; `event` lives during the call.
    let set = unsafe {
        let set = libc::epoll_create1(0);
        assert_eq!(libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, &raw mut event), 0);
        [set, libc::dup(set)]
    };
    assert!(set[1] >= 0);
    (client, server, set)
}

fn program() {
    // SAFETY: the signal ends the process, as it does by default.
    unsafe { libc::alarm(PATIENCE) };
    let (client, _server, _set) = connection_in_a_set();
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Each call takes the list of the connection's sets, then the set.
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                client.shutdown(std::net::Shutdown::Write).unwrap();
            }
        });
        let hung = (0..TURNS).find(|_| child_hangs(client.as_raw_fd()));
        ended.store(true, Ordering::Relaxed);
        assert_eq!(hung, None);
    });
}

/// Forks a child that closes a connection, which takes it out of its sets. Returns whether the
/// child did not end by itself.
fn child_hangs(fd: RawFd) -> bool {
    // SAFETY: the child of a program with threads calls nothing that waits for one of them.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above; the descriptor is the program's.
        unsafe {
            libc::alarm(PATIENCE / 4);
            libc::close(fd);
            libc::_exit(0);
        }
    }
    assert!(child > 0, "{}", std::io::Error::last_os_error());
    let mut status = 0;
    // SAFETY: `status` lives during the call.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    status != 0
}
