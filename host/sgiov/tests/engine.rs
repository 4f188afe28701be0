//! The engine in a thread, its clients beside it.
#![allow(clippy::unwrap_used)]

mod client;
mod running;

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::Ordering;

use client::{Client, Connected, PATIENCE, readable, until};
use running::Running;
use slipway_ring::cross::Error;
use slipway_sgiov::Settings;
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::{NOT_OURS, Reply, Request, SHARERS};
use slipway_sgiov_spec::table::entry;
use slipway_socket::{Errno, Family};

impl Running {
    fn attach(&self) -> Client {
        Client::attach(&self.socket())
    }
}

fn at(port: u16) -> Address {
    Address::v4([127, 0, 0, 1], port)
}

#[test]
fn two_programs_talk_and_one_closes() {
    let engine = Running::new(Settings::default());
    let (mut server, mut client) = (engine.attach(), engine.attach());
    assert_eq!(client.connect(at(7000)).err(), Some(NOT_OURS));
    let (listener, waits) = server.listen(Address::v4([0; 4], 7000), 5);
    assert_eq!(server.accept(listener).err(), Some(11));
    let c = client.connect(at(7000)).unwrap();
    assert!(readable(waits.as_fd(), PATIENCE));
    let s = server.accept(listener).unwrap();
    assert_eq!(s.endpoint.local, c.endpoint.peer);
    assert_eq!(s.endpoint.peer, c.endpoint.local);
    assert!((32_768..=60_999).contains(&c.endpoint.local.port));
    assert!(c.endpoint.place.same_tenant && !c.endpoint.place.engine);
    let reported = slipway_sgiov::report(&engine.socket()).unwrap();
    assert_eq!(reported.connections.len(), 1);
    assert!(reported.connections[0].in_flight.is_some(), "both ends are open");
    assert_eq!(client.write(&c, b"ping").unwrap(), 4);
    assert_eq!(server.read(&s, 100).unwrap(), b"ping");
    let long = vec![7; 300_000];
    let mut sent = 0;
    let mut got = Vec::new();
    while got.len() < long.len() {
        sent += server.write(&s, &long[sent..]).unwrap();
        got.extend(client.read(&c, 100_000).unwrap());
    }
    assert_eq!(got, long);
    client.close(c);
    assert_eq!(server.read(&s, 1).unwrap(), b"");
    server.close(s);
    // A further connection uses the same link and the same stream.
    for _ in 0..100 {
        let c = client.connect(at(7000)).unwrap();
        let s = server.accept(listener).unwrap();
        client.write(&c, b"again").unwrap();
        assert_eq!(server.read(&s, 100).unwrap(), b"again");
        server.close(s);
        assert_eq!(client.read(&c, 1).unwrap(), b"");
        client.close(c);
    }
    assert_eq!((client.arenas.len(), server.arenas.len()), (1, 1));
}

#[test]
fn what_programs_sent_counts_after_their_end() {
    let engine = Running::new(Settings::default());
    let (server, mut client) = (engine.attach(), engine.attach());
    let (_listener, _waits) = server.listen(Address::v4([0; 4], 7000), 5);
    let c = client.connect(at(7000)).unwrap();
    client.word(c.endpoint.entry, entry::SENT).store(30, Ordering::Relaxed);
    client.word(c.endpoint.entry, entry::RECEIVED).store(4, Ordering::Relaxed);
    let count = || {
        let told = slipway_sgiov::report(&engine.socket()).unwrap();
        (told.sent, told.received, told.families.len())
    };
    assert_eq!(count(), (30, 4, 2));
    drop(client);
    until("the client's family has ended", || count().2 == 1);
    assert_eq!(count(), (30, 4, 1));
    drop(server);
    until("the namespace has no family", || count().2 == 0);
    assert_eq!(count(), (30, 4, 0));
}

/// Returns the first error of `call` that is not "try again", or `None` if 1,000 calls have none.
fn first_error(mut call: impl FnMut() -> Result<usize, Errno>) -> Option<Errno> {
    (0..1000).filter_map(|_| call().err()).find(|&error| error != Errno::AGAIN)
}

/// A peer that writes only one of the two words that mean a reset makes no program retry for ever.
#[test]
fn half_a_reset_is_one() {
    let engine = Running::new(Settings::default());
    let (mut hostile, family) = (engine.attach(), Family::attach(&engine.socket()).unwrap());
    let (listener, _waits) = hostile.listen(at(7000), 5);
    let mut pair = || {
        let ours = family.connect(at(7000), Address::ANY).unwrap_or_else(|_| panic!("refused"));
        (ours.endpoint, hostile.accept(listener).unwrap())
    };
    let (ours, theirs) = pair();
    let (other, others) = pair();
    hostile.stream(&theirs).out.reset();
    assert_eq!(first_error(|| ours.send(&[0; 65536])), Some(Errno::CONNRESET));
    hostile.stream(&others).into.reset();
    assert_eq!(first_error(|| other.recv(&mut [0; 10])), Some(Errno::CONNRESET));
}

/// The acceptor trusts the source address that the engine reports.
#[test]
fn nobody_connects_from_an_address_of_others() {
    let engine = Running::new(Settings::default());
    let (mut server, mut client) = (engine.attach(), engine.attach());
    let (listener, _waits) = server.listen(at(7000), 5);
    for forged in [[198, 51, 100, 7], [8, 8, 8, 8]] {
        assert_eq!(client.connect_from(Address::v4(forged, 0), at(7000)).err(), Some(NOT_OURS));
    }
    assert_eq!(server.accept(listener).err(), Some(11));
    let own = Address::v4([127, 0, 0, 9], 4000);
    assert_eq!(client.connect_from(own, at(7000)).unwrap().endpoint.local, own);
    assert_eq!(server.accept(listener).unwrap().endpoint.peer, own);
}

#[test]
fn unread_data_resets_as_it_does_with_tcp() {
    let engine = Running::new(Settings::default());
    let (mut server, mut client) = (engine.attach(), engine.attach());
    let (listener, _) = server.listen(at(7001), 5);
    let c = client.connect(at(7001)).unwrap();
    let s = server.accept(listener).unwrap();
    client.write(&c, b"nobody reads this").unwrap();
    server.write(&s, b"but this").unwrap();
    server.close(s);
    assert_eq!(client.read(&c, 100).unwrap(), b"but this");
    assert_eq!(client.read(&c, 100), Err(Error::Reset));
}

#[test]
fn a_program_that_ends_closes_all_that_it_had() {
    let engine = Running::new(Settings::default());
    let (mut server, mut client) = (engine.attach(), engine.attach());
    let (listener, _) = server.listen(at(7002), 5);
    let waits = client.connect(at(7002)).unwrap();
    let c = client.connect(at(7002)).unwrap();
    server.accept(listener).unwrap();
    let _s = server.accept(listener).unwrap();
    let pending = client.connect(at(7002)).unwrap();
    drop(server);
    assert_eq!(client.read(&c, 1).unwrap(), b"");
    assert_eq!(client.read(&waits, 1).unwrap(), b"");
    assert_eq!(client.read(&pending, 1), Err(Error::Reset));
    assert_eq!(client.connect(at(7002)).err(), Some(NOT_OURS));
}

#[test]
fn a_program_connects_to_itself() {
    let engine = Running::new(Settings::default());
    let mut client = engine.attach();
    let (listener, _) = client.listen(at(7003), 5);
    let c = client.connect(at(7003)).unwrap();
    let s = client.accept(listener).unwrap();
    assert_ne!(c.endpoint.place.link, s.endpoint.place.link);
    client.write(&c, b"to myself").unwrap();
    client.write(&s, b"and back").unwrap();
    assert_eq!(client.read(&s, 100).unwrap(), b"to myself");
    assert_eq!(client.read(&c, 100).unwrap(), b"and back");
    client.close(s);
    assert_eq!(client.read(&c, 100).unwrap(), b"");
}

#[test]
fn a_child_holds_what_its_parent_held() {
    let engine = Running::new(Settings::default());
    let (mut server, mut client) = (engine.attach(), engine.attach());
    let (listener, _) = server.listen(at(7004), 5);
    let c = client.connect(at(7004)).unwrap();
    let s = server.accept(listener).unwrap();
    let (reply, mut files) = server.ask(Request::Fork);
    assert_eq!(reply, Reply::Done);
    let child = files.pop().unwrap();
    let entry = s.endpoint.entry;
    server.close(s);
    // The child still has the connection, and the listener, too.
    client.write(&c, b"x").unwrap();
    let (reply, _) = server.ask(Request::Unlisten { listener });
    assert_eq!(reply, Reply::Done);
    let second = client.connect(at(7004)).unwrap();
    client::send(&child, &Request::Accept { listener }.encode(), &[]).unwrap();
    let (reply, files) = client::receive(&child).unwrap();
    // The child knows the link from its parent.
    assert!(matches!(reply, Reply::Connected { new_link: false, .. }), "{reply:?}");
    assert_eq!(files.len(), 2);
    client::send(&child, &Request::Close { entry }.encode(), &[]).unwrap();
    assert_eq!(client.read(&c, 1), Err(Error::Reset));
    drop(child);
    assert_eq!(client.read(&second, 1).unwrap(), b"");
}

#[test]
fn listeners_collide_share_and_fill_up() {
    let engine = Running::new(Settings::default());
    let (server, mut client) = (engine.attach(), engine.attach());
    let listen =
        |at, shared| server.ask(Request::Listen { at, backlog: 1, shared, v6_only: false }).0;
    server.listen(at(7005), 1);
    assert_eq!(listen(Address::v4([0; 4], 7005), false), Reply::Refused(98));
    assert_eq!(listen(at(7005), true), Reply::Refused(98));
    assert!(matches!(listen(at(7006), true), Reply::Listening { .. }));
    assert!(matches!(listen(at(7006), true), Reply::Listening { .. }));
    let any = listen(at(0), false);
    assert!(matches!(any, Reply::Listening { at, .. } if at.port >= 32_768));
    let _two = [client.connect(at(7005)).unwrap(), client.connect(at(7005)).unwrap()];
    assert_eq!(client.connect(at(7005)).err(), Some(NOT_OURS), "the kernel has its own way");
    let _four: Vec<_> = (0..4).map(|_| client.connect(at(7006)).unwrap()).collect();
    assert_eq!(client.connect(at(7006)).err(), Some(NOT_OURS));
}

#[test]
fn another_image_of_a_process_goes_on_with_what_it_held() {
    let engine = Running::new(Settings::default());
    let (mut server, mut client) = (engine.attach(), engine.attach());
    let (listener, _) = server.listen(at(7007), 5);
    let c = client.connect(at(7007)).unwrap();
    let s = server.accept(listener).unwrap();
    client.write(&c, b"before").unwrap();
    let (reply, mut files) = server.ask(Request::Exec);
    assert_eq!(reply, Reply::Done);
    let ticket = files.pop().unwrap();
    drop(server);
    client::send(&ticket, &Request::Resume.encode(), &[]).unwrap();
    let (reply, files) = client::receive(&ticket).unwrap();
    assert!(matches!(reply, Reply::Attached { .. }), "{reply:?}");
    let mut server = Client::resumed(files);
    assert!(client::receive(&ticket).is_none(), "a ticket is good for once");
    let again = server.held(0).unwrap();
    assert_eq!(again.endpoint, s.endpoint);
    assert_eq!(server.held(again.endpoint.entry + 1).err(), Some(2));
    assert_eq!(server.read(&again, 100).unwrap(), b"before");
    server.write(&again, b"after").unwrap();
    assert_eq!(client.read(&c, 100).unwrap(), b"after");
    let (reply, files) = server.ask(Request::HeldListener { listener: 0 });
    assert_eq!(reply, Reply::Listening { listener, at: at(7007) });
    assert_eq!(files.len(), 1);
    client.connect(at(7007)).unwrap();
    server.accept(listener).unwrap();
    server.close(again);
    assert_eq!(client.read(&c, 1).unwrap(), b"");
}

#[test]
fn a_ticket_is_for_nothing_else_and_not_for_ever() {
    let engine = Running::new(Settings::default());
    let (server, mut client) = (engine.attach(), engine.attach());
    let (listener, _) = server.listen(at(7008), 5);
    let ticket = || server.ask(Request::Exec).1.pop().unwrap();
    let (one, other, kept) = (ticket(), ticket(), ticket());
    client::send(&one, &Request::Accept { listener }.encode(), &[]).unwrap();
    assert!(client::receive(&one).is_none());
    drop(other);
    let c = client.connect(at(7008)).unwrap();
    drop(server);
    // The last ticket expires, and the connection ends with it.
    assert_eq!(client.read(&c, 1), Err(Error::Reset));
    assert!(client::receive(&kept).is_none());
    // A connection that is no ticket cannot be resumed.
    client::send(&client.socket, &Request::Resume.encode(), &[]).unwrap();
    assert!(client::receive(&client.socket).is_none());
}

/// Returns the number of different eventfds of some connections.
fn eventfds<'a>(of: impl Iterator<Item = &'a Connected>) -> usize {
    let id = |one: &Connected| {
        let info = format!("/proc/self/fdinfo/{}", one.eventfd.as_raw_fd());
        let text = std::fs::read_to_string(info).unwrap();
        let line = text.lines().find(|line| line.starts_with("eventfd-id:"));
        line.unwrap_or_else(|| panic!("no number in {text}")).to_owned()
    };
    of.map(id).collect::<std::collections::HashSet<_>>().len()
}

#[test]
fn many_endpoints_of_a_process_share_eventfds_by_link() {
    let engine = Running::new(Settings::default());
    let (mut server, mut client, mut other) = (engine.attach(), engine.attach(), engine.attach());
    let (listener, _) = server.listen(at(7000), 100);
    // The engine learns at the accept whether the acceptor shares.
    server.share(true);
    assert_eq!(server.accept(listener).err(), Some(11));
    client.share(true);
    let count = SHARERS * 2 + 1;
    let mut near: Vec<_> = (0..count).map(|_| client.connect(at(7000)).unwrap()).collect();
    assert!(near.iter().all(|one| one.later && one.group != 0));
    let entry = near[0].endpoint.entry;
    assert_eq!(client.peer(entry).err(), Some(11), "nobody has accepted it");
    assert_eq!(client.peer(9999).err(), Some(9));
    let far: Vec<_> = (0..count).map(|_| server.accept(listener).unwrap()).collect();
    assert_eq!((eventfds(near.iter()), eventfds(far.iter())), (3, 3));
    let foreign = (other.connect(at(7000)).unwrap(), server.accept(listener).unwrap());
    assert_eq!((foreign.0.group, eventfds(far.iter().chain([&foreign.1]))), (0, 4));
    assert!(far.iter().all(|one| one.group != foreign.1.group));
    // The eventfd that the connector fetches later is the one that the acceptor sleeps on.
    for (near, far) in near.iter_mut().zip(&far) {
        near.peer = client.peer(near.endpoint.entry).unwrap();
        slipway_peer::eventfd::drain(far.eventfd.as_fd());
        client.write(near, b"hello").unwrap();
        assert_eq!(server.read(far, 10).unwrap(), b"hello");
        assert!(!server.stream(far).arm_data(1).unwrap());
        client.write(near, b"!").unwrap();
        assert!(readable(far.eventfd.as_fd(), PATIENCE));
    }
    // The engine ends the connection and notifies the other side.
    slipway_peer::eventfd::drain(far[0].eventfd.as_fd());
    drop(client);
    assert!(readable(far[0].eventfd.as_fd(), PATIENCE));
    server.share(false);
    let (near, far) = (other.connect(at(7000)).unwrap(), server.accept(listener).unwrap());
    assert!(near.later && far.group == 0, "it was not known yet");
    let near = other.peer(near.endpoint.entry).unwrap();
    assert!(slipway_peer::eventfd::raise(near.as_fd()));
    assert!(readable(far.eventfd.as_fd(), PATIENCE));
    assert!(!other.connect(at(7000)).unwrap().later);
}
