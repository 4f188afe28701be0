//! VMMs that attack the daemon at the agent's port with bytes and frames. Other clients and
//! sandboxes must not notice.
#![allow(clippy::unwrap_used)]

mod harness;

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use harness::guest::Guest;
use harness::{Daemon, Guests, LONG};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// Encodes an HTTP/2 frame (RFC 9113, section 4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;
/// `:status: 200` in HPACK's static table.
const STATUS_200: u8 = 0x88;
/// The stream id of the daemon's first call.
const CALL: u32 = 1;

/// An attack: bytes that are sent once, and bytes that are then repeated for ever.
struct Attack {
    name: &'static str,
    first: Vec<u8>,
    rest: Vec<u8>,
    pause: Duration,
}

/// Attacks that no limit of HTTP/2 ends: they last as long as the attacker wants.
const ENDLESS: [&str; 4] = ["PING", "SETTINGS", "PRIORITY", "unknown frames"];

fn attack(name: &'static str, first: Vec<u8>, rest: &[u8]) -> Attack {
    let pause = Duration::ZERO;
    // Bytes are written in pieces as large as a socket takes.
    Attack { name, first, rest: rest.repeat((64 << 10) / rest.len()), pause }
}

fn attacks() -> Vec<Attack> {
    let settings = frame(SETTINGS, 0, 0, &[]);
    let then = |more: Vec<u8>| [settings.clone(), more].concat();
    let open = frame(HEADERS, END_HEADERS, CALL, &[STATUS_200]);
    // Literal headers without indexing: name "a", a value of 100 bytes.
    let header = [&[0, 1, b'a', 100][..], &[b'x'; 100]].concat().repeat(100);
    // `:status: 103`, a literal with an indexed name.
    let early = [&[0x08, 3][..], b"103"].concat();
    vec![
        attack("garbage", vec![], b"\xffgarbage\0"),
        attack("PING", settings.clone(), &frame(PING, 0, 0, &[7; 8])),
        attack("SETTINGS", settings.clone(), &settings),
        attack("PRIORITY", settings.clone(), &frame(PRIORITY, 0, 3, &[0; 5])),
        attack("unknown frames", settings.clone(), &frame(0x77, 0, 0, &[])),
        attack("WINDOW_UPDATE", settings.clone(), &frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1])),
        attack("RST_STREAM", settings.clone(), &frame(RST_STREAM, 0, CALL, &[0; 4])),
        attack("DATA of no bytes", then(open.clone()), &frame(DATA, 0, CALL, &[])),
        attack("DATA of one byte", then(open.clone()), &frame(DATA, 0, CALL, &[0])),
        attack("early hints", settings.clone(), &frame(HEADERS, END_HEADERS, CALL, &early)),
        attack(
            "headers without end",
            then(frame(HEADERS, 0, CALL, &header)),
            &frame(CONTINUATION, 0, CALL, &header),
        ),
        Attack {
            pause: Duration::from_millis(20),
            rest: vec![0],
            ..attack("slow bytes", vec![], &[0])
        },
    ]
}

/// Attacks every connection until the connection ends; `sent` counts bytes.
fn flood(listener: UnixListener, attack: Arc<Attack>, sent: Arc<AtomicU64>) {
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            // Reads the answers, so that they do not block the attack.
            let mut answers = stream.try_clone().unwrap();
            std::thread::spawn(move || while matches!(answers.read(&mut [0; 4096]), Ok(1..)) {});
            let _ = send(stream, &attack, &sent);
        }
    });
}

fn send(mut stream: UnixStream, attack: &Attack, sent: &AtomicU64) -> std::io::Result<()> {
    stream.write_all(&attack.first)?;
    loop {
        stream.write_all(&attack.rest)?;
        sent.fetch_add(attack.rest.len() as u64, Ordering::Relaxed);
        std::thread::sleep(attack.pause);
    }
}

/// Sends a socket over the agent's port. Its last close lasts an hour, in whichever process that
/// happens.
fn send_lingering(listener: UnixListener) {
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let (socket, other) = slipway_peer::testing::lingering().unwrap();
            // The other end is leaked: without it the close would have nothing to wait for.
            std::mem::forget(other);
            let files = [socket.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
            let parts = [IoSlice::new(b"x")];
            // Kernels with the option to accept no descriptors refuse this.
            let sent = rustix::net::sendmsg(&stream, &parts, &mut control, SendFlags::empty());
            println!("a descriptor sent: {sent:?}");
            if sent.is_ok() {
                drop(socket);
            } else {
                // Closing the socket must not block this thread.
                std::mem::forget(socket);
            }
        }
    });
}

/// Without a bin, the guests' thread would close the socket, and sleep.
#[tokio::test]
async fn a_descriptor_whose_close_waits_holds_up_nobody() {
    let guests: Guests = Arc::new(|listener, name| match name {
        "attacker" => send_lingering(listener),
        _ => Guest { exit_status: 7, ..Guest::default() }.speak(listener),
    });
    let daemon = Daemon::with(guests).await;
    let (_, replies) = daemon.run("attacker").await;
    // The attacker's byte is not HTTP/2, either.
    assert_eq!(harness::exit_of(replies).await.status, 125);
    assert_eq!(daemon.run_to_end("honest").await.status, 7);
    daemon.remove("attacker").await;
}

/// Measures the CPU time that the control thread and the guests' thread need for 4 MiB more of an
/// attack.
async fn work_of(sent: &AtomicU64) -> [Duration; 2] {
    let threads = ["control", "guests"];
    let (before, enough) = (threads.map(cpu_time), sent.load(Ordering::Relaxed) + (4 << 20));
    let begun = Instant::now();
    while sent.load(Ordering::Relaxed) < enough {
        assert!(begun.elapsed() < LONG, "the attack came to its end");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let after = threads.map(cpu_time);
    [after[0].saturating_sub(before[0]), after[1].saturating_sub(before[1])]
}

/// Returns the CPU time of this process's threads with one name.
fn cpu_time(name: &str) -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let times = tasks.filter_map(|task| {
        let comm = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let stat = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        (comm.trim() == name).then(|| stat.split(' ').next()?.parse::<u64>().ok())?
    });
    Duration::from_nanos(times.sum())
}

/// Each attack lasts without end, or ends with its sandbox. Meanwhile sandboxes are listed and an
/// honest one runs from its start to its end. At last the attacker is removed.
#[tokio::test]
async fn floods_hold_up_nobody_else() {
    for attack in attacks() {
        let (attack, sent) = (Arc::new(attack), Arc::new(AtomicU64::new(0)));
        let (hostile, counter) = (Arc::clone(&attack), Arc::clone(&sent));
        let guests: Guests = Arc::new(move |listener, name| match name {
            "attacker" => flood(listener, Arc::clone(&hostile), Arc::clone(&counter)),
            _ => Guest { exit_status: 7, ..Guest::default() }.speak(listener),
        });
        let daemon = Daemon::with(guests).await;
        let (_, _replies) = daemon.run("attacker").await;
        let begun = Instant::now();
        while sent.load(Ordering::Relaxed) == 0
            && daemon.state("attacker").await.state == "starting"
        {
            assert!(begun.elapsed() < LONG, "{}: it does not begin", attack.name);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let before = sent.load(Ordering::Relaxed);
        let listed = daemon.list(500).await;
        assert_eq!(daemon.run_to_end("honest").await.status, 7, "{}", attack.name);
        let mebibytes = (sent.load(Ordering::Relaxed) - before) as f64 / f64::from(1 << 20);
        let sandbox = daemon.state("attacker").await;
        println!(
            "{}: {mebibytes:.1} MiB meanwhile; {} {}; list of sandboxes: {listed}",
            attack.name, sandbox.state, sandbox.reason
        );
        assert!(sandbox.reason.len() < 1000);
        if ENDLESS.contains(&attack.name) {
            let [control, guests] = work_of(&sent).await;
            println!("{}: control thread {control:?}, guests' thread {guests:?}", attack.name);
            assert!(control * 4 < guests, "{}: the control thread does its work", attack.name);
        }
        daemon.remove("attacker").await;
    }
}
