//! Processes that are killed, an engine that is killed, clients that break the protocol, and a lack
//! of every resource.
#![allow(clippy::unwrap_used)]

mod client;
mod node;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use client::{Client, Connected, PATIENCE, readable};
use node::{Node, Process, at};
use slipway_ring::cross::Error;
use slipway_sgiov::{Engine, Settings, raise_descriptor_limit, report};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::{REQUEST, Reply, Request};
use slipway_sgiov_spec::table::entry;

const ENOBUFS: u32 = 105;

/// The body of a test's child processes, chosen by the environment. Does nothing in a run of the
/// tests.
#[test]
fn in_a_child_process() {
    match node::role() {
        None => {}
        Some((role, files, socket)) if role == "engine" => node::serve(&files, socket),
        Some((role, port, socket)) if role == "send" => {
            send_for_ever(&socket, port.parse().unwrap());
        }
        Some(other) => panic!("{other:?}"),
    }
}

fn send_for_ever(socket: &Path, port: u16) {
    let mut client = Client::attach(socket);
    let connected = client.connect(at(port)).unwrap();
    let text: Vec<u8> = (0..100_003u32).map(|number| (number % 251) as u8).collect();
    let mut sent = 0usize;
    loop {
        let from = sent % 251;
        sent += client.send(&connected, &text[from..from + 99_000]).unwrap();
    }
}

#[test]
fn a_sender_that_is_killed_leaves_a_whole_beginning_and_an_end() {
    let node = Node::new();
    let mut server = node.attach();
    let (listener, waits) = server.listen(at(7100), 5);
    let (mut resets, mut longest) = (0, Duration::ZERO);
    for round in 0..12 {
        let mut sender = Process::new("send 7100", &node.socket());
        assert!(readable(waits.as_fd(), PATIENCE));
        slipway_peer::eventfd::drain(waits.as_fd());
        let there = server.accept(listener).unwrap();
        let (mut got, mut killed) = (0usize, None);
        let ended = loop {
            let came = match server.read(&there, 70_001) {
                Ok(came) if came.is_empty() => break false,
                Ok(came) => came,
                Err(Error::Reset) => break true,
                Err(other) => panic!("{other}"),
            };
            let whole = came.iter().enumerate().all(|(at, byte)| *byte == ((got + at) % 251) as u8);
            assert!(whole, "round {round}: something else came at {got}");
            got += came.len();
            if got > round * 300_000 && killed.is_none() {
                sender.kill();
                killed = Some(Instant::now());
            }
        };
        longest = longest.max(killed.map_or(PATIENCE, |at| at.elapsed()));
        assert!(longest < PATIENCE);
        resets += usize::from(ended);
        server.close(there);
    }
    println!("longest from the death to the end: {longest:?}; {resets} resets of 12");
    // All of them were killed in the middle of a send, or close to it.
    assert!(resets > 0);
    node.all_is_given_back(&server);
}

#[test]
fn an_engine_that_is_killed_is_noticed_and_replaced_at_once() {
    let mut node = Node::new();
    let (server, mut client) = (node.attach(), node.attach());
    let (_listener, _) = server.listen(at(7101), 5);
    let c = client.connect(at(7101)).unwrap();
    node.engine.kill();
    for there in [&server, &client] {
        assert!(
            client::receive(&there.socket).is_none(),
            "it has gone, and its connections with it"
        );
    }
    drop(c);
    // The killed engine's socket and lock are still there.
    assert!(node.socket().exists());
    node.engine = Process::new("engine 1000", &node.socket());
    let (mut server, mut client) = (node.attach(), node.attach());
    let (listener, _) = server.listen(at(7101), 5);
    let c = client.connect(at(7101)).unwrap();
    let s = server.accept(listener).unwrap();
    client.write(&c, b"again").unwrap();
    assert_eq!(server.read(&s, 100).unwrap(), b"again");
}

#[test]
fn one_engine_serves_a_socket() {
    let node = Node::new();
    let _client = node.attach();
    let other = Engine::bind(Settings { socket: node.socket(), ..Settings::default() });
    assert!(other.err().unwrap().to_string().contains("another socket engine"));
    assert!(report(&node.socket()).is_ok(), "the first one serves on");
}

/// Returns whether the engine hangs up on a client that sends `bytes` after it attached.
fn hangs_up(node: &Node, bytes: &[u8], files: usize) -> bool {
    let client = node.attach();
    let files = vec![client.socket.as_fd(); files];
    client::send(&client.socket, bytes, &files).unwrap();
    client::receive(&client.socket).is_none()
}

#[test]
fn who_does_not_keep_to_the_protocol_is_hung_up_on() {
    let node = Node::new();
    let good = Request::Fork.encode();
    for len in [1, 8, 63] {
        assert!(hangs_up(&node, &good[..len], 0), "{len} bytes");
    }
    assert!(hangs_up(&node, &[good.as_slice(), &[0]].concat(), 0));
    assert!(hangs_up(&node, &[0xff; 4096], 0));
    assert!(hangs_up(&node, &good, 60), "too many descriptors");
    assert!(hangs_up(&node, &Request::Attach { version: 1 }.encode(), 0), "it attached twice");
    for byte in 0..REQUEST {
        let mut bytes = Request::Connect { to: at(1), from: at(0) }.encode();
        bytes[byte] ^= 0x80;
        let client = node.attach();
        client::send(&client.socket, &bytes, &[]).unwrap();
        // The bytes may happen to be a request: then there is a reply.
        client::receive(&client.socket);
    }
    // A request before the client has attached.
    let socket = client::connect(&node.socket());
    client::send(&socket, &good, &[]).unwrap();
    assert!(client::receive(&socket).is_none());
    let socket = client::connect(&node.socket());
    client::send(&socket, &Request::Attach { version: 9 }.encode(), &[]).unwrap();
    assert_eq!(client::receive(&socket).unwrap().0, Reply::Refused(93));
    // Requests that name another client's listener and endpoint.
    let (mut one, other) = (node.attach(), node.attach());
    let (listener, _) = other.listen(at(7102), 1);
    assert_eq!(one.accept(listener).err(), Some(9));
    assert_eq!(one.accept(u64::MAX).err(), Some(9));
    assert_eq!(one.ask(Request::Unlisten { listener }).0, Reply::Refused(9));
    let there = one.connect(at(7102)).unwrap();
    client::send(&other.socket, &Request::Close { entry: there.endpoint.entry }.encode(), &[])
        .unwrap();
    client::send(&other.socket, &Request::Close { entry: u64::MAX }.encode(), &[]).unwrap();
    assert!(matches!(other.ask(Request::Report).0, Reply::Report { .. }));
    assert_eq!(one.write(&there, b"still there"), Ok(11));
}

#[test]
fn who_does_not_read_holds_nobody_up() {
    let node = Node::new();
    let (silent, mut other) = (node.attach(), node.attach());
    rustix::io::ioctl_fionbio(&silent.socket, true).unwrap();
    let begun = Instant::now();
    let ask = Request::Connect { to: at(9), from: Address::ANY }.encode();
    let sent = || client::send(&silent.socket, &ask, &[]);
    while let Ok(()) | Err(rustix::io::Errno::AGAIN) = sent() {
        assert!(begun.elapsed() < PATIENCE, "nobody hung up");
        assert_eq!(other.connect(at(9)).err(), Some(93));
    }
}

#[test]
fn without_descriptors_a_connection_is_refused_and_nothing_is_held() {
    let node = Node::with_files(400);
    let (mut server, mut client) = (node.attach(), node.attach());
    let (listener, _) = server.listen(at(7103), 4096);
    for _ in 0..3 {
        let mut all = Vec::new();
        let refused = loop {
            match client.connect(at(7103)) {
                Ok(there) => all.push(there),
                Err(errno) => break errno,
            }
            assert!(all.len() < 400);
        };
        assert_eq!(refused, ENOBUFS);
        assert!(all.len() > 10, "{}", all.len());
        for there in all {
            let accepted = server.accept(listener).unwrap();
            client.close(there);
            server.close(accepted);
        }
    }
}

#[test]
fn more_connections_than_descriptors_end_as_others_do() {
    many_connections_end_as_others_do(false);
    // The server's eventfds are shared, and held by this process; the engine's threads
    // for eventfds have the others.
    many_connections_end_as_others_do(true);
}

fn many_connections_end_as_others_do(server_shares: bool) {
    const CONNECTIONS: usize = 500;
    assert!(raise_descriptor_limit(4096) >= 4096, "too few descriptors");
    let node = Node::with_files(700);
    let (mut server, mut client) = (node.attach(), node.attach());
    let (listener, _) = server.listen(at(7106), 5);
    server.share(server_shares);
    let pair = |client: &mut Client, server: &mut Client| {
        let mut there = client.connect(at(7106)).unwrap();
        let here = server.accept(listener).unwrap();
        if there.later {
            there.peer = client.peer(there.endpoint.entry).unwrap();
        }
        (there, here)
    };
    let mut all: Vec<_> = (0..CONNECTIONS).map(|_| pair(&mut client, &mut server)).collect();
    for (there, here) in &all {
        client.write(there, b"awake").unwrap();
        assert_eq!(server.read(here, 100).unwrap(), b"awake");
    }
    // A connection of each half of the numbers is closed, and one is opened in its place.
    for number in [CONNECTIONS - 1, 0] {
        let (there, here) = all.remove(number);
        client.close(there);
        assert!(readable(here.eventfd.as_fd(), PATIENCE));
        assert_eq!(server.read(&here, 1).unwrap(), b"");
        server.close(here);
        all.push(pair(&mut client, &mut server));
    }
    let mut groups: BTreeMap<_, Vec<Connected>> = BTreeMap::new();
    for (_, here) in all {
        // Each endpoint of group 0 has an eventfd of its own.
        let own = if here.group == 0 { here.endpoint.entry } else { 0 };
        groups.entry((here.group, own)).or_default().push(here);
    }
    drop(client);
    groups.into_values().for_each(|group| close_as_they_end(&server, group));
    node.all_is_given_back(&server);
}

/// Closes endpoints that share an eventfd. The eventfd announces each end, and ends that are
/// announced together are seen together.
fn close_as_they_end(server: &Client, mut group: Vec<Connected>) {
    while let Some(first) = group.first() {
        assert!(readable(first.eventfd.as_fd(), PATIENCE));
        slipway_peer::eventfd::drain(first.eventfd.as_fd());
        let has_ended = |here: &mut Connected| server.stream(here).available() == Ok((0, true));
        group.extract_if(.., has_ended).for_each(|here| server.close(here));
    }
}

#[test]
fn a_table_full_of_nonsense_spoils_its_own_streams_only() {
    let node = Node::new();
    let (mut server, mut liar, mut client) = (node.attach(), node.attach(), node.attach());
    let (listener, _) = server.listen(at(7104), 64);
    let c = client.connect(at(7104)).unwrap();
    let s = server.accept(listener).unwrap();
    client.write(&c, b"honest").unwrap();
    let mut random = 1u64;
    for _ in 0..40 {
        let there = liar.connect(at(7104)).unwrap();
        let accepted = server.accept(listener).unwrap();
        let _ = liar.write(&there, &[1; 5000]);
        for word in 0..entry::WORDS {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            liar.word(there.endpoint.entry, word).store(random ^ random >> 33, Ordering::Relaxed);
        }
        let arena = &liar.arenas[&there.endpoint.place.link];
        for word in arena.words().iter().skip(512).take(64) {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            word.store(random ^ random >> 33, Ordering::Relaxed);
        }
        liar.close(there);
        let _ = server.read(&accepted, 100);
        server.close(accepted);
    }
    assert_eq!(server.read(&s, 100).unwrap(), b"honest");
    server.write(&s, b"answer").unwrap();
    assert_eq!(client.read(&c, 100).unwrap(), b"answer");
}
