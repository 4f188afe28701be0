//! A client sends descriptors that cannot be closed within an hour: TCP sockets that linger, with
//! bytes that nobody reads. A thread that closes one sleeps. Meanwhile, the endpoint and its
//! neighbours continue.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use slipway_vfio_user::testing::FAULT;
use slipway_vfio_user::{MAX_HELD, MAX_HELD_BYTES};

use super::dma_map::copy;
use crate::common::*;

/// A socket whose last close lasts an hour, and its peer, which keeps it from ending earlier.
struct Lingering(TcpStream, TcpStream);

impl Lingering {
    fn new() -> Self {
        let (socket, other) = slipway_peer::testing::lingering().unwrap();
        Self(socket, other)
    }

    /// Sends bytes with `count` descriptors of the socket, and keeps none. Returns the peer.
    fn send(self, raw: &mut Raw, bytes: &[u8], count: usize) -> TcpStream {
        raw.send(bytes, &vec![self.0.as_fd(); count]);
        self.1
    }
}

/// Encodes a request.
fn request(raw: &mut Raw, command: Command, payload: &[u8]) -> Vec<u8> {
    [raw.header(command as u16, payload.len()).as_bytes(), payload].concat()
}

fn set_irqs() -> spec::IrqSet {
    spec::IrqSet {
        argsz: U32::new(20),
        flags: U32::new((spec::IrqSetFlags::DATA_EVENTFD | spec::IrqSetFlags::TRIGGER).bits()),
        index: U32::new(spec::irq::MSIX),
        start: U32::new(0),
        count: U32::new(1),
    }
}

/// An endpoint under attack, and another one on the same reactor, whose client is the victim.
struct Scene {
    attacked: Served,
    _neighbour: Served,
    victim: Raw,
    /// The peers of the lingering sockets.
    kept: Vec<TcpStream>,
}

impl Scene {
    fn new(change: impl FnOnce(&mut Config)) -> Self {
        let attacked = serve_with(change);
        let neighbour = serve_on(attacked.reactor.clone(), |_| {});
        let victim = neighbour.client();
        Self { attacked, _neighbour: neighbour, victim, kept: Vec::new() }
    }

    /// Checks that the victim is answered, and the next client of the attacked endpoint, too: no
    /// thread that serves them sleeps.
    fn goes_on(mut self) {
        assert!(self.victim.is_alive());
        eventually("the attacker is cleared away", || {
            self.attacked.control.stats().client.is_none()
        });
        assert!(self.attacked.client().is_alive());
        assert!(self.victim.is_alive());
    }
}

/// Has the attacker send a request with lingering descriptors, which is refused, and then another
/// request.
fn refused_with(command: Command, payload: &[u8], count: usize) {
    let mut scene = Scene::new(|_| {});
    let mut raw = scene.attacked.client();
    let bytes = request(&mut raw, command, payload);
    scene.kept.push(Lingering::new().send(&mut raw, &bytes, count));
    assert_eq!(raw.reply().err(), Errno::INVAL);
    assert!(raw.is_alive());
    assert!(scene.attacked.control.stats().refused_files > 0);
    drop(raw);
    scene.goes_on();
}

#[test]
fn more_descriptors_than_a_message_may_have() {
    refused_with(Command::DmaMap, dma_map(0, 0x1000).as_bytes(), 20);
}

#[test]
fn a_socket_is_no_memory() {
    refused_with(Command::DmaMap, dma_map(0, 0x1000).as_bytes(), 1);
}

#[test]
fn a_socket_is_no_eventfd() {
    refused_with(Command::DeviceSetIrqs, set_irqs().as_bytes(), 1);
}

#[test]
fn a_request_that_takes_no_descriptor() {
    refused_with(Command::RegionRead, access(0, 0, 4).as_bytes(), 3);
}

#[test]
fn a_message_that_never_ends() {
    let mut scene = Scene::new(|_| {});
    let mut raw = scene.attacked.client();
    let bytes = request(&mut raw, Command::DmaMap, dma_map(0, 0x1000).as_bytes());
    scene.kept.push(Lingering::new().send(&mut raw, &bytes[..20], 5));
    // Descriptors may come in the payload as well.
    scene.kept.push(Lingering::new().send(&mut raw, &bytes[20..30], 5));
    assert!(scene.victim.is_alive());
    drop(raw);
    scene.goes_on();
}

#[test]
fn a_connection_that_ends_with_unread_descriptors() {
    let mut scene = Scene::new(|_| {});
    let mut raw = scene.attacked.client();
    // Nothing is read after a message that ends the connection; all of it has arrived before the
    // first part is read.
    scene.attacked.knobs.restless.store(true, Ordering::SeqCst);
    let reset = request(&mut raw, Command::DeviceReset, &[]);
    raw.send(&reset, &[]);
    let mut header = raw.header(Command::RegionRead as u16, 0);
    header.size = U32::new(1);
    raw.send(header.as_bytes(), &[]);
    let bytes = request(&mut raw, Command::DmaMap, dma_map(0, 0x1000).as_bytes());
    scene.kept.push(Lingering::new().send(&mut raw, &bytes, 5));
    scene.attacked.knobs.restless.store(false, Ordering::SeqCst);
    raw.reply().ok();
    assert!(raw.try_reply().is_none());
    scene.goes_on();
}

/// Has an endpoint stay in the cleanup after its client, without accepting another, until it is no
/// longer restless.
fn clearing_away(scene: &Scene) {
    let raw = scene.attacked.client();
    scene.attacked.knobs.restless.store(true, Ordering::SeqCst);
    drop(raw);
    eventually("the client is gone", || scene.attacked.control.stats().client.is_none());
}

#[test]
fn a_connection_that_is_refused_with_unread_descriptors() {
    let mut scene = Scene::new(|config| config.reply_deadline = PATIENCE);
    clearing_away(&scene);
    let (mut first, mut second) = (scene.attacked.connect(), scene.attacked.connect());
    scene.kept.push(Lingering::new().send(&mut second, b"x", 3));
    scene.attacked.knobs.restless.store(false, Ordering::SeqCst);
    first.negotiate();
    assert!(second.try_reply().is_none());
    assert!(first.is_alive());
    assert_eq!(scene.attacked.control.stats().refused, 1);
    drop(first);
    scene.goes_on();
}

#[test]
fn a_connection_that_is_never_accepted() {
    let mut scene = Scene::new(|config| config.reply_deadline = PATIENCE);
    clearing_away(&scene);
    let mut waiting = scene.attacked.connect();
    scene.kept.push(Lingering::new().send(&mut waiting, b"x", 3));
    scene.attacked.control.close();
    scene.attacked.knobs.restless.store(false, Ordering::SeqCst);
    assert!(scene.attacked.control.wait_closed(PATIENCE), "it sleeps in the listener's close");
    assert!(scene.victim.is_alive());
}

/// A value whose drop, on the thread of a bin, lasts until it is told to end.
struct Sleeper(Receiver<()>);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.recv();
    }
}

/// Has the endpoint's bin sleep until the returned sender is dropped.
fn block(served: &Served) -> Sender<()> {
    let (wake, told) = channel();
    served.bin.discard_value(Sleeper(told));
    wake
}

/// Returns whether this process, the server, has any page of the memfd `name` mapped. The clients
/// in this process map none.
fn is_mapped(name: &str) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.contains(&format!("/memfd:{name} "))
}

fn named_memory(name: &str, len: u64) -> std::os::fd::OwnedFd {
    let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, len).unwrap();
    file
}

/// Unmapping gigabytes takes seconds; in this test, it takes as long as the test requires.
#[test]
fn memory_of_a_client_that_has_gone_is_unmapped_behind_the_next_ones_back() {
    const LEN: u64 = 256 << 20;
    let name = "of-one-that-goes";
    let mut scene = Scene::new(|_| {});
    let wake = block(&scene.attacked);
    let mut raw = scene.attacked.client();
    let guest = named_memory(name, LEN);
    raw.map(0, LEN, guest.as_fd()).ok();
    drop(raw);
    let mut next = scene.attacked.client();
    assert!(next.is_alive());
    assert_eq!(copy(&mut next, 0, 0x1000, 4), FAULT, "the next client reaches it");
    assert!(scene.victim.is_alive());
    assert!(is_mapped(name), "the reactor's thread has unmapped it");
    assert!(scene.attacked.control.stats().held > 0);
    drop(wake);
    eventually("it is unmapped", || !is_mapped(name));
    eventually("nothing is held", || scene.attacked.control.stats().held == 0);
}

#[test]
fn nobody_is_accepted_while_much_memory_of_earlier_clients_is_still_mapped() {
    const LEN: u64 = MAX_HELD_BYTES as u64 / 2;
    let mut scene = Scene::new(|_| {});
    let wake = block(&scene.attacked);
    let control = scene.attacked.control.clone();
    for _ in 0..3 {
        let mut raw = scene.attacked.client();
        raw.map(0, LEN, named_memory("of-many-that-go", LEN).as_fd()).ok();
        drop(raw);
        eventually("it is gone", || control.stats().client.is_none());
    }
    let mut next = scene.attacked.connect();
    for _ in 0..200 {
        assert!(scene.victim.is_alive());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(scene.attacked.control.stats().connections, 3);
    drop(wake);
    next.negotiate();
    assert!(next.is_alive());
}

#[test]
fn a_client_that_unmaps_more_than_it_may_map_waits_until_it_is_less() {
    const LEN: u64 = 64 << 20;
    let mut scene = Scene::new(|config| {
        config.max_dma_bytes = LEN;
        config.reply_deadline = Duration::from_millis(50);
    });
    let wake = block(&scene.attacked);
    let mut raw = scene.attacked.client();
    for _ in 0..2 {
        raw.map(0, LEN, named_memory("again-and-again", LEN).as_fd()).ok();
        raw.call(Command::DmaUnmap, dma_unmap(0, LEN).as_bytes()).ok();
    }
    let why = || scene.attacked.control.stats().last_disconnect;
    eventually("it says why", || why().is_some_and(|why| why.contains("cannot be closed")));
    assert!(scene.victim.is_alive());
    drop(wake);
}

#[test]
fn an_unmap_is_answered_once_nothing_reaches_the_memory() {
    const LEN: u64 = 256 << 20;
    let name = "taken-away";
    let mut scene = Scene::new(|_| {});
    let wake = block(&scene.attacked);
    let mut raw = scene.attacked.client();
    let guest = named_memory(name, LEN);
    raw.map(0, LEN, guest.as_fd()).ok();
    raw.call(Command::DmaUnmap, dma_unmap(0, LEN).as_bytes()).ok();
    assert_eq!(copy(&mut raw, 0, 0x1000, 4), FAULT);
    assert!(is_mapped(name), "the reactor's thread has unmapped it");
    assert!(scene.victim.is_alive());
    // The memory can be mapped again meanwhile.
    raw.map(0, LEN, guest.as_fd()).ok();
    drop(wake);
    drop(raw);
    eventually("it is unmapped", || !is_mapped(name));
}

/// Sends descriptors that are not accepted until the endpoint holds too many.
fn fill(served: &Served, raw: &mut Raw) {
    let file = event();
    while served.control.stats().held <= MAX_HELD {
        let reply =
            raw.call_with(Command::RegionRead, access(0, 0, 4).as_bytes(), &[file.as_fd(); 16]);
        assert_eq!(reply.err(), Errno::INVAL);
    }
}

#[test]
fn a_client_that_makes_it_hold_too_much_has_to_go_and_nobody_comes() {
    let mut scene = Scene::new(|config| config.reply_deadline = Duration::from_millis(50));
    let wake = block(&scene.attacked);
    let mut raw = scene.attacked.client();
    fill(&scene.attacked, &mut raw);
    let bytes = request(&mut raw, Command::RegionRead, access(0, 0, 4).as_bytes());
    raw.send(&bytes, &[]);
    assert!(raw.try_reply().is_none());
    let why = || scene.attacked.control.stats().last_disconnect;
    eventually("it says why", || why().is_some_and(|why| why.contains("cannot be closed")));
    // The client waits to be accepted.
    let mut next = scene.attacked.connect();
    for _ in 0..200 {
        assert!(scene.victim.is_alive());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(scene.attacked.control.stats().connections, 1);
    drop(wake);
    next.negotiate();
    assert!(next.is_alive());
    eventually("nothing is held", || scene.attacked.control.stats().held == 0);
}

#[test]
fn a_client_whose_things_are_closed_late_only_waits() {
    let scene = Scene::new(|config| config.reply_deadline = PATIENCE);
    let wake = block(&scene.attacked);
    let mut raw = scene.attacked.client();
    fill(&scene.attacked, &mut raw);
    let bytes = request(&mut raw, Command::RegionRead, access(0, 0, 4).as_bytes());
    let messages = scene.attacked.control.stats().messages;
    raw.send(&bytes, &[]);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(scene.attacked.control.stats().messages, messages, "it is read all the same");
    drop(wake);
    raw.reply().ok();
    assert!(raw.is_alive());
}
