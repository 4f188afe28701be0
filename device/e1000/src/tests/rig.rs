//! Hosts with a driver and a device each, on one switch.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use slipway_doorbells::Doorbells;
use slipway_pci::{FifoSink, Function, Interrupt};
use slipway_ram::Memory;
use slipway_switch::{
    BURST, Learning, LearningOptions, Mac, Port, PortConfig, PortIndex, PortTurn, Switch,
};
use slipway_telemetry::{Clock, ManualClock};

use crate::driver::{Direct, Driver, Options, Received, memory_len};
use crate::{Counters, DOORBELLS, Device, DevicePort, Parts, Settings};

/// The switch that all hosts of a test share, and the time.
#[derive(Clone)]
pub struct World {
    pub switch: Rc<RefCell<Switch>>,
    pub clock: ManualClock,
}

impl World {
    pub fn new() -> Self {
        let lookup = Learning::new(LearningOptions::default(), 1);
        let switch = Switch::new(Box::new(lookup));
        Self { switch: Rc::new(RefCell::new(switch)), clock: ManualClock::new() }
    }

    /// Gives every port turns until none has any frames, then lets every port sleep.
    pub fn settle(&self) {
        let mut switch = self.switch.borrow_mut();
        let ports: Vec<PortIndex> = switch.ports().collect();
        for _ in 0..256 {
            let now = self.clock.now();
            let turns = ports.iter().map(|port| switch.turn(*port, BURST, now));
            if turns.filter(|turn| *turn != PortTurn::Idle).count() == 0
                && ports.iter().all(|port| !switch.arm(*port))
            {
                return;
            }
        }
    }

    pub fn attach(&self, port: Box<dyn Port>) -> PortIndex {
        let attached = self.switch.borrow_mut().attach(port, PortConfig::default());
        attached.map_err(|(error, _)| error).unwrap()
    }

    /// Lets time pass.
    pub fn pass(&self, nanoseconds: u64) {
        self.clock.advance(Duration::from_nanos(nanoseconds));
    }
}

pub struct Setup {
    pub settings: Settings,
    pub options: Options,
    pub memory: Memory,
    /// The cells of the tails.
    pub tails: Doorbells,
}

impl Setup {
    pub fn new(number: u64) -> Self {
        let options = Options { descriptors: 64, ..Options::default() };
        let memory = Memory::heap(memory_len(options.descriptors));
        let tails = Doorbells::trapped(DOORBELLS);
        Self { settings: Settings::new(Mac::local(number)), options, memory, tails }
    }

    /// A host with the communication status block.
    pub fn block(number: u64) -> Self {
        Self::new(number).settings(|one| one.csb = true).options(|one| one.csb = true)
    }

    pub fn settings(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(&mut self.settings);
        self
    }

    pub fn options(mut self, change: impl FnOnce(&mut Options)) -> Self {
        change(&mut self.options);
        self
    }

    pub fn device(&self, world: &World) -> (Device, DevicePort, Arc<FifoSink>) {
        let sink = FifoSink::new();
        let (device, port) = Device::new(Parts {
            memory: self.memory.clone(),
            interrupt: Interrupt::new(sink.clone(), 0),
            doorbells: self.tails.clone(),
            clock: Arc::new(world.clock.clone()),
            settings: self.settings,
        })
        .unwrap();
        (device, port, sink)
    }

    pub fn host(self, world: &World) -> Host {
        let (mut device, port, sink) = self.device(world);
        let port = world.attach(Box::new(port));
        device.config_write(4, &[6, 0]);
        let others = world.clone();
        let registers = Direct::beside(device, move || others.settle());
        let range = (0, memory_len(self.options.descriptors) as u64);
        let driver = Driver::new(registers, &self.memory, range, self.options).unwrap();
        world.settle();
        // The link is negotiated before the test begins, and its interrupt served.
        world.pass(crate::phy::NEGOTIATION);
        let memory = self.memory;
        let mut host =
            Host { driver, port, sink, mac: self.settings.mac, memory, world: world.clone() };
        host.device().poll();
        host.driver.interrupt_unread(|_| Ok(())).unwrap();
        host
    }
}

pub struct Host {
    pub driver: Driver<Direct<Device>>,
    pub port: PortIndex,
    pub sink: Arc<FifoSink>,
    pub mac: Mac,
    pub memory: Memory,
    pub world: World,
}

impl Host {
    pub fn device(&mut self) -> &mut Device {
        &mut self.driver.registers.function
    }

    pub fn counters(&mut self) -> Counters {
        self.device().control().counters()
    }

    /// Sends a frame and lets the switch forward it.
    pub fn send(&mut self, frame: &[u8]) {
        self.queue(frame);
        self.driver.flush().unwrap();
        self.world.settle();
    }

    /// Queues a frame.
    pub fn queue(&mut self, frame: &[u8]) {
        self.driver.sending.clean().unwrap();
        assert!(self.driver.sending.queue(frame, 0).unwrap(), "the ring is full");
    }

    /// Takes all frames that came.
    pub fn received(&mut self) -> Vec<Vec<u8>> {
        self.driver.received().unwrap()
    }

    /// Takes one frame that came, with its descriptor.
    pub fn one(&mut self) -> (Vec<u8>, slipway_e1000_spec::Receive) {
        let mut all = Vec::new();
        let keep = |one: Received<'_>| all.push((one.bytes.to_vec(), one.descriptor));
        self.driver.receive(usize::MAX, keep).unwrap();
        assert_eq!(all.len(), 1);
        all.pop().unwrap()
    }
}

/// Makes two hosts whose ports the switch has learned, and whose interrupts were served.
pub fn pair(first: Setup, second: Setup) -> (World, Host, Host) {
    let world = World::new();
    let (mut first, mut second) = (first.host(&world), second.host(&world));
    first.send(&frame(first.mac, second.mac, 60));
    second.send(&frame(second.mac, first.mac, 60));
    assert_eq!((first.received().len(), second.received().len()), (1, 1));
    // Throttles of both have run out.
    world.pass(20_000_000);
    for host in [&mut first, &mut second] {
        host.device().poll();
        host.driver.interrupt(|_| ()).unwrap();
        host.driver.sending.clean().unwrap();
    }
    world.pass(20_000_000);
    (world, first, second)
}

/// Returns a frame of `len` bytes whose payload differs from place to place.
pub fn frame(from: Mac, to: Mac, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len).map(|at| (at * 7 + at / 251) as u8).collect();
    bytes[..6].copy_from_slice(&to.0);
    bytes[6..12].copy_from_slice(&from.0);
    // A type for experiments (IEEE 802, 9.2.3).
    bytes[12..14].copy_from_slice(&[0x88, 0xb5]);
    bytes
}
