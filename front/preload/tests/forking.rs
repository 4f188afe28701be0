//! A program forks while its threads use epoll sets, or fork too, under `libslipway.so`: neither
//! the program nor a child waits for a lock that nobody will release, and each child is counted
//! once.
#![allow(clippy::unwrap_used, unsafe_code)] // the test calls fork(2) and epoll_ctl(2) itself

mod library;
mod under_library;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The number of children.
const TURNS: usize = 200;
/// The copies of a connection's descriptor.
const NUMBERS: usize = 20;
/// The seconds after which a process that waits for ever is killed.
const PATIENCE: u32 = 60;

#[test]
fn a_child_has_no_lock_of_its_parents_threads() {
    under_library::run("a_child_has_no_lock_of_its_parents_threads", program);
}

#[test]
fn children_of_two_threads_hold_a_connection_once_each() {
    under_library::run("children_of_two_threads_hold_a_connection_once_each", two_threads);
}

#[test]
fn a_child_without_a_connection_leaves_its_parents_open() {
    let test = "a_child_without_a_connection_leaves_its_parents_open";
    under_library::run(test, at_the_limit);
}

/// Makes a connection that is the library's.
fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (server, _) = listener.accept().unwrap();
    let fd = client.as_raw_fd();
    let link = std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap();
    assert!(link.to_string_lossy().contains("eventfd"), "{link:?} is the kernel's");
    (client, server)
}

/// Makes a connection that is the library's, and an epoll set with it that has two numbers.
fn connection_in_a_set() -> (TcpStream, TcpStream, [RawFd; 2]) {
    let (client, server) = connection();
    let fd = client.as_raw_fd();
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
        let hung = (0..TURNS).find(|_| child_hangs(&[client.as_raw_fd()]));
        ended.store(true, Ordering::Relaxed);
        assert_eq!(hung, None);
    });
}

/// Two threads fork at once while a connection has many numbers. The children close them. So the
/// program is the last one that has the connection, and resets it when it closes it: the engine
/// alone, which knows nothing of the option, would end it in order.
fn two_threads() {
    // SAFETY: the signal ends the process, as it does by default.
    unsafe { libc::alarm(PATIENCE) };
    let (client, mut server) = connection();
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let (name, len) = (libc::SO_LINGER, size_of::<libc::linger>() as libc::socklen_t);
    let (fd, at) = (client.as_raw_fd(), (&raw const linger).cast());
    // SAFETY: `linger` lives during the call.
    assert_eq!(unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, name, at, len) }, 0);
    let copies: Vec<TcpStream> = (0..NUMBERS).map(|_| client.try_clone().unwrap()).collect();
    let numbers: Vec<RawFd> = copies.iter().chain([&client]).map(AsRawFd::as_raw_fd).collect();
    std::thread::scope(|scope| {
        let fork = || assert!(!(0..TURNS).any(|_| child_hangs(&numbers)));
        scope.spawn(fork);
        scope.spawn(fork);
    });
    drop((copies, client));
    let read = server.read(&mut [0]);
    assert!(matches!(&read, Err(error) if error.kind() == ErrorKind::ConnectionReset), "{read:?}");
}

/// A program without room for the descriptor of its child's connection forks. The child closes its
/// copy of a stream of its parent's.
fn at_the_limit() {
    // SAFETY: the signal ends the process, as it does by default.
    unsafe { libc::alarm(PATIENCE) };
    let (mut client, mut server) = connection();
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(1), ..before }).unwrap();
    let hung = child_hangs(&[client.as_raw_fd()]);
    setrlimit(Resource::Nofile, before).unwrap();
    assert!(!hung);
    client.write_all(b"x").unwrap();
    let mut read = [0; 1];
    server.read_exact(&mut read).unwrap();
    assert_eq!(read, *b"x");
}

/// Forks a child that closes all numbers of a connection, which takes it out of its sets. Returns
/// whether the child did not end by itself.
fn child_hangs(numbers: &[RawFd]) -> bool {
    // SAFETY: the child of a program with threads calls nothing that waits for one of them.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above; the descriptor is the program's.
        unsafe {
            libc::alarm(PATIENCE / 4);
            numbers.iter().for_each(|fd| _ = libc::close(*fd));
            libc::_exit(0);
        }
    }
    assert!(child > 0, "{}", std::io::Error::last_os_error());
    let mut status = 0;
    // SAFETY: `status` lives during the call.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    status != 0
}
