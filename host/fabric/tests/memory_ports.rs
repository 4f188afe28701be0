//! Memory ports: programs on sockets, in Rust and in C, that reach each other through a
//! switch; clients that connect, disconnect and misbehave.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed
#![allow(clippy::disallowed_methods, reason = "the tests are their own peers")]

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use slipway_fabric::{Error, Fabric};
use slipway_plane_api::v1;
use slipway_port::{Error as PortError, Port};
use slipway_reactor::{Reactor, Settings};

const PATIENCE: Duration = Duration::from_secs(60);

struct Rig {
    fabric: Fabric,
    _reactor: Reactor,
    dir: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let reactor = Reactor::spawn(Settings::default()).unwrap();
        let fabric = Fabric::new(vec![reactor.handle()], false);
        let named = v1::CreateSwitchRequest { name: "net".to_owned(), ..Default::default() };
        fabric.create_switch(&named).unwrap();
        Self { fabric, _reactor: reactor, dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn request(&self, name: &str, number: u8) -> v1::CreatePortRequest {
        v1::CreatePortRequest {
            name: name.to_owned(),
            switch: "net".to_owned(),
            socket_path: self.path(name).to_string_lossy().into_owned(),
            mac: format!("02:00:00:00:00:{number:02x}"),
            ..Default::default()
        }
    }

    fn make(&self, name: &str, number: u8) -> Port {
        self.fabric.create_port(&self.request(name, number)).unwrap();
        Port::connect(self.path(name)).unwrap()
    }

    fn stats(&self, name: &str) -> v1::SwitchPort {
        let name = format!("memory:{name}");
        let switches = self.fabric.list_switches();
        switches[0].ports.iter().find(|port| port.name == name).unwrap().clone()
    }

    fn wait_for(&self, mut what: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !what() {
            assert!(begun.elapsed() < PATIENCE, "it does not come about");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn frame(from: u8, to: u8, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len).map(|at| (at * 3) as u8).collect();
    bytes[..6].copy_from_slice(&[2, 0, 0, 0, 0, to]);
    bytes[6..12].copy_from_slice(&[2, 0, 0, 0, 0, from]);
    bytes[12..14].copy_from_slice(&[0x88, 0xb5]);
    bytes
}

/// Returns the next frame, reassembled.
fn next(port: &mut Port) -> Vec<u8> {
    assert!(port.wait(Some(PATIENCE)).unwrap(), "no frame came");
    let burst = port.receive(1).unwrap();
    let frame = burst.iter().next().unwrap();
    let bytes: Vec<u8> = frame.parts().flatten().copied().collect();
    assert_eq!(frame.len(), bytes.len());
    bytes
}

#[test]
fn two_programs_reach_each_other() {
    let rig = Rig::new();
    let (mut a, mut b) = (rig.make("a", 1), rig.make("b", 2));
    assert_eq!(a.mac(), Some([2, 0, 0, 0, 0, 1]));
    // Frames that fit one slot, several slots, and the largest frame.
    for len in [14, 60, 2048, 2049, 9014, 65_553] {
        let (there, back) = (frame(1, 2, len), frame(2, 1, len));
        assert_eq!(a.send(&[&there]).unwrap(), 1);
        assert_eq!(next(&mut b), there, "{len}");
        assert_eq!(b.send(&[&back]).unwrap(), 1);
        assert_eq!(next(&mut a), back, "{len}");
    }
    // Frames built in the ring, in bursts, more than the ring has slots.
    let (mut sent, mut got) = (0_u32, 0_u32);
    while got < 5000 {
        let made = a.send_with(32, |slot| {
            slot[..60].copy_from_slice(&frame(1, 2, 60));
            slot[14..18].copy_from_slice(&sent.to_le_bytes());
            sent += 1;
            60
        });
        // The switch drops frames for which b has no room. b has room, since each burst is waited
        // for.
        let mut due = made.unwrap();
        while due > 0 {
            assert!(b.wait(Some(PATIENCE)).unwrap());
            let burst = b.receive(256).unwrap();
            for frame in &burst {
                assert_eq!(&frame.bytes()[14..18], &got.to_le_bytes());
                got += 1;
            }
            due -= burst.len();
        }
    }
    let statistics = b.statistics();
    assert_eq!((statistics.frames_in, statistics.malformed), (6 + u64::from(got), 0));
    assert_eq!(a.statistics().frames_out, 6 + u64::from(sent));
    // No frame is sent: the client sleeps for the time that it was told.
    assert!(!b.wait(Some(Duration::from_millis(20))).unwrap());
    assert!(b.statistics().sleeps > 0);
    // The source address belongs to another port.
    a.send(&[frame(3, 2, 60)]).unwrap();
    rig.wait_for(|| rig.stats("a").dropped_in.get("spoofed-mac") == Some(&1));
}

#[test]
fn a_port_has_one_client_at_a_time_and_outlives_it() {
    let rig = Rig::new();
    let a = rig.make("a", 1);
    assert_eq!(rig.stats("a").socket_path, rig.path("a").to_string_lossy());
    rig.wait_for(|| rig.stats("a").up);
    assert!(matches!(Port::connect(rig.path("a")), Err(PortError::Busy(_))));
    drop(a);
    rig.wait_for(|| !rig.stats("a").up);
    let mut again = Port::connect(rig.path("a")).unwrap();
    let mut b = rig.make("b", 2);
    b.send(&[frame(2, 1, 60)]).unwrap();
    assert_eq!(next(&mut again), frame(2, 1, 60));
    // The port is removed while it has a client.
    rig.fabric.remove_port("a").unwrap();
    assert!(matches!(again.wait(Some(PATIENCE)), Err(PortError::Gone)));
    assert!(matches!(again.check(), Err(PortError::Gone)));
    assert!(!rig.path("a").exists());
    assert!(matches!(again.reconnect(Duration::ZERO), Err(PortError::Connect { .. })));
    // The port is made again: the client continues.
    rig.fabric.create_port(&rig.request("a", 1)).unwrap();
    again.reconnect(PATIENCE).unwrap();
    b.send(&[frame(2, 1, 70)]).unwrap();
    assert_eq!(next(&mut again), frame(2, 1, 70));
    // A removed switch removes its ports.
    rig.fabric.remove_switch("net").unwrap();
    assert!(matches!(b.wait(Some(PATIENCE)), Err(PortError::Gone)));
    assert_eq!(rig.fabric.count_ports(), 0);
}

#[test]
fn what_no_port_can_be_is_refused() {
    let rig = Rig::new();
    let good = rig.request("a", 1);
    let with = |change: &dyn Fn(&mut v1::CreatePortRequest)| {
        let mut request = good.clone();
        change(&mut request);
        rig.fabric.create_port(&request).unwrap_err()
    };
    assert!(matches!(with(&|r| r.name = "a/b".into()), Error::Invalid(_)));
    assert!(matches!(with(&|r| r.slots = 100), Error::Invalid(_)));
    assert!(matches!(with(&|r| r.payload = 65), Error::Invalid(_)));
    assert!(matches!(with(&|r| r.mac = "01:00:00:00:00:00".into()), Error::Port(_)));
    assert!(matches!(with(&|r| r.mac = "x".into()), Error::Invalid(_)));
    assert!(matches!(with(&|r| r.switch = "other".into()), Error::UnknownSwitch(_)));
    assert!(matches!(with(&|r| r.socket_path = "x".into()), Error::Invalid(_)));
    assert!(matches!(with(&|r| r.socket_path = "/".repeat(200)), Error::Socket { .. }));
    std::fs::write(rig.path("a"), "").unwrap();
    assert!(matches!(with(&|_| ()), Error::Socket { .. }));
    std::fs::remove_file(rig.path("a")).unwrap();
    rig.fabric.create_port(&good).unwrap();
    assert!(matches!(with(&|_| ()), Error::ExistingPort(_)));
    assert!(matches!(with(&|r| r.name = "b".into()), Error::Socket { .. }));
    assert!(matches!(rig.fabric.remove_port("b"), Err(Error::UnknownMemoryPort(_))));
    // The refused requests left nothing.
    assert_eq!(rig.fabric.list_switches()[0].ports.len(), 1);
}

fn raw(path: &Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let kind = SocketType::SEQPACKET;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

#[test]
fn whoever_misbehaves_harms_nobody_else() {
    let rig = Rig::new();
    let mut b = rig.make("b", 2);
    rig.fabric.create_port(&rig.request("a", 1)).unwrap();
    // Many silent connections, and some that send something else than a greeting.
    let silent: Vec<_> = (0..40).map(|_| raw(&rig.path("a"))).collect();
    for text in [&b"hello"[..], &[0; 16], &[0xff; 4000]] {
        let socket = raw(&rig.path("a"));
        rustix::net::send(&socket, text, SendFlags::NOSIGNAL).unwrap();
        let (len, _) =
            rustix::net::recv(&socket, &mut [0; 64], RecvFlags::empty()).unwrap_or_default();
        assert_eq!(len, 0, "it was answered");
    }
    // A client of another version is told so.
    let socket = raw(&rig.path("a"));
    let mut hello = slipway_ring::Hello { takes: slipway_ring::Takes::default() }.encode();
    hello[8] = 9;
    rustix::net::send(&socket, &hello, SendFlags::NOSIGNAL).unwrap();
    let mut answer = [0; 64];
    let (len, _) = rustix::net::recv(&socket, &mut answer, RecvFlags::empty()).unwrap();
    let welcome = slipway_ring::Welcome::decode(&answer[..len]).unwrap();
    assert_eq!(welcome.status, slipway_ring::Welcome::VERSION);
    // The port still serves a proper client.
    let mut a = Port::connect(rig.path("a")).unwrap();
    b.send(&[frame(2, 1, 60)]).unwrap();
    assert_eq!(next(&mut a), frame(2, 1, 60));
    drop(silent);
    // A client that sends more than the greeting is disconnected; its neighbour continues.
    rustix::net::send(a.socket(), b"more", SendFlags::NOSIGNAL).unwrap();
    assert!(matches!(a.wait(Some(PATIENCE)), Err(PortError::Gone)));
    a.reconnect(PATIENCE).unwrap();
    a.send(&[frame(1, 2, 100)]).unwrap();
    assert_eq!(next(&mut b), frame(1, 2, 100));
}

/// Compiles the C program of `memory_ports.c`. Returns `None` if there is no compiler.
fn compile(dir: &Path) -> Option<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = dir.join("program");
    let flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-I"];
    let mut run = Command::new("cc");
    run.args(flags).arg(here.join("../port/include"));
    let Ok(output) = run.arg(here.join("tests/memory_ports.c")).arg("-o").arg(&program).output()
    else {
        println!("SKIPPED: a_program_in_c: needs a C compiler (cc)");
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(program)
}

#[test]
fn a_program_in_c_sends_and_receives() {
    const OWN: u32 = 3000;
    let rig = Rig::new();
    let Some(program) = compile(rig.dir.path()) else { return };
    rig.fabric.create_port(&v1::CreatePortRequest { slots: 4096, ..rig.request("c", 3) }).unwrap();
    rig.fabric.create_port(&v1::CreatePortRequest { slots: 4096, ..rig.request("a", 1) }).unwrap();
    let mut a = Port::connect(rig.path("a")).unwrap();
    let mut program = Command::new(program);
    program.arg(rig.path("c")).arg(OWN.to_string()).stdout(Stdio::piped());
    let mut child = program.spawn().unwrap();
    rig.wait_for(|| rig.stats("c").up || child.try_wait().unwrap().is_some());
    // Sends frames of all sizes to and fro, one by one so that none is dropped.
    for len in (14..1600).chain([2048, 2049, 9000, 65_553]) {
        let sent = frame(1, 3, len);
        assert_eq!(a.send(&[&sent]).unwrap(), 1);
        let mut wanted = frame(3, 1, len);
        wanted[14..].iter_mut().for_each(|byte| *byte = !*byte);
        assert_eq!(next(&mut a), wanted, "{len}");
    }
    let mut stop = frame(1, 3, 60);
    stop[12..14].copy_from_slice(&[0xde, 0xad]);
    a.send(&[stop]).unwrap();
    // Receives the frames that the C program sends on its own. The ring has room for all of them.
    for number in 0..OWN {
        let got = next(&mut a);
        assert_eq!(&got[..14], &frame(3, 1, 14)[..]);
        assert_eq!(&got[14..18], &number.to_le_bytes());
        assert_eq!(got.len(), 60 + number as usize % 1000);
        let good = got
            .iter()
            .enumerate()
            .skip(18)
            .all(|(at, byte)| *byte == (at as u32 * 7 + number) as u8);
        assert!(good, "payload of frame {number}");
    }
    rig.fabric.remove_port("c").unwrap();
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(text, "malformed 0\n");
}

/// Sends bytes with three descriptors of a lingering socket, and keeps none. Returns the socket's
/// peer and the result of sending.
fn send_lingering(to: &OwnedFd, bytes: &[u8]) -> (TcpStream, Result<usize, Errno>) {
    let (socket, other) = slipway_peer::testing::lingering().unwrap();
    let files = [socket.as_fd(); 3];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    let parts = [IoSlice::new(bytes)];
    let sent = rustix::net::sendmsg(to, &parts, &mut control, SendFlags::NOSIGNAL);
    if sent.is_err() {
        // This thread closes the socket, so it must not linger.
        rustix::net::sockopt::set_socket_linger(&socket, None).unwrap();
    }
    (other, sent)
}

#[test]
fn descriptors_that_cannot_be_closed_hold_nobody_up() {
    let rig = Rig::new();
    let (mut a, mut b) = (rig.make("a", 1), rig.make("b", 2));
    rig.fabric.create_port(&rig.request("c", 3)).unwrap();
    let hello = slipway_ring::Hello { takes: slipway_ring::Takes::default() }.encode();
    let mut kept = Vec::new();
    // With and without a valid greeting. The second message is not read.
    for bytes in [&b"x"[..], b"no greeting at all", &hello] {
        for _ in 0..3 {
            let socket = raw(&rig.path("c"));
            let (other, sent) = send_lingering(&socket, bytes);
            let (another, _) = send_lingering(&socket, bytes);
            kept.extend([other, another]);
            // A new connection refuses descriptors if the kernel supports that.
            let refuses = slipway_peer::refuse_descriptors(&socket);
            assert_eq!(sent.err(), refuses.then_some(Errno::PERM));
        }
        let there = frame(1, 2, 60);
        assert_eq!(a.send(&[&there]).unwrap(), 1);
        assert_eq!(next(&mut b), there);
    }
    // The port works as before.
    let mut c = None;
    rig.wait_for(|| {
        c = Port::connect(rig.path("c")).ok();
        c.is_some()
    });
    let (mut c, there) = (c.unwrap(), frame(3, 2, 60));
    kept.push(send_lingering(&c.socket().try_clone_to_owned().unwrap(), b"more").0);
    // Needed if the kernel refused the descriptors; otherwise the client is disconnected already.
    let _ = rustix::net::send(c.socket(), b"more", SendFlags::NOSIGNAL);
    assert_eq!(a.send(&[frame(1, 2, 60)]).unwrap(), 1);
    assert_eq!(next(&mut b), frame(1, 2, 60));
    c.reconnect(PATIENCE).unwrap();
    assert_eq!(c.send(&[&there]).unwrap(), 1);
    assert_eq!(next(&mut b), there);
    rig.fabric.remove_port("c").unwrap();
}
