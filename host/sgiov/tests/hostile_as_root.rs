//! Attacks on an engine by other users of the node, and by root in a container. Each test is the
//! attacker, with a user id of its own, beside a program that must notice nothing.
//!
//! Over 500 lines: the attacks share their set-up.
#![allow(clippy::unwrap_used, unsafe_code)] // system calls that attackers make

mod client;
mod node;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Stdio};

use client::{Client, Connected, readable, until};
use node::{Node, Process, at};
use rustix::fs::FlockOperation;
use rustix::net::sockopt::set_socket_linger;
use slipway_sgiov::{Report, administration, report};
use slipway_sgiov_spec::control::{Reply, Request, VERSION};

const MALLORY: u32 = 61_001;
const ALICE: u32 = 61_002;
const EPERM: u32 = 1;
const EINVAL: u32 = 22;
const EDQUOT: u32 = 122;

/// The body of a test's child processes, chosen by the environment. Does nothing in a run of the
/// tests.
#[test]
fn in_a_child_process() {
    match node::role() {
        None => {}
        Some((role, files, socket)) if role == "engine" => node::serve(&files, socket),
        Some((role, how, socket)) if role == "flood" => flood(&how, &socket),
        Some((role, _, socket)) if role == "silence" => silence(&socket),
        Some((role, _, socket)) if role == "lock" => lock_all(socket.parent().unwrap()),
        Some((role, _, socket)) if role == "pose" => pose(&socket),
        Some((role, _, socket)) if role == "linger" => linger(&socket),
        Some((role, ..)) if role == "exhaust" => exhaust(),
        Some((role, _, socket)) if role == "hold" => hold(&socket),
        Some((role, _, socket)) if role == "keep" => keep_lock(&socket),
        Some((role, port, socket)) if role == "talk" => talk(&socket, port.parse().unwrap()),
        Some(other) => panic!("{other:?}"),
    }
}

/// Returns whether the test runs as root. Otherwise prints that the test is skipped.
fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("SKIPPED: {test}: needs root");
    }
    root
}

/// A process with another user's id. It prints a line when its attack is under way, and stays until
/// it is told to end.
struct Attacker(Process, Option<ChildStdin>, BufReader<ChildStdout>);

impl Attacker {
    fn new(role: &str, uid: u32, node: &Node) -> Self {
        let mut command = Process::command(role, &node.socket());
        command.uid(uid).gid(uid);
        Self::with(command)
    }

    fn with(mut command: std::process::Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().unwrap());
        Self(Process(child), stdin, BufReader::new(stdout))
    }

    /// Returns the next line of the process, without those of the test's harness.
    fn said(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.2.read_line(&mut line).unwrap() > 0, "it ended without a word");
            if let Some((_, said)) = line.trim_end().split_once("said: ") {
                return said.to_owned();
            }
        }
    }

    fn end(mut self) {
        drop(self.1.take());
        assert!(self.0.0.wait().unwrap().success());
    }
}

/// Prints a word, and stays until the test ends this process.
fn say(word: &str) {
    println!("said: {word}");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Starts an engine whose folder every user may enter.
fn node(files: u64) -> Node {
    let node = Node::with_files(files);
    std::fs::set_permissions(node.dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    until("an engine", || slipway_sgiov::is_served(&node.socket()));
    node
}

/// Sends bytes between two programs of one user through the engine.
fn talk(socket: &Path, port: u16) {
    let (mut server, mut client) = (Client::attach(socket), Client::attach(socket));
    let (listener, _waits) = server.listen(at(port), 5);
    for _ in 0..20 {
        let c = client.connect(at(port)).unwrap();
        let s = server.accept(listener).unwrap();
        client.write(&c, b"still here").unwrap();
        assert_eq!(server.read(&s, 100).unwrap(), b"still here");
        client.close(c);
        server.close(s);
    }
    say("talked");
}

/// Checks that another user's programs still reach each other.
fn others_go_on(node: &Node, port: u16) {
    let mut alice = Attacker::new(&format!("talk {port}"), ALICE, node);
    assert_eq!(alice.said(), "talked");
    alice.end();
}

/// Attaches, listens or connects until the engine refuses.
fn flood(how: &str, socket: &Path) {
    let (mut all, mut sockets) = (Vec::new(), Vec::new());
    let refused = loop {
        let connection = client::connect(socket);
        let attach = Request::Attach { version: VERSION }.encode();
        // The engine may have refused the connection before the request.
        let _ = client::send(&connection, &attach, &[]);
        match client::receive(&connection) {
            Some((Reply::Attached { .. }, files)) => all.push((connection, files)),
            Some((Reply::Refused(errno), _)) => break errno,
            other => panic!("{other:?}"),
        }
        if how == "backlog" && all.len() == 2 {
            break backlog(socket, &mut sockets);
        }
        assert!(all.len() < 100_000);
    };
    say(&format!("{refused}"));
    drop((all, sockets));
}

/// Connects to itself without accepting, until the engine refuses.
fn backlog(socket: &Path, sockets: &mut Vec<(Client, Vec<Connected>)>) -> u32 {
    let mut client = Client::attach(socket);
    client.share(true);
    for port in 7300..7400 {
        client.listen(at(port), 4096);
    }
    let (mut all, mut port) = (Vec::new(), 7300);
    let refused = loop {
        match client.connect(at(port)) {
            Ok(there) => all.push(there),
            Err(93) if port < 7399 => port += 1,
            Err(errno) => break errno,
        }
    };
    sockets.push((client, all));
    refused
}

#[test]
fn a_flood_of_attaches_is_its_users_own_loss_as_root() {
    if !is_root("a_flood_of_attaches_is_its_users_own_loss_as_root") {
        return;
    }
    let node = node(1000);
    let mut mallory = Attacker::new("flood attach", MALLORY, &node);
    assert_eq!(mallory.said(), EDQUOT.to_string(), "it is told why");
    // The attacker still holds everything.
    others_go_on(&node, 7200);
    let mut other = Attacker::new("flood attach", MALLORY + 10, &node);
    assert_eq!(other.said(), EDQUOT.to_string());
    others_go_on(&node, 7210);
    mallory.end();
    other.end();
    until("what it held is given back", || report(&node.socket()).unwrap().families.is_empty());
    others_go_on(&node, 7220);
}

#[test]
fn a_backlog_of_connections_is_its_users_own_loss_as_root() {
    if !is_root("a_backlog_of_connections_is_its_users_own_loss_as_root") {
        return;
    }
    let node = node(1000);
    let mut mallory = Attacker::new("flood backlog", MALLORY, &node);
    assert_eq!(mallory.said(), "105");
    others_go_on(&node, 7201);
    mallory.end();
}

/// Connects without sending anything. The engine hangs up on the first connection in favour of the
/// last ones.
fn silence(socket: &Path) {
    let first = client::connect(socket);
    let mut more = vec![client::connect(socket)];
    while !readable(first.as_fd(), std::time::Duration::ZERO) {
        more.push(client::connect(socket));
        assert!(more.len() < 10_000, "nobody is hung up on");
    }
    assert!(client::receive(&first).is_none());
    say("silent");
    // After a time-out it hangs up on all of them.
    for one in more {
        assert!(client::receive(&one).is_none());
    }
}

#[test]
fn who_does_not_attach_is_hung_up_on_as_root() {
    if !is_root("who_does_not_attach_is_hung_up_on_as_root") {
        return;
    }
    let node = node(4000);
    let mut mallory = Attacker::new("silence x", MALLORY, &node);
    assert_eq!(mallory.said(), "silent");
    others_go_on(&node, 7202);
    mallory.end();
}

/// Takes the lock of every file in a directory that can be opened.
fn lock_all(dir: &Path) {
    let mut files = Vec::new();
    let mut folders: Vec<PathBuf> = vec![dir.into()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(file) = File::open(&path) {
                #[allow(clippy::disallowed_methods)] // an attacker's
                rustix::fs::flock(&file, FlockOperation::LockExclusive).unwrap();
                files.push(file);
            }
        }
    }
    say("locked");
    drop(files);
}

#[test]
fn nobody_else_takes_an_engines_lock_as_root() {
    if !is_root("nobody_else_takes_an_engines_lock_as_root") {
        return;
    }
    let mut node = node(1000);
    node.engine.kill();
    let mut mallory = Attacker::new("lock x", MALLORY, &node);
    assert_eq!(mallory.said(), "locked");
    let mut next = Process::new("engine 1000", &node.socket());
    until("the next engine", || {
        assert!(next.0.try_wait().unwrap().is_none(), "it did not get its lock");
        slipway_sgiov::is_served(&node.socket())
    });
    node.engine = next;
    others_go_on(&node, 7203);
    mallory.end();
}

#[test]
fn a_directory_that_others_may_enter_is_no_administrators_as_root() {
    if !is_root("a_directory_that_others_may_enter_is_no_administrators_as_root") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let bind = || {
        let settings = slipway_sgiov::Settings { socket: socket.clone(), ..Default::default() };
        slipway_sgiov::Engine::bind(settings).map(drop)
    };
    std::fs::create_dir(administration(&socket)).unwrap();
    std::fs::set_permissions(administration(&socket), PermissionsExt::from_mode(0o755)).unwrap();
    assert!(bind().unwrap_err().to_string().contains("may enter"));
    std::fs::set_permissions(administration(&socket), PermissionsExt::from_mode(0o700)).unwrap();
    std::os::unix::fs::chown(administration(&socket), Some(MALLORY), None).unwrap();
    assert!(bind().unwrap_err().to_string().contains("another user"));
    std::os::unix::fs::chown(administration(&socket), Some(0), None).unwrap();
    bind().unwrap();
    for path in [administration(&socket), administration(&socket).join("lock")] {
        let mode = std::fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0);
    }
}

/// Acts as root in a container, which has the programs' socket and the user id of root.
fn pose(socket: &Path) {
    let client = Client::attach(socket);
    let (reply, files) = client.ask(Request::Report);
    let Reply::Report { bytes } = reply else { panic!("{reply:?}") };
    let mut json = vec![0; bytes as usize];
    rustix::io::pread(&files[0], &mut json, 0).unwrap();
    let seen: Report = serde_json::from_slice(&json).unwrap();
    let uids = seen.families.iter().map(|family| family.pid.unsigned_abs());
    assert!(uids.eq([std::process::id()]), "it sees others: {seen:?}");
    assert!(seen.connections.is_empty() && seen.listeners.is_empty() && seen.links == 0);
    let listener = std::os::unix::net::UnixListener::bind(format!("\0pose-{}", std::process::id()));
    let listener = listener.or_else(|_| std::os::unix::net::UnixListener::bind("/tmp/pose.sock"));
    let listener = listener.unwrap();
    let _ = std::fs::remove_file("/tmp/pose.sock");
    let (file, _writer) = std::io::pipe().unwrap();
    let asks = Request::Function { bytes: 10 }.encode();
    client::send(&client.socket, &asks, &[listener.as_fd(), file.as_fd()]).unwrap();
    let (reply, _) = client::receive(&client.socket).unwrap();
    say(&format!("{reply:?}"));
}

#[test]
fn root_in_a_container_is_no_administrator_as_root() {
    if !is_root("root_in_a_container_is_no_administrator_as_root") {
        return;
    }
    let node = node(1000);
    let (mut server, mut client) = (node.attach(), node.attach());
    let (listener, _waits) = server.listen(at(7204), 5);
    let _c = client.connect(at(7204)).unwrap();
    let _s = server.accept(listener).unwrap();
    let mut command = Process::command("pose x", &node.socket());
    // SAFETY: unshare(2) and prctl(2) may be called between fork and exec.
    unsafe {
        command.pre_exec(|| {
            let spaces = libc::CLONE_NEWNET | libc::CLONE_NEWNS | libc::CLONE_NEWIPC;
            let done = libc::unshare(spaces) == 0
                && (0..64)
                    .all(|bit| libc::prctl(libc::PR_CAPBSET_DROP, bit, 0, 0, 0) == 0 || bit > 39);
            if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
    let mut container = Attacker::with(command);
    assert_eq!(container.said(), format!("{:?}", Reply::Refused(EPERM)));
    container.end();
    // A process that can enter the administrator's directory sees all families.
    assert_eq!(report(&node.socket()).unwrap().families.len(), 2);
}

/// A request for a function whose description is another process's file is answered at once.
#[test]
fn a_description_is_a_sealed_memory_file_as_root() {
    if !is_root("a_description_is_a_sealed_memory_file_as_root") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let settings = slipway_sgiov::Settings {
        socket: dir.path().join("s"),
        guests: true,
        ..Default::default()
    };
    let mut engine = slipway_sgiov::Engine::bind(settings).unwrap();
    let stop = engine.stop();
    let engine = std::thread::spawn(move || engine.run().unwrap());
    let own = administration(&dir.path().join("s")).join(slipway_sgiov::SHARED);
    let listener = std::os::unix::net::UnixListener::bind(dir.path().join("vmm")).unwrap();
    let (pipe, _writer) = std::io::pipe().unwrap();
    let plain = tempfile::tempfile().unwrap();
    let open = rustix::fs::memfd_create("open", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    for file in [pipe.as_fd(), plain.as_fd(), open.as_fd()] {
        let socket = client::connect(&own);
        let asks = Request::Function { bytes: 1 }.encode();
        client::send(&socket, &asks, &[listener.as_fd(), file]).unwrap();
        assert_eq!(client::receive(&socket).unwrap().0, Reply::Refused(EINVAL));
    }
    // The administrator's socket is not for programs.
    let socket = client::connect(&own);
    client::send(&socket, &Request::Attach { version: VERSION }.encode(), &[]).unwrap();
    assert!(client::receive(&socket).is_none());
    stop.stop();
    engine.join().unwrap();
}

/// Closes a socket whose close lasts an hour if nobody else has it. The engine may have dropped it
/// before: then a thread sleeps in the close until this process ends.
fn close_or_leave(bomb: impl Send + 'static) {
    let (closed, is_closed) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(bomb);
        closed.send(())
    });
    let _ = is_closed.recv_timeout(std::time::Duration::from_secs(10));
}

/// Makes the engine receive and drop sockets whose close lasts an hour, in every way that messages
/// allow.
fn linger(socket: &Path) {
    let mut kept = Vec::new();
    for ways in 0..5 {
        let client = Client::attach(socket);
        let (bomb, other) = slipway_peer::testing::lingering().unwrap();
        let listen = Request::Listen { at: at(7300), backlog: 1, shared: true, v6_only: false };
        let (request, count) = match ways {
            // As the proof of a listener, with a request that takes none, and as more descriptors
            // than any request has.
            0 => (listen.encode().to_vec(), 1),
            1 => (Request::Fork.encode().to_vec(), 1),
            2 => (Request::Fork.encode().to_vec(), 60),
            // With bytes that are no request.
            3 => (vec![0xff; 10], 1),
            // Behind a message for which the engine hangs up, so that it is never received.
            _ => {
                client::send(&client.socket, &[0xff; 10], &[]).unwrap();
                (Request::Fork.encode().to_vec(), 1)
            }
        };
        let files = vec![bomb.as_fd(); count];
        // The engine may have hung up already.
        if client::send(&client.socket, &request, &files).is_err() {
            // Only this process is left with the socket, and must not wait itself.
            set_socket_linger(&bomb, None).unwrap();
        }
        close_or_leave(bomb);
        kept.push((client, other));
    }
    say("sent");
    drop(kept);
}

#[test]
fn sockets_that_linger_hold_up_nobody_as_root() {
    if !is_root("sockets_that_linger_hold_up_nobody_as_root") {
        return;
    }
    let node = node(1000);
    let mut mallory = Attacker::new("linger x", MALLORY, &node);
    assert_eq!(mallory.said(), "sent");
    // The other ends still receive nothing.
    others_go_on(&node, 7205);
    mallory.end();
    others_go_on(&node, 7215);
}

/// Takes all of the node's contexts for asynchronous I/O.
fn exhaust() {
    let mut size: libc::c_long = 1 << 16;
    while size > 0 {
        let mut id: libc::c_ulong = 0;
        // SAFETY: the kernel writes one word to `id`.
        if unsafe { libc::syscall(libc::SYS_io_setup, size, &raw mut id) } < 0 {
            size /= 2;
        }
    }
    say("taken");
}

/// Fills an eventfd and sets it to blocking: raising it by write(2) waits for ever.
fn fill(eventfd: &OwnedFd) {
    rustix::io::ioctl_fionbio(eventfd, false).unwrap();
    slipway_peer::eventfd::drain(eventfd.as_fd());
    rustix::io::write(eventfd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
}

#[test]
fn full_eventfds_hold_up_nobody_where_no_contexts_are_left_as_root() {
    const TEST: &str = "full_eventfds_hold_up_nobody_where_no_contexts_are_left_as_root";
    if !is_root(TEST) {
        return;
    }
    // An engine that has raised no eventfd yet.
    let node = node(1000);
    let mut mallory = Attacker::new("exhaust x", MALLORY, &node);
    assert_eq!(mallory.said(), "taken");
    let (mut hostile, mut other) = (node.attach(), node.attach());
    let (listener, waits) = hostile.listen(at(7206), 5);
    fill(&waits);
    let c = other.connect(at(7206)).unwrap();
    let s = hostile.accept(listener).unwrap();
    fill(&s.eventfd);
    // The engine notifies the other end of the close.
    other.close(c);
    assert!(matches!(other.ask(Request::Report).0, Reply::Report { .. }));
    others_go_on(&node, 7216);
    mallory.end();
}

/// Returns memory whose first page fault is never resolved, as that of a file on a FUSE server that
/// does not answer.
fn untouchable() -> *mut libc::c_void {
    const API: libc::c_ulong = 0xc018_aa3f;
    const REGISTER: libc::c_ulong = 0xc020_aa00;
    let (length, none) = (4096, std::ptr::null_mut());
    // SAFETY: new memory, a new descriptor, and structures of the ioctls' sizes
    // (linux/userfaultfd.h).
    unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let memory = libc::mmap(none, length, access, kind, -1, 0);
        let faults = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
        assert!(faults >= 0, "{}", std::io::Error::last_os_error());
        let mut api = [0xaa_u64, 0, 0];
        assert_eq!(libc::ioctl(faults as i32, API, api.as_mut_ptr()), 0);
        let mut range = [memory.expose_provenance() as u64, length as u64, 1, 0];
        assert_eq!(libc::ioctl(faults as i32, REGISTER, range.as_mut_ptr()), 0);
        memory
    }
}

/// Shows the engine a listening socket whose lock it holds for ever.
fn hold(socket: &Path) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let held = listener.try_clone().unwrap();
    std::thread::spawn(move || {
        const IP_MSFILTER: libc::c_int = 41;
        let memory = untouchable();
        // SAFETY: the kernel reads the argument, or tries to.
        unsafe {
            libc::setsockopt(held.as_raw_fd(), libc::IPPROTO_IP, IP_MSFILTER, memory, 100);
        }
    });
    // Until the other thread is in the call: then a look at the name does not end.
    loop {
        let (looked, looks) = std::sync::mpsc::channel();
        let look = listener.try_clone().unwrap();
        std::thread::spawn(move || {
            let _ = look.local_addr();
            let _ = looked.send(());
        });
        if looks.recv_timeout(std::time::Duration::from_millis(500)).is_err() {
            break;
        }
    }
    let client = Client::attach(socket);
    let listen = Request::Listen { at: at(0), backlog: 1, shared: false, v6_only: false };
    client::send(&client.socket, &listen.encode(), &[listener.as_fd()]).unwrap();
    // Another one of its own behind it: both are there when the engine is asked anything else.
    let _second = Client::attach(socket);
    say("held");
    // Threads in the kernel's hands do not end in order.
    std::process::exit(0);
}

#[test]
fn a_locked_socket_is_no_proof_and_holds_up_nobody_as_root() {
    if !is_root("a_locked_socket_is_no_proof_and_holds_up_nobody_as_root") {
        return;
    }
    let node = node(1000);
    // The attacker needs root only for its memory. A FUSE server of any user has the same effect.
    let mut mallory = Attacker::with(Process::command("hold x", &node.socket()));
    assert_eq!(mallory.said(), "held");
    others_go_on(&node, 7207);
    mallory.end();
    others_go_on(&node, 7217);
}

/// Holds the lock of each arena that it is given, so that no memory of it can be released, and
/// ends.
fn keep_lock(socket: &Path) {
    let (mut server, mut client) = (Client::attach(socket), Client::attach(socket));
    let (listener, _waits) = server.listen(at(7300), 5);
    let c = client.connect(at(7300)).unwrap();
    let s = server.accept(listener).unwrap();
    // In a region that is given back.
    assert!(client.send(&c, &[7; 100_000]).unwrap() > 4096);
    let file = client.arenas[&c.endpoint.place.link].file().unwrap().try_clone_to_owned().unwrap();
    std::thread::spawn(move || {
        let memory = untouchable();
        // SAFETY: the kernel reads the bytes, or tries to.
        unsafe { libc::pwrite(file.as_raw_fd(), memory, 4096, 0) };
    });
    // Waits until the other thread is in the call: then no other change of the file ends.
    let file = client.arenas[&c.endpoint.place.link].file().unwrap().try_clone_to_owned().unwrap();
    loop {
        let (done, is_done) = std::sync::mpsc::channel();
        let file = file.try_clone().unwrap();
        std::thread::spawn(move || {
            let keep = rustix::fs::FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(&file, keep, 0, 4096);
            let _ = done.send(());
        });
        if is_done.recv_timeout(std::time::Duration::from_millis(500)).is_err() {
            break;
        }
    }
    // The FIFO grows all the same.
    let mut got = 0;
    while got < 1_000_000 {
        client.send(&c, &[7; 100_000]).unwrap();
        got += server.read(&s, 100_000).unwrap().len();
    }
    client.close(c);
    server.close(s);
    // The engine has handled both.
    assert!(matches!(client.ask(Request::Report).0, Reply::Report { .. }));
    assert!(matches!(server.ask(Request::Report).0, Reply::Report { .. }));
    let more = client.connect(at(7300)).unwrap();
    let s = server.accept(listener).unwrap();
    client.send(&more, b"after all").unwrap();
    assert_eq!(server.read(&s, 100).unwrap(), b"after all");
    say("kept");
    std::process::exit(0);
}

#[test]
fn an_arena_whose_lock_is_held_holds_up_nobody_as_root() {
    if !is_root("an_arena_whose_lock_is_held_holds_up_nobody_as_root") {
        return;
    }
    let node = node(1000);
    // The attacker needs root only for its memory. A FUSE server of any user has the same effect.
    let mut mallory = Attacker::with(Process::command("keep x", &node.socket()));
    assert_eq!(mallory.said(), "kept");
    others_go_on(&node, 7208);
    mallory.end();
    others_go_on(&node, 7218);
}
