//! Guests' socket functions: fake guests over the vfio-user socket, among themselves and with a
//! program of the node. Needs root: the test runs itself in a network namespace of its own.
#![cfg(feature = "guests")]
#![allow(clippy::unwrap_used, unsafe_code)] // unshare(2)

mod client;
mod netns;
mod running;
mod vm;

use std::time::Instant;

use client::{Client, Connected, PATIENCE, until};
use running::Running;
use slipway_ring::cross::Error;
use slipway_sgiov::{Policy, Settings, report};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::NOT_OURS;
use slipway_sgiov_spec::function::{Broken, Message, RUNNING};
use vm::{BYTES, Guest, Open, exchange, guest_to_host, host_to_guest};

const HOST: Address = Address::v4([10, 9, 9, 1], 7000);
/// The address of a program that listens and never accepts.
const UNHEARD: Address = Address { port: 7002, ..HOST };
const POLICY: &str = "
[[allow]]
from = '*'
to = '10.9.0.0/24'
[[allow]]
from = '*'
to = '10.9.9.0/24'
";

#[test]
fn guests_and_programs_talk() {
    netns::alone("guests_and_programs_talk", &[[10, 9, 9, 1]], inside);
}

fn inside() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("policy.toml");
    std::fs::write(&file, POLICY).unwrap();
    let policy = Policy::read(&file).unwrap();
    let engine = Running::within(dir, Settings { policy, guests: true, ..Settings::default() });
    let (dir, socket) = (engine.dir.path().to_owned(), engine.socket());
    let mut host = Client::attach(&socket);
    let (listener, _eventfd) = host.listen(HOST, 16);
    let _unheard = host.listen(UNHEARD, 16);

    // As a fork, whose memory is of a pool.
    let mut a = Guest::start_named(&dir, &socket, "a", "network:one", [10, 9, 0, 1]);
    let mut b = Guest::start(&dir, &socket, "b", "network:one", [10, 9, 0, 2]);
    let mut c = Guest::start(&dir, &socket, "c", "network:two", [10, 9, 1, 3]);
    let at = Address::v4([10, 9, 0, 1], 80);
    a.say(Message::Listen { at: Address::v4([0; 4], 80) });
    c.say(Message::Listen { at: Address::v4([10, 9, 1, 3], 80) });
    c.say(Message::Listen { at: Address::v4([10, 9, 0, 9], 80) });
    until("they listen", || {
        let guests = report(&socket).unwrap().guests;
        guests.len() == 3 && guests.iter().filter(|guest| !guest.listeners.is_empty()).count() == 2
    });
    let (mut ab, ba) = connect_guests(&mut b, &mut a, at);
    exchange_guests((&mut b, &ab), (&mut a, &ba));
    refusals(&mut host, &mut b, &mut c);
    let (host_out, mut guest_in) = host_to_guest(&mut host, HOST, &mut a, at);
    exchange((&host, &host_out), (&mut a, &mut guest_in));
    let (host_in, mut guest_out) = guest_to_host(&mut host, listener, &mut b, HOST);
    exchange((&host, &host_in), (&mut b, &mut guest_out));
    unanswered(&mut host, &mut a, at);
    a.wakes_up(&ba, &mut b, &ab);
    ends(&host, host_in, &mut b, guest_out);
    let reported = report(&socket).unwrap();
    let one = reported.guests.iter().find(|guest| guest.name == "a").unwrap();
    assert!(one.running && one.sent > BYTES && one.received > BYTES && one.streams == 2, "{one:?}");

    // A VMM ends while streams are open.
    drop(a);
    until("the other guest sees it", || b.read(&mut ab) == Err(Error::Reset));
    until("the program sees it", || host.read(&host_out, 1000) == Err(Error::Reset));
    assert_eq!(host.connect(at).err(), Some(NOT_OURS));
    until("it is forgotten", || report(&socket).unwrap().guests.len() == 2);
    let connection = ab.connection;
    b.close(ab);
    assert_eq!(b.next(), Message::Ended { connection });
    host.close(host_out);
    let (host_in, mut guest_out) = guest_to_host(&mut host, listener, &mut b, HOST);
    exchange((&host, &host_in), (&mut b, &mut guest_out));
    hostile(&mut c, &mut b);
    spoiled(&mut host, listener, &mut b);
    exchange((&host, &host_in), (&mut b, &mut guest_out));
    drop(engine);
    until("its function is gone", || b.status().is_none());
}

fn connect_guests(from: &mut Guest, to: &mut Guest, at: Address) -> (Open, Open) {
    let out = from.connect(at);
    let incoming = to.incoming(from.address, at);
    let into = to.accept(incoming);
    assert_eq!(from.next(), Message::Connected { connection: out.connection });
    (out, into)
}

/// Sends bytes both ways at once, and checks each of them.
fn exchange_guests(one: (&mut Guest, &Open), other: (&mut Guest, &Open)) {
    let ((a, a_open), (b, b_open)) = (one, other);
    let (mut sent, mut received) = ([0_u64; 2], [0_u64; 2]);
    let begun = Instant::now();
    while received != [BYTES; 2] {
        sent[0] += a.write(a_open, sent[0], BYTES);
        sent[1] += b.write(b_open, sent[1], BYTES);
        received[1] += b.check(b_open, received[1]);
        received[0] += a.check(a_open, received[0]);
        assert!(begun.elapsed() < PATIENCE, "{sent:?} {received:?}");
    }
}

/// A guest that does not answer is unreachable after a time-out. When it answers again, its
/// function goes on.
fn unanswered(host: &mut Client, guest: &mut Guest, at: Address) {
    let begun = Instant::now();
    let request = slipway_sgiov_spec::control::Request::Connect { to: at, from: Address::ANY };
    client::send(&host.socket, &request.encode(), &[]).unwrap();
    let incoming = guest.incoming(Address { port: 0, ..HOST }, at);
    assert_eq!(host.take_connected().err(), Some(110));
    assert!(begun.elapsed().as_secs() >= 4, "{:?}", begun.elapsed());
    let mut late = guest.accept(incoming);
    until("the late one sees it", || guest.read(&mut late) == Err(Error::Reset));
    let connection = late.connection;
    guest.close(late);
    assert_eq!(guest.next(), Message::Ended { connection });
    assert_eq!(guest.status(), Some(RUNNING));
}

/// Refusals: addresses that policy forbids, and ports where no program listens.
fn refusals(host: &mut Client, b: &mut Guest, c: &mut Guest) {
    for (is_c, to) in [
        (true, Address::v4([10, 9, 0, 1], 81)),
        (false, Address::v4([10, 9, 1, 3], 80)),
        (false, Address::v4([10, 9, 0, 9], 80)),
        (false, Address { port: 7001, ..HOST }),
        (false, Address::v4([127, 0, 0, 1], 7000)),
    ] {
        let guest = if is_c { &mut *c } else { &mut *b };
        let open = guest.connect(to);
        let refused = Message::Refused { connection: open.connection, errno: NOT_OURS };
        assert_eq!(guest.next(), refused, "{to:?}");
    }
    assert_eq!(host.connect(Address::v4([10, 9, 1, 3], 80)).err(), Some(NOT_OURS));
    // A source address that is not the guest's own.
    let open = b.connect_from(Address::v4([10, 9, 0, 1], 5), HOST);
    let refused = Message::Refused { connection: open.connection, errno: 99 };
    assert_eq!(b.next(), refused);
}

/// The end of a stream comes after all of its bytes. An arena is returned when its streams have
/// ended.
fn ends(host: &Client, connected: Connected, guest: &mut Guest, mut open: Open) {
    host.write(&connected, b"last words").unwrap();
    host.close(connected);
    let mut last = Vec::new();
    until("the end", || {
        let (bytes, ended) = guest.read(&mut open).unwrap();
        last.extend(bytes);
        ended
    });
    assert_eq!(last, b"last words");
    let connection = open.connection;
    guest.close(open);
    assert_eq!(guest.next(), Message::Ended { connection });
}

/// Invalid counters of a stream end that stream, and no other.
fn spoiled(host: &mut Client, listener: u64, guest: &mut Guest) {
    let (connected, mut open) = guest_to_host(host, listener, guest, HOST);
    guest.spoil(&open);
    until("the program sees it", || host.read(&connected, 1000) == Err(Error::Reset));
    until("the guest sees it", || guest.read(&mut open) == Err(Error::Reset));
    assert_eq!(guest.status(), Some(RUNNING));
    host.close(connected);
    let connection = open.connection;
    guest.close(open);
    assert_eq!(guest.next(), Message::Ended { connection });
}

/// An attack of a guest.
type Deed = fn(&mut Guest);

/// A guest that breaks the protocol loses its function, and may start it again.
fn hostile(c: &mut Guest, b: &mut Guest) {
    let rubbish: [(&str, Deed); 4] = [
        ("a greeting twice", |guest| guest.say(Message::Hello { version: 1 })),
        ("the close of nothing", |guest| guest.say(Message::Closed { connection: 77 })),
        ("an answer to nothing", |guest| guest.say(Message::Rejected { incoming: 9, errno: 1 })),
        ("a stream twice", |guest| {
            // A request that stays unanswered: a refusal would release the stream, perhaps before
            // it is named again.
            let open = guest.connect(UNHEARD);
            guest.say(Message::Connect {
                connection: open.connection + 1,
                line: open.line,
                from: guest.address,
                to: HOST,
            });
        }),
    ];
    for (what, does) in rubbish {
        does(c);
        until(what, || c.status() == Some(Broken::Message.status()));
        c.restart();
        assert_eq!(c.status(), Some(RUNNING));
    }
    let c_at = Address { port: 81, ..c.address };
    c.say(Message::Listen { at: c_at });
    assert!(!b.is_connected(c_at), "another tenant's");
}
