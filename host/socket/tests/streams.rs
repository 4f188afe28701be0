//! Connections between families, through a minimal engine.
#![allow(clippy::unwrap_used)]

mod engine;

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use slipway_socket::{Address, Deadline, Endpoint, Errno, Family, Half, NotConnected, Opened};

const SECONDS: u64 = 1_000_000_000;

struct World {
    path: PathBuf,
    stop: Option<OwnedFd>,
    engine: Option<std::thread::JoinHandle<()>>,
    _directory: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let engine = engine::Engine::new(&path);
        let (end, stop) = rustix::pipe::pipe().unwrap();
        let engine = std::thread::spawn(move || engine.run(&end));
        Self { path, stop: Some(stop), engine: Some(engine), _directory: directory }
    }

    fn family(&self) -> Arc<Family> {
        Family::attach(&self.path).unwrap()
    }

    /// Returns both ends of a connection between two families.
    fn pair(&self) -> (Opened, Opened) {
        let (server, client) = (self.family(), self.family());
        let here = Address::v4([127, 0, 0, 1], 0);
        let listening = server.listen(here, 8, false, false, None).unwrap();
        assert!(matches!(server.accept(listening.listener), Err(Errno::AGAIN)));
        let ours = client.connect(listening.at, Address::ANY).unwrap_or_else(|_| panic!("refused"));
        (ours, server.accept(listening.listener).unwrap())
    }

    fn kill(&mut self) {
        self.stop = None;
        self.engine.take().unwrap().join().unwrap();
    }
}

fn all(from: &Opened, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let mut done = 0;
    while done < length {
        match from.endpoint.recv(&mut bytes[done..]) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(Errno::AGAIN) => {
                let until = Deadline::after(20 * SECONDS);
                from.endpoint.wait(Half::Receiving, from.eventfd.as_fd(), until).unwrap();
            }
            Err(errno) => panic!("{errno}"),
        }
    }
    bytes.truncate(done);
    bytes
}

fn send(to: &Opened, bytes: &[u8]) {
    let mut done = 0;
    while done < bytes.len() {
        match to.endpoint.send(&bytes[done..]) {
            Ok(count) => done += count,
            Err(Errno::AGAIN) => {
                let until = Deadline::after(20 * SECONDS);
                to.endpoint.wait(Half::Sending, to.eventfd.as_fd(), until).unwrap();
            }
            Err(errno) => panic!("{errno}"),
        }
    }
}

#[test]
fn bytes_arrive_and_the_end_after_them() {
    let world = World::new();
    let (client, server) = world.pair();
    assert_eq!(client.endpoint.recv(&mut [0; 8]), Err(Errno::AGAIN));
    send(&client, b"hello");
    assert_eq!(server.endpoint.arrived(), 5);
    let mut peeked = [0; 3];
    assert_eq!(server.endpoint.peek(&mut peeked), Ok(3));
    assert_eq!(&peeked, b"hel");
    assert_eq!(all(&server, 5), b"hello");
    client.endpoint.finish();
    assert_eq!(server.endpoint.recv(&mut [0; 8]), Ok(0));
    assert_eq!(client.endpoint.send(b"x"), Err(Errno::PIPE));
    send(&server, b"still");
    let mut seen = [0; 8];
    assert_eq!(client.endpoint.peek(&mut seen[..2]), Ok(2));
    assert_eq!(client.endpoint.peek_behind(2, &mut seen[2..]), 3);
    assert_eq!((&seen[..5], client.endpoint.peek_behind(5, &mut [0; 1])), (&b"still"[..], 0));
    assert_eq!(all(&client, 5), b"still");
    assert_eq!(client.endpoint.counts(), (5, 5));
    server.endpoint.close();
    assert_eq!(client.endpoint.recv(&mut [0; 8]), Ok(0));
}

#[test]
fn megabytes_go_both_ways_at_once() {
    let world = World::new();
    let (client, server) = world.pair();
    let data: Vec<u8> = (0..6_000_000u32).map(|n| ((n * 7) >> 3) as u8).collect();
    std::thread::scope(|scope| {
        for (from, to) in [(&client, &server), (&server, &client)] {
            let data = &data;
            scope.spawn(move || send(from, data));
            scope.spawn(move || assert!(all(to, data.len()) == *data));
        }
    });
}

#[test]
fn what_was_left_unread_resets_the_other_side_once() {
    let world = World::new();
    let (client, server) = world.pair();
    send(&client, b"nobody reads this");
    server.endpoint.close();
    let bits = client.endpoint.ready();
    assert_eq!(bits & 0x15f, 0x15d, "IN and RDNORM, OUT and WRNORM, ERR and HUP");
    assert_eq!(client.endpoint.recv(&mut [0; 8]), Err(Errno::CONNRESET));
    assert_eq!(client.endpoint.recv(&mut [0; 8]), Ok(0));
    assert_eq!(client.endpoint.send(b"x"), Err(Errno::PIPE));
}

/// A call that moved bytes before it met the reset leaves the reset to the next one.
#[test]
fn a_reset_that_is_left_is_told_of_once_more() {
    let world = World::new();
    let (client, server) = world.pair();
    send(&client, b"nobody reads this");
    server.endpoint.close();
    for _ in 0..2 {
        assert_eq!(client.endpoint.recv(&mut [0; 8]), Err(Errno::CONNRESET));
        client.endpoint.leave_reset(Errno::AGAIN);
        assert_eq!(client.endpoint.recv(&mut [0; 8]), Ok(0));
        client.endpoint.leave_reset(Errno::CONNRESET);
    }
}

#[test]
fn bytes_to_peek_at_are_there_once_no_more_may_come() {
    let world = World::new();
    let (client, server) = world.pair();
    assert!(server.endpoint.has_arrived(0) && !server.endpoint.has_arrived(1));
    send(&client, b"abc");
    assert!(server.endpoint.has_arrived(3) && !server.endpoint.has_arrived(4));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let until = Deadline::after(20 * SECONDS);
            while !server.endpoint.has_arrived(6) {
                server.endpoint.wait_to_peek(6, server.eventfd.as_fd(), until).unwrap();
            }
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        send(&client, b"def");
    });
    assert!(!server.endpoint.has_arrived(7));
    while client.endpoint.send(&[0; 65_536]).is_ok() {}
    assert!(server.endpoint.has_arrived(usize::MAX), "the FIFO is full");
    let (client, server) = world.pair();
    send(&client, b"abc");
    client.endpoint.finish();
    assert!(server.endpoint.has_arrived(4), "the stream has ended");
}

#[test]
fn an_aborted_stream_is_reset_for_the_peer_and_ends_here() {
    let world = World::new();
    let (client, server) = world.pair();
    send(&server, b"unread");
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let until = Deadline::after(20 * SECONDS);
            while server.endpoint.recv(&mut [0; 1]) == Err(Errno::AGAIN) {
                server.endpoint.wait(Half::Receiving, server.eventfd.as_fd(), until).unwrap();
            }
        });
        client.endpoint.abort();
        client.endpoint.wake(client.eventfd.as_fd());
        sleeper.join().unwrap();
    });
    assert_ne!(server.endpoint.ready() & 0x10, 0, "HUP");
    assert_eq!(client.endpoint.recv(&mut [0; 8]), Ok(6), "what came before");
    assert_eq!(client.endpoint.recv(&mut [0; 8]), Ok(0));
    assert!(client.endpoint.send(b"x").is_err());
    client.endpoint.close();
    assert!(server.endpoint.send(b"x").is_err());
}

#[test]
fn a_sleeper_is_woken_by_data_room_and_the_end() {
    let world = World::new();
    let (client, server) = world.pair();
    let wait = |of: &Opened, half| {
        of.endpoint.wait(half, of.eventfd.as_fd(), Deadline::after(20 * SECONDS)).unwrap();
    };
    let short = Deadline::after(1_000_000);
    let slept = client.endpoint.wait(Half::Receiving, client.eventfd.as_fd(), short);
    assert!(slept.is_ok() || slept == Err(Errno::AGAIN));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while server.endpoint.recv(&mut [0; 1]) == Err(Errno::AGAIN) {
                wait(&server, Half::Receiving);
            }
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        send(&client, b"x");
    });
    while client.endpoint.send(&[0; 65_536]).is_ok() {}
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while client.endpoint.send(b"y") == Err(Errno::AGAIN) {
                wait(&client, Half::Sending);
            }
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        let mut bytes = vec![0; 1 << 20];
        while server.endpoint.recv(&mut bytes).is_ok() {}
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while client.endpoint.recv(&mut [0; 1]) != Ok(0) {
                wait(&client, Half::Receiving);
            }
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        server.endpoint.finish();
    });
}

#[test]
fn the_engines_end_resets_all() {
    let mut world = World::new();
    let (client, server) = world.pair();
    world.kill();
    for side in [&client, &server] {
        let until = Deadline::after(20 * SECONDS);
        let mut got = side.endpoint.recv(&mut [0; 8]);
        while got == Err(Errno::AGAIN) {
            side.endpoint.wait(Half::Receiving, side.eventfd.as_fd(), until).unwrap();
            got = side.endpoint.recv(&mut [0; 8]);
        }
        assert_eq!(got, Err(Errno::CONNRESET));
    }
    assert!(Family::attach(&world.path).is_err());
}

#[test]
fn a_port_where_nobody_listens_is_not_ours() {
    let world = World::new();
    let family = world.family();
    let to = Address::v4([127, 0, 0, 1], 9);
    assert!(matches!(family.connect(to, Address::ANY), Err(NotConnected::NotOurs)));
}

/// The child's copies count: only the close of the last copy ends the stream.
#[test]
fn who_shares_an_endpoint_shares_its_end() {
    let world = World::new();
    let (client, server) = world.pair();
    let family: &Arc<Family> = client.endpoint.family();
    let connection = family.fork().unwrap();
    client.endpoint.hold();
    client.endpoint.close();
    assert_eq!(server.endpoint.recv(&mut [0; 8]), Err(Errno::AGAIN));
    // The child is killed.
    drop(connection);
    let until = Deadline::after(20 * SECONDS);
    while server.endpoint.recv(&mut [0; 8]) == Err(Errno::AGAIN) {
        server.endpoint.wait(Half::Receiving, server.eventfd.as_fd(), until).unwrap();
    }
    assert_eq!(server.endpoint.recv(&mut [0; 8]), Ok(0));
}

/// A child of fork(2) for which the engine made no connection leaves its parent's endpoints open.
#[test]
fn a_child_without_a_connection_closes_nothing_of_its_parents() {
    let world = World::new();
    let (client, server) = world.pair();
    client.endpoint.hold();
    client.endpoint.family().forked(None);
    client.endpoint.close();
    // The engine has read all that was sent before the first request was answered.
    for _ in 0..2 {
        assert_eq!(server.endpoint.family().accept(u64::MAX).err(), Some(Errno::AGAIN));
    }
    assert_eq!(server.endpoint.recv(&mut [0; 8]), Err(Errno::AGAIN));
}

fn _is_shared<T: Send + Sync>() {}
#[allow(dead_code)]
fn an_endpoint_is_shared() {
    _is_shared::<Endpoint>();
}
