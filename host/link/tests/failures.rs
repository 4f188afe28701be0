//! Failures between two engines: certificates, damage, silence, death.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use common::*;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use slipway_link::{Ended, Links, LinksError, Settings};

/// Returns the error that a program gets when it connects from `left` to `right`.
fn refused(left: Settings, right: Settings) -> Errno {
    let mut right = Engine::new(right);
    let mut left = Engine::new(left);
    left.links.relocate("right", right.links.local().unwrap());
    let opened = left.links.open("blue", SOURCE, DESTINATION, Instant::now()).unwrap();
    until(&mut left, &mut right, |left, _| !left.ended.is_empty());
    let [(ended, Ended::Refused(errno))] = left.ended[..] else { panic!("{:?}", left.ended) };
    assert_eq!(ended, opened);
    assert!(right.asked.is_empty());
    // The other side holds no connection either.
    until(&mut left, &mut right, |_, right| right.links.reports().is_empty());
    assert!(left.links.reports().is_empty());
    // Too early for another attempt: the same error again.
    let again = left.links.open("blue", SOURCE, DESTINATION, Instant::now());
    assert_eq!(again, Err(errno));
    Errno::from_raw_os_error(errno as i32)
}

fn with(dir: &Path, mut settings: Settings, file: &str) -> Settings {
    settings.certificate = dir.join(format!("{file}.pem"));
    settings.key = dir.join(format!("{file}.key"));
    settings
}

#[test]
fn certificates_that_do_not_do() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    certificates(dir);
    authority(dir, "other");
    let past = "-startdate 20200101000000Z -enddate 20200201000000Z";
    certificate(dir, "ca", "left", "left-expired", past);
    certificate(dir, "ca", "right", "right-expired", past);
    certificate(dir, "other", "left", "left-other", "-days 2");
    certificate(dir, "other", "right", "right-other", "-days 2");
    certificate(dir, "ca", "stranger", "stranger", "-days 2");
    let honest = || (left(dir, "127.0.0.1:1"), right(dir, "127.0.0.1:1"));
    for file in ["left-expired", "left-other", "stranger"] {
        let (left, right) = honest();
        assert_eq!(refused(with(dir, left, file), right), Errno::HOSTUNREACH, "{file}");
    }
    for file in ["right-expired", "right-other", "stranger"] {
        let (left, right) = honest();
        assert_eq!(refused(left, with(dir, right, file)), Errno::HOSTUNREACH, "{file}");
    }
    // A tenant that the right engine does not serve.
    let (left, mut right) = honest();
    right.engine[0].tenants = vec!["red".into()];
    assert_eq!(refused(left, right), Errno::HOSTUNREACH);
}

#[test]
fn files_that_are_not_there_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    certificates(dir);
    let error = |settings| Links::new(settings).map(drop).unwrap_err().to_string();
    let there = || left(dir, "127.0.0.1:1");
    assert!(error(with(dir, there(), "missing")).contains("missing.pem"));
    std::fs::write(dir.join("empty.pem"), "").unwrap();
    std::fs::write(dir.join("empty.key"), "").unwrap();
    assert!(error(with(dir, there(), "empty")).contains("no certificate in it"));
    let mut mixed = there();
    mixed.key = dir.join("right.key");
    assert!(matches!(Links::new(mixed), Err(LinksError::Identity(_))));
}

/// Has the engine take turns until `done` returns true.
fn turns(engine: &mut Engine, mut done: impl FnMut(&mut Engine) -> bool) {
    let end = Instant::now() + Duration::from_secs(100);
    while !done(engine) {
        engine.turn(Instant::now());
        assert!(Instant::now() < end);
    }
}

/// A client that does not speak TLS, or has no certificate, is refused and not kept.
#[test]
fn strangers_are_let_go() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let mut settings = right(dir.path(), "127.0.0.1:1");
    settings.handshake_ms = 200;
    let mut engine = Engine::new(settings);
    let at = engine.at();
    let _silent = TcpStream::connect(&at).unwrap();
    let mut rubbish = TcpStream::connect(&at).unwrap();
    rubbish.write_all(&[0x55; 10_000]).unwrap();
    turns(&mut engine, |engine| engine.links.reports().len() == 2);
    turns(&mut engine, |engine| engine.links.reports().is_empty());

    // A program may take its time for a handshake.
    let mut settings = right(dir.path(), "127.0.0.1:1");
    settings.handshake_ms = 100_000;
    let mut engine = Engine::new(settings);
    let at = engine.at();
    let nobody = std::process::Command::new("openssl")
        .args(["s_client", "-connect", &at, "-tls1_3", "-servername", "right"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn();
    let mut nobody = nobody.unwrap();
    turns(&mut engine, |engine| !engine.links.reports().is_empty());
    turns(&mut engine, |engine| engine.links.reports().is_empty());
    drop(nobody.stdin.take());
    turns(&mut engine, |_| nobody.try_wait().unwrap().is_some());
    let mut said = String::new();
    nobody.stderr.unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("certificate required"), "{said}");
}

#[test]
fn engines_that_are_not_there() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    // A port without a listener: it was just closed.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut engine = Engine::new(left(dir.path(), &port.to_string()));
    let now = Instant::now();
    let nowhere = slipway_sgiov_spec::Address::v4([10, 9, 0, 1], 80);
    let raw = |errno: Errno| errno.raw_os_error().unsigned_abs();
    assert_eq!(engine.links.open("blue", SOURCE, nowhere, now), Err(raw(Errno::HOSTUNREACH)));
    let told = engine.links.open("blue", SOURCE, DESTINATION, now);
    let told = told.map(|_| {
        while engine.ended.is_empty() {
            engine.turn(Instant::now());
        }
        engine.ended.pop().unwrap().1
    });
    let refused = raw(Errno::CONNREFUSED);
    assert!(told == Ok(Ended::Refused(refused)) || told == Err(refused), "{told:?}");

    // A listener that accepts and sends nothing; time passes for the engine alone.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut engine = Engine::new(left(dir.path(), &silent.local_addr().unwrap().to_string()));
    engine.links.open("blue", SOURCE, DESTINATION, now).unwrap();
    engine.turn(now + Duration::from_secs(1));
    assert!(engine.ended.is_empty());
    engine.turn(now + Duration::from_secs(6));
    assert_eq!(engine.ended.pop().unwrap().1, Ended::Refused(raw(Errno::TIMEDOUT)));
}

#[test]
fn nobody_listens_there() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let (mut left, mut right) = two(dir.path());
    let opened = left.links.open("blue", SOURCE, DESTINATION, Instant::now()).unwrap();
    until(&mut left, &mut right, |_, right| !right.asked.is_empty());
    right.links.refuse(right.asked[0], 111, Instant::now());
    until(&mut left, &mut right, |left, _| !left.ended.is_empty());
    assert_eq!(left.ended, [(opened, Ended::Refused(111))]);
    // The connection still works.
    right.asked.clear();
    joined(&mut left, &mut right);
    assert_eq!(left.links.reports().len(), 1);
}

#[test]
fn an_engine_that_dies_takes_its_streams_along_and_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let (mut left, mut right) = two(dir.path());
    let (here, there) = joined(&mut left, &mut right);
    here.0.write(&[1; 10_000], || {}).unwrap();
    left.links.stir(here.1);
    let settings = right.links.settings().clone();
    drop(right.links);
    // The engine's clock stands still: it is the connection's end that tells it, and no deadline.
    let now = Instant::now();
    while left.ended.is_empty() {
        left.turn(now);
    }
    assert_eq!(left.ended, [(here.1, Ended::Reset)]);
    assert!(here.0.is_reset());
    assert!(here.0.write(b"x", || {}).is_err());
    drop(there);

    // At another port: another test may have the old one by now.
    right.links = Links::new(settings).unwrap();
    left.links.relocate("right", right.links.local().unwrap());
    joined(&mut left, &mut right);
    assert_eq!(left.links.reports().len(), 1);
}

#[test]
fn a_silent_engine_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let (mut left, mut right) = two(dir.path());
    let (here, there) = joined(&mut left, &mut right);
    // The programs are silent for two minutes of simulated time, but the engines are not.
    let mut now = Instant::now();
    for _ in 0..1200 {
        now += Duration::from_millis(100);
        for _ in 0..20 {
            left.turn(now);
            right.turn(now);
        }
    }
    assert!(left.ended.is_empty() && right.ended.is_empty());
    // From now on the right engine is silent.
    now += Duration::from_millis(59_900);
    left.turn(now);
    assert!(left.ended.is_empty());
    now += Duration::from_millis(200);
    left.turn(now);
    assert_eq!(left.ended, [(here.1, Ended::Reset)]);
    assert!(here.0.is_reset() && !there.0.is_reset());
}

#[test]
fn a_connection_that_nobody_needs_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let (mut left, mut right) = two(dir.path());
    let (here, _there) = joined(&mut left, &mut right);
    left.links.reset(here.1, Instant::now());
    until(&mut left, &mut right, |_, right| !right.ended.is_empty());
    assert_eq!(right.ended[0].1, Ended::Reset);
    let later = Instant::now() + Duration::from_secs(31);
    let mut turns = 0;
    while !(left.links.reports().is_empty() && right.links.reports().is_empty()) {
        left.turn(later);
        right.turn(later);
        turns += 1;
        assert!(turns < 100_000);
    }
    joined(&mut left, &mut right);
}

/// A man in the middle between the two engines, who can change their bytes.
struct Middle {
    ends: [std::os::unix::net::UnixStream; 2],
    /// Bytes that were carried from the first end to the second.
    carried: usize,
}

impl Middle {
    fn between(left: &mut Engine, right: &mut Engine) -> Self {
        let pair = || {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
        };
        let ((mine, theirs), (mine_too, theirs_too)) = (pair(), pair());
        let now = Instant::now();
        left.links.connect_by("right", "blue", theirs, now).unwrap();
        right.links.accept_by(theirs_too, now).unwrap();
        Self { ends: [mine.into(), mine_too.into()], carried: 0 }
    }

    /// Carries pending bytes; `change` gets those from left to right, with their position.
    fn carry(&mut self, change: &mut dyn FnMut(usize, &mut Vec<u8>)) {
        let mut bytes = vec![0; 65536];
        if let Ok(count) = self.ends[0].read(&mut bytes) {
            bytes.truncate(count);
            change(self.carried, &mut bytes);
            self.carried += count;
            self.ends[1].write_all(&bytes).unwrap_or(());
        }
        let mut bytes = vec![0; 65536];
        if let Ok(count) = self.ends[1].read(&mut bytes) {
            let _ = self.ends[0].write_all(&bytes[..count]);
        }
    }
}

/// Sends through a middle that changes something after the handshake. Checks that a prefix of the
/// bytes arrives, and that both streams are reset.
fn damaged(dir: &Path, change: &mut dyn FnMut(&mut Vec<u8>)) {
    let mut right = Engine::new(right(dir, "127.0.0.1:1"));
    let mut left = Engine::new(left(dir, "127.0.0.1:1"));
    let mut middle = Middle::between(&mut left, &mut right);
    let opened = left.links.open("blue", SOURCE, DESTINATION, Instant::now()).unwrap();
    until(&mut left, &mut right, |left, right| {
        middle.carry(&mut |_, _| {});
        if let Some(asked) = right.asked.pop() {
            let (_, end) = right.memory.socket();
            right.links.attach(asked, end);
        }
        !left.opened.is_empty()
    });
    let (here, end) = left.memory.socket();
    left.links.attach(opened, end);
    let there = right.memory.program(0);
    let (mut sent, mut got, mut changed) = (0, 0, false);
    until(&mut left, &mut right, |left, right| {
        if let Ok(count) = here.write(&bytes(5, sent, 10_000), || left.links.stir(opened)) {
            sent += count as u64;
        }
        left.links.stir(opened);
        middle.carry(&mut |_, bytes| {
            if got > 30_000 && !changed && bytes.len() > 5000 {
                change(bytes);
                changed = true;
            }
        });
        let mut buffer = [0; 7000];
        let count = there.read(&mut buffer, || {}).unwrap_or(0);
        assert_eq!(buffer[..count], bytes(5, got, count), "wrong bytes at {got}");
        got += count as u64;
        // Without a close, the missing bytes would be waited for.
        if changed && !right.ended.is_empty() {
            middle.ends[0].shutdown(std::net::Shutdown::Both).unwrap_or(());
        }
        !right.ended.is_empty() && !left.ended.is_empty()
    });
    assert_eq!(right.ended[0].1, Ended::Reset);
    assert!(left.ended[0].1 == Ended::Reset && here.is_reset());
}

#[test]
fn damage_breaks_the_connection_and_reaches_no_program() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    for at in [0, 1, 5, 100, 2000, 4999] {
        damaged(dir.path(), &mut |bytes| bytes[at] ^= 1);
    }
    // Bytes repeated; left out; inserted.
    damaged(dir.path(), &mut |bytes| bytes.extend_from_within(..));
    damaged(dir.path(), &mut |bytes| drop(bytes.drain(..4000)));
    damaged(dir.path(), &mut |bytes| {
        bytes.splice(..0, [0x41; 100]);
    });
}

/// Connections of strangers take no engine's place, do not keep the thread awake, and are closed
/// when their place is needed.
#[test]
fn strangers_take_nobodys_place() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let mut settings = right(dir.path(), "127.0.0.1:1");
    settings.handshake_ms = 3_600_000;
    let mut engine = Engine::new(settings);
    let at: std::net::SocketAddr = engine.at().parse().unwrap();
    let from = |ip: [u8; 4]| {
        let (family, kind) = (rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM);
        let socket = rustix::net::socket(family, kind, None).unwrap();
        let here = std::net::SocketAddr::from((ip, 0));
        rustix::net::bind(&socket, &here).unwrap();
        rustix::net::connect(&socket, &at).unwrap();
        TcpStream::from(socket)
    };
    let mut silent: Vec<_> = (0..20).map(|_| from([127, 0, 0, 9])).collect();
    while engine.turn(Instant::now()) {}
    assert_eq!(engine.links.reports().len(), 8, "of one address");
    silent.extend((10..100).map(|host| from([127, 0, 0, host])));
    while engine.turn(Instant::now()) {}
    assert_eq!(engine.links.reports().len(), 64, "of all");
    assert!(!engine.turn(Instant::now()), "it has nothing to do, and does something");
    // Connections of engines go last, and find room.
    let dir = dir.path();
    let mut left = Engine::new(left(dir, &at.to_string()));
    let end = Instant::now() + Duration::from_secs(60);
    let opened = left.links.open("web", SOURCE, DESTINATION, Instant::now()).unwrap();
    while engine.asked.is_empty() {
        left.turn(Instant::now());
        engine.turn(Instant::now());
        assert!(Instant::now() < end, "no engine gets through: {opened:?}");
    }
}

/// The other engine takes the request for a stream, and then sends nothing but pings.
#[test]
fn a_stream_that_is_not_answered_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let (mut left, mut right) = two(dir.path());
    let mut now = Instant::now();
    let opened = left.links.open("blue", SOURCE, DESTINATION, now).unwrap();
    until(&mut left, &mut right, |_, right| !right.asked.is_empty());
    assert!(left.links.deadline().unwrap() <= now + Duration::from_secs(8));
    for _ in 0..90 {
        now += Duration::from_millis(100);
        for _ in 0..20 {
            left.turn(now);
            right.turn(now);
        }
    }
    let timed_out = Errno::TIMEDOUT.raw_os_error().unsigned_abs();
    assert_eq!(left.ended, [(opened, Ended::Refused(timed_out))]);
    assert_eq!(right.ended, [(right.asked[0], Ended::Reset)]);
    right.asked.clear();
    joined(&mut left, &mut right);
    assert_eq!(left.links.reports().len(), 1);
}

/// An engine that begins one connection after the other has only a few at a time.
#[test]
fn an_engine_has_a_few_connections_for_a_tenant() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let mut right = Engine::new(right(dir.path(), "127.0.0.1:1"));
    let at = right.at();
    let mut others: Vec<_> = (0..7).map(|_| Engine::new(left(dir.path(), &at))).collect();
    for (number, other) in others.iter_mut().enumerate() {
        other.links.open("blue", SOURCE, DESTINATION, Instant::now()).unwrap();
        until(other, &mut right, |_, right| right.asked.len() == number + 1);
    }
    assert_eq!(right.links.reports().len(), 4);
}
