//! Network functions on a switch.

use std::path::PathBuf;

use slipway_e1000::driver as e1000;
use slipway_e1000_spec::register;
use slipway_pci::{Function, Interrupt};
use slipway_reactor::{Reactor, Settings as ReactorSettings};
use slipway_switch::{Learning, LearningOptions, Mac, Port, PortConfig, Switch};
use slipway_vfio_user::{Config, Control, DoorbellMode, Endpoint, EndpointParts};
use slipway_vfio_user_spec::region;
use slipway_virtio_net::driver::{Arena, Driver, Options};
use slipway_virtio_spec::net::{Header, config_status, control};

use crate::common::*;

/// A switch with its reactor, and the directory of the endpoints' sockets.
struct World {
    reactor: Reactor,
    switch: slipway_switch::Handle,
    directory: tempfile::TempDir,
}

/// An endpoint whose function has a port of the switch. It is closed when this is dropped.
struct Served {
    path: PathBuf,
    control: Control,
}

impl World {
    fn new() -> Self {
        let reactor = Reactor::spawn(ReactorSettings::default()).unwrap();
        let lookup = Learning::new(LearningOptions::default(), 1);
        let switch = Switch::new(Box::new(lookup));
        let switch = slipway_switch::spawn(&reactor.handle(), switch).unwrap();
        Self { reactor, switch, directory: tempfile::tempdir().unwrap() }
    }

    fn serve(
        &self,
        name: &str,
        make: impl FnOnce(&mut EndpointParts) -> (Box<dyn Function>, Box<dyn Port>),
    ) -> Served {
        let path = self.directory.path().join(name);
        let config = Config { doorbells: DoorbellMode::Rung, ..Config::at(&path) };
        let mut parts = EndpointParts::new(&config);
        let (function, port) = make(&mut parts);
        let attached = self.switch.call(move |owner| owner.attach(port, PortConfig::default()));
        attached.unwrap().unwrap();
        let home = self.reactor.handle();
        let endpoint = Endpoint::new(config, parts, function, Vec::new(), &home).unwrap();
        let control = endpoint.control();
        home.add(Box::new(endpoint)).unwrap();
        Served { path, control }
    }

    fn virtio(&self, name: &str, mac: Mac) -> Served {
        use slipway_virtio_net::{Device, Parts, Settings, vectors};
        self.serve(name, |parts| {
            let sink = parts.interrupts();
            let interrupt = |vector| Interrupt::new(sink.clone(), vector);
            let (device, port) = Device::new(Parts {
                memory: parts.memory(),
                interrupts: (0..vectors(1)).map(interrupt).collect(),
                clock: parts.clock(),
                settings: Settings::new(mac),
                journal: None,
            })
            .unwrap();
            (Box::new(device), Box::new(port))
        })
    }

    fn e1000(&self, name: &str, mac: Mac, csb: bool) -> Served {
        use slipway_e1000::{Device, Parts, Settings};
        self.serve(name, |parts| {
            let (device, port) = Device::new(Parts {
                memory: parts.memory(),
                interrupt: Interrupt::new(parts.interrupts(), 0),
                doorbells: parts.doorbells(slipway_e1000::DOORBELLS).unwrap(),
                clock: parts.clock(),
                settings: Settings { csb, ..Settings::new(mac) },
            })
            .unwrap();
            (Box::new(device), Box::new(port))
        })
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.control.close();
        assert!(self.control.wait_closed(PATIENCE));
    }
}

/// Returns a frame of `len` bytes whose payload differs from place to place.
fn frame(from: Mac, to: Mac, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len).map(|at| (at * 7 + at / 251) as u8).collect();
    bytes[..6].copy_from_slice(&to.0);
    bytes[6..12].copy_from_slice(&from.0);
    // A type for experiments (IEEE 802, 9.2.3).
    bytes[12..14].copy_from_slice(&[0x88, 0xb5]);
    bytes
}

/// A virtio-net driver with its memory.
struct Host {
    driver: Driver<Registers>,
    guest: TestGuest,
}

impl Host {
    fn new(served: &Served) -> Self {
        let guest = guest(slipway_virtio_net::vectors(1));
        let arena = Arena::new(guest.memory.clone(), 0, MEMORY);
        let options = Options { entries: 64, ..Options::default() };
        let driver = Driver::new(connect(&guest, &served.path), arena, options).unwrap();
        Self { driver, guest }
    }

    fn queue(&mut self, frame: &[u8]) {
        let driver = &mut self.driver;
        driver.transmit[0].push(&mut driver.arena, &Header::default(), frame, &[]).unwrap();
        driver.flush(0).unwrap();
    }

    fn receive(&mut self) -> Vec<u8> {
        let mut got = None;
        eventually("a frame comes", || {
            got = self.driver.receive[0].pop().unwrap();
            got.is_some()
        });
        got.unwrap().frame
    }
}

/// An e1000 driver with its memory.
struct E1000Host {
    driver: e1000::Driver<Registers>,
    guest: TestGuest,
}

impl E1000Host {
    fn new(served: &Served, options: e1000::Options) -> Self {
        let guest = guest(1);
        let registers = connect(&guest, &served.path);
        // The command register: the function answers, and reads and writes memory.
        registers.function.write(region::CONFIG, 4, &[6, 0]).unwrap();
        let range = (0, e1000::memory_len(options.descriptors) as u64);
        let mut driver = e1000::Driver::new(registers, &guest.memory, range, options).unwrap();
        eventually("the link is up", || driver.get(register::STATUS).unwrap() & 2 != 0);
        Self { driver, guest }
    }

    fn send(&mut self, frame: &[u8]) {
        self.driver.sending.clean().unwrap();
        assert!(self.driver.sending.queue(frame, 0).unwrap());
        self.driver.flush().unwrap();
    }

    /// Goes on at another function with the state of the last one.
    fn load(&mut self, served: &Served, state: &[u8]) {
        self.driver.registers = connect(&self.guest, &served.path);
        self.driver.registers.function.load(state).unwrap();
    }
}

/// Sends a frame each way.
fn talk(a: (&mut Host, Mac), b: (&mut Host, Mac), len: usize) {
    a.0.queue(&frame(a.1, b.1, len));
    assert_eq!(b.0.receive(), frame(a.1, b.1, len));
    b.0.queue(&frame(b.1, a.1, len + 1));
    assert_eq!(a.0.receive(), frame(b.1, a.1, len + 1));
}

#[test]
fn frames_flow_through_another_virtio_function() {
    let (world, [near, far]) = (World::new(), [1, 2].map(Mac::local));
    let (one, first) = (world.virtio("one", near), world.virtio("first", far));
    let (mut a, mut b) = (Host::new(&one), Host::new(&first));
    talk((&mut a, near), (&mut b, far), 60);
    b.driver.command(control::RX, control::RX_PROMISC, &[0]).unwrap();
    b.driver.registers.function.stop().unwrap();
    // The guest has queued frames that the stopped function does not look at.
    for len in 100..110 {
        b.queue(&frame(far, near, len));
    }
    let state = b.driver.registers.function.save().unwrap();
    assert!(a.driver.receive[0].pop().unwrap().is_none());

    drop(first);
    let second = world.virtio("second", far);
    b.driver.registers = connect(&b.guest, &second.path);
    b.driver.registers.function.load(&state).unwrap();
    for len in 100..110 {
        assert_eq!(a.receive(), frame(far, near, len));
    }
    let status = b.driver.config().unwrap().status.get();
    assert_eq!(status, config_status::LINK_UP | config_status::ANNOUNCE);
    b.driver.command(control::ANNOUNCE, control::ANNOUNCE_ACK, &[]).unwrap();
    for vector in 0..b.guest.interrupts.len() {
        let _ = b.guest.count(vector);
    }
    talk((&mut a, near), (&mut b, far), 700);
    eventually("it interrupts", || (0..2).any(|vector| b.guest.count(vector) > 0));
    b.driver.needs_no_reset().unwrap();
}

/// A fork has the address of its own endpoint, not that of the template.
#[test]
fn a_virtio_function_keeps_its_own_address() {
    let (world, [near, far, fork]) = (World::new(), [1, 2, 3].map(Mac::local));
    let (one, first) = (world.virtio("one", near), world.virtio("first", far));
    let (mut a, mut b) = (Host::new(&one), Host::new(&first));
    b.driver.command(control::RX, control::RX_PROMISC, &[0]).unwrap();
    let state = b.driver.registers.function.save().unwrap();
    drop(first);
    let second = world.virtio("second", fork);
    b.driver.registers = connect(&b.guest, &second.path);
    b.driver.registers.function.load(&state).unwrap();
    let config = b.driver.config().unwrap();
    assert_eq!((config.mac, config.status.get()), (fork.0, config_status::LINK_UP));
    talk((&mut a, near), (&mut b, fork), 60);
    // An address that the guest has chosen goes with its state.
    let chosen = Mac::local(9);
    b.driver.command(control::MAC, control::MAC_ADDR_SET, &chosen.0).unwrap();
    let state = b.driver.registers.function.save().unwrap();
    drop(second);
    let third = world.virtio("third", far);
    b.driver.registers = connect(&b.guest, &third.path);
    b.driver.registers.function.load(&state).unwrap();
    assert_eq!(b.driver.config().unwrap().mac, chosen.0);
    talk((&mut a, near), (&mut b, chosen), 60);
}

#[test]
fn an_e1000_goes_on_elsewhere_with_its_own_address() {
    let (world, [near, far, other]) = (World::new(), [1, 2, 3].map(Mac::local));
    let (one, first) = (world.virtio("one", near), world.e1000("first", far, false));
    let options = e1000::Options { descriptors: 64, throttle: 500, ..Default::default() };
    let (mut a, mut b) = (Host::new(&one), E1000Host::new(&first, options));
    b.send(&frame(far, near, 60));
    assert_eq!(a.receive(), frame(far, near, 60));
    // To a function of the same address, and then to one of another address.
    let (mut served, mut own) = (first, far);
    for (name, mac) in [("second", far), ("third", other)] {
        b.driver.registers.function.stop().unwrap();
        b.send(&frame(own, near, 100));
        let state = b.driver.registers.function.save().unwrap();
        assert!(a.driver.receive[0].pop().unwrap().is_none());
        drop(served);
        (served, own) = (world.e1000(name, mac, false), mac);
        b.load(&served, &state);
        assert_eq!(a.receive().len(), 100, "queued before");
        let address = [register::RAL, register::RAL + 4];
        let [low, high] = address.map(|at| b.driver.get(at).unwrap().to_le_bytes());
        assert_eq!([&low[..], &high[..2]].concat(), mac.0);
        assert_eq!(b.driver.get(register::ITR).unwrap(), 500);
        b.send(&frame(mac, near, 200));
        assert_eq!(a.receive(), frame(mac, near, 200));
        a.queue(&frame(near, mac, 300));
        let mut got = Vec::new();
        eventually("a frame comes", || {
            got.extend(b.driver.received().unwrap());
            !got.is_empty()
        });
        assert_eq!(got, [frame(near, mac, 300)]);
        eventually("it interrupts", || b.guest.count(0) > 0);
    }
}

/// Numbered frames between an e1000 and another host. Those that the e1000 sends arrive once and in
/// order, whatever was stopped, saved or loaded meanwhile. Those that are sent to it may be lost,
/// and are never late or there twice.
struct Traffic {
    /// The address of the other host.
    near: Mac,
    /// The address of the e1000.
    far: Mac,
    /// The number of frames that the e1000 sent.
    sent: u64,
    /// The number of frames of the e1000 that arrived.
    arrived: u64,
    /// The number of frames that were sent to the e1000.
    offered: u64,
    /// The number in the last frame that the e1000 received.
    received: Option<u64>,
}

impl Traffic {
    fn new(near: Mac, far: Mac) -> Self {
        Self { near, far, sent: 0, arrived: 0, offered: 0, received: None }
    }

    /// Sends and receives a little, at both ends.
    fn flow(&mut self, a: &mut Host, b: &mut E1000Host) {
        for _ in 0..3 {
            self.send(a, b);
            self.receive(a, b);
        }
    }

    fn send(&mut self, a: &mut Host, b: &mut E1000Host) {
        b.driver.clean().unwrap();
        let frame = numbered(self.far, self.near, self.sent);
        if self.sent - self.arrived < 48 && b.driver.sending.queue(&frame, 0).unwrap() {
            self.sent += 1;
            b.driver.flush().unwrap();
        }
        if a.driver.transmit[0].reap().unwrap() < 32 {
            a.queue(&numbered(self.near, self.far, self.offered));
            self.offered += 1;
        }
    }

    fn receive(&mut self, a: &mut Host, b: &mut E1000Host) {
        while let Some(one) = a.driver.receive[0].pop().unwrap() {
            assert_eq!(one.frame, numbered(self.far, self.near, self.arrived));
            self.arrived += 1;
        }
        for bytes in b.driver.received().unwrap() {
            let number = u64::from_le_bytes(bytes[14..22].try_into().unwrap());
            assert_eq!(bytes, numbered(self.near, self.far, number));
            let last = self.received.replace(number);
            assert!(last.is_none_or(|last| last < number), "{number} after {last:?}");
        }
    }
}

/// Returns the frame of a number, which decides its length, too.
fn numbered(from: Mac, to: Mac, number: u64) -> Vec<u8> {
    let mut bytes = frame(from, to, 60 + (number % 1400) as usize);
    bytes[14..22].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// Moves an e1000 between endpoints again and again while its driver and another host send each
/// other frames.
fn moves_under_traffic(csb: bool) {
    const MOVES: usize = 20;
    let (world, [near, far]) = (World::new(), [1, 2].map(Mac::local));
    let (one, mut served) = (world.virtio("one", near), world.e1000("0", far, csb));
    let options = e1000::Options { descriptors: 64, csb, ..Default::default() };
    let (mut a, mut b) = (Host::new(&one), E1000Host::new(&served, options));
    let mut traffic = Traffic::new(near, far);
    for number in 1..=MOVES {
        (0..50 + number).for_each(|_| traffic.flow(&mut a, &mut b));
        b.driver.registers.function.stop().unwrap();
        traffic.flow(&mut a, &mut b);
        let state = b.driver.registers.function.save().unwrap();
        drop(served);
        served = world.e1000(&number.to_string(), far, csb);
        b.load(&served, &state);
        traffic.flow(&mut a, &mut b);
    }
    traffic.flow(&mut a, &mut b);
    let before = traffic.received;
    eventually("all has arrived, and frames still come", || {
        traffic.flow(&mut a, &mut b);
        traffic.sent > 200 && traffic.arrived > 200 && traffic.received > before
    });
}

#[test]
fn an_e1000_moves_under_traffic() {
    moves_under_traffic(false);
}

#[test]
fn an_e1000_with_a_block_moves_under_traffic() {
    moves_under_traffic(true);
}
