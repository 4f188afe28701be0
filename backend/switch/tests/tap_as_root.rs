//! TAP interfaces of two network namespaces at one switch, with the kernels' own TCP and UDP across
//! it.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::mpsc;
use std::time::Duration;

use slipway_netlink::{Address, LinkChange, Netlink};
use slipway_reactor::{Reactor, Settings};
use slipway_switch::ports::{TapPort, ThreadedPort};
use slipway_switch::{Handle, Learning, LearningOptions, Port, PortConfig, Switch, spawn};

/// Runs `body` in a network namespace of its own, on a thread of its own. Returns `None` if that is
/// not permitted.
fn in_namespace<R: Send + 'static>(body: impl FnOnce() -> R + Send + 'static) -> Option<R> {
    let thread = std::thread::spawn(|| {
        // SAFETY: unshare(2) takes no pointers; it concerns this thread, which ends after `body`.
        let own = unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0;
        own.then(body)
    });
    thread.join().unwrap()
}

/// Creates `slip0` with an IPv4 and an IPv6 address in this thread's namespace.
fn tap(host: u8) -> TapPort {
    let port = TapPort::open("slip0").unwrap();
    let mut netlink = Netlink::open().unwrap();
    let link = netlink.link("slip0").unwrap().unwrap();
    netlink
        .change(link.index, LinkChange { up: Some(true), mtu: Some(1500), ..Default::default() })
        .unwrap();
    for (address, prefix) in [(v4(host), 24), (v6(host), 64)] {
        netlink.add_address(&Address { index: link.index, address, prefix }).unwrap();
    }
    port
}

fn v4(host: u8) -> IpAddr {
    [10, 77, 0, host].into()
}

fn v6(host: u8) -> IpAddr {
    format!("fd77::{host}").parse().unwrap()
}

fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 4096) as u8).collect()
}

/// Retries until the address is usable: IPv6 first checks whether another host has it.
fn patient<R>(mut attempt: impl FnMut() -> std::io::Result<R>) -> R {
    for _ in 0..1000 {
        if let Ok(result) = attempt() {
            return result;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    attempt().unwrap()
}

fn attach(handle: &Handle, port: Box<dyn Port>) {
    handle.call(|owner| owner.attach(port, PortConfig::default())).unwrap().unwrap();
}

#[test]
fn tcp_and_udp_between_namespaces_as_root() {
    let (ports, taps) = mpsc::channel();
    let to_switch = ports.clone();
    let (ready, listening) = mpsc::channel();
    let server = std::thread::spawn(move || {
        in_namespace(move || {
            to_switch.send(tap(1)).unwrap();
            for address in [v4(1), v6(1)] {
                let listener = patient(|| TcpListener::bind(SocketAddr::new(address, 7000)));
                let udp = patient(|| UdpSocket::bind(SocketAddr::new(address, 7001)));
                ready.send(()).unwrap();
                let (mut stream, _) = listener.accept().unwrap();
                let mut got = Vec::new();
                stream.read_to_end(&mut got).unwrap();
                assert!(got == payload(8 << 20), "{} bytes", got.len());
                stream.write_all(&got).unwrap();
                drop(stream);
                let mut datagram = [0; 9000];
                let (len, from) = udp.recv_from(&mut datagram).unwrap();
                assert!(datagram[..len] == payload(len));
                udp.send_to(&datagram[..len], from).unwrap();
            }
        })
    });
    let client = std::thread::spawn(move || {
        in_namespace(move || {
            ports.send(tap(2)).unwrap();
            for address in [v4(1), v6(1)] {
                listening.recv().unwrap();
                let mut stream = patient(|| TcpStream::connect(SocketAddr::new(address, 7000)));
                stream.write_all(&payload(8 << 20)).unwrap();
                stream.shutdown(std::net::Shutdown::Write).unwrap();
                let mut got = Vec::new();
                stream.read_to_end(&mut got).unwrap();
                assert!(got == payload(8 << 20), "{} bytes", got.len());
                let own = if address.is_ipv4() { v4(2) } else { v6(2) };
                let udp = patient(|| UdpSocket::bind(SocketAddr::new(own, 0)));
                // A datagram that is sent in fragments.
                udp.send_to(&payload(8000), SocketAddr::new(address, 7001)).unwrap();
                let mut datagram = [0; 9000];
                udp.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
                assert_eq!(udp.recv(&mut datagram).unwrap(), 8000);
                assert!(datagram[..8000] == payload(8000));
            }
        })
    });
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let switch = Switch::new(Box::new(Learning::new(LearningOptions::default(), 0x5851_f42d)));
    let handle = spawn(&reactor.handle(), switch).unwrap();
    if let Ok(tap) = taps.recv() {
        attach(&handle, Box::new(tap));
    }
    // The other one has a thread of its own.
    if let Ok(tap) = taps.recv() {
        let (port, thread) = ThreadedPort::new(TapPort::ABILITIES).unwrap();
        std::thread::spawn(move || thread.serve(Box::new(tap)));
        attach(&handle, Box::new(port));
    }
    let done = (server.join().unwrap(), client.join().unwrap());
    if done.0.is_none() || done.1.is_none() {
        println!("SKIPPED: tcp_and_udp_between_namespaces_as_root: needs root");
        return;
    }
    let stats = handle.call(|owner| owner.switch().stats(0).unwrap().clone()).unwrap();
    // Segments crossed uncut: there are far fewer frames than packets of 1,500 bytes.
    assert!(stats.bytes_in > 16 << 20 && stats.frames_in < stats.bytes_in / 4000, "{stats:?}");
}

#[test]
fn names_that_are_none() {
    for name in ["", "a name", "sixteen-letters-", "a/b", "..", "tap%d"] {
        let error = TapPort::open(name).err().unwrap();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput, "{name}");
    }
}
