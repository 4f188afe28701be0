//! Hosts with a driver and a device each, on one switch.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use slipway_pci::FifoSink;
use slipway_ram::{Lasting, Memory};
use slipway_switch::{BURST, Learning, LearningOptions, Mac, PortConfig, PortIndex, Switch};
use slipway_telemetry::ManualClock;
use slipway_virtio_spec::net::Header;

use crate::driver::{Arena, Direct, Driver, Options, Received};
use crate::{Device, DevicePort, Parts, Settings, vectors};

/// Bytes of each host's memory.
pub const MEMORY: usize = 8 << 20;

/// The switch that all hosts of a test share.
#[derive(Clone)]
pub struct World(pub Rc<RefCell<Switch>>);

impl World {
    pub fn new() -> Self {
        let lookup = Learning::new(LearningOptions::default(), 1);
        Self(Rc::new(RefCell::new(Switch::new(Box::new(lookup)))))
    }

    /// Gives every port turns until none has any frames.
    pub fn settle(&self) {
        let mut switch = self.0.borrow_mut();
        let ports: Vec<PortIndex> = switch.ports().collect();
        for _ in 0..64 {
            let turns = ports.iter().map(|port| switch.turn(*port, BURST, Duration::ZERO));
            if turns.filter(|turn| *turn != slipway_switch::PortTurn::Idle).count() == 0 {
                return;
            }
        }
    }

    pub fn attach(&self, port: DevicePort) -> PortIndex {
        let attached = self.0.borrow_mut().attach(Box::new(port), PortConfig::default());
        attached.map_err(|(error, _)| error).unwrap()
    }
}

pub struct Setup {
    pub settings: Settings,
    pub options: Options,
    pub memory: Memory,
    pub journal: Option<Lasting>,
}

impl Setup {
    pub fn new(number: u64) -> Self {
        Self {
            settings: Settings::new(Mac::local(number)),
            options: Options::default(),
            memory: Memory::heap(MEMORY),
            journal: None,
        }
    }

    pub fn settings(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(&mut self.settings);
        self
    }

    pub fn options(mut self, change: impl FnOnce(&mut Options)) -> Self {
        change(&mut self.options);
        self
    }

    pub fn device(&self) -> (Device, DevicePort, Arc<FifoSink>) {
        let sink = FifoSink::new();
        let (device, port) = Device::new(Parts {
            memory: self.memory.clone(),
            interrupts: sink.interrupts(vectors(self.settings.pairs)),
            clock: Arc::new(ManualClock::new()),
            settings: self.settings,
            journal: self.journal.clone(),
        })
        .unwrap();
        (device, port, sink)
    }

    pub fn host(self, world: &World) -> Host {
        let (device, port, sink) = self.device();
        let port = world.attach(port);
        let others = world.clone();
        let registers = Direct::beside(device, move || others.settle());
        let arena = Arena::new(self.memory.clone(), 0, MEMORY as u64);
        let driver = Driver::new(registers, arena, self.options).unwrap();
        // The port takes the queues at its first turn.
        world.settle();
        Host { driver, port, sink, mac: self.settings.mac }
    }
}

pub struct Host {
    pub driver: Driver<Direct<Device>>,
    pub port: PortIndex,
    pub sink: Arc<FifoSink>,
    pub mac: Mac,
}

impl Host {
    pub fn device(&mut self) -> &mut Device {
        &mut self.driver.registers.function
    }

    /// Queues a frame and notifies.
    pub fn send(&mut self, frame: &[u8]) {
        self.send_with(&Header::default(), frame, &[]);
    }

    pub fn send_with(&mut self, header: &Header, frame: &[u8], cuts: &[usize]) {
        let driver = &mut self.driver;
        driver.transmit[0].push(&mut driver.arena, header, frame, cuts).unwrap();
        driver.flush(0).unwrap();
    }

    /// Takes all frames that came to queue 0.
    pub fn received(&mut self) -> Vec<Received> {
        self.received_on(0)
    }

    pub fn received_on(&mut self, pair: usize) -> Vec<Received> {
        std::iter::from_fn(|| self.driver.receive[pair].pop().unwrap()).collect()
    }
}

/// Makes two hosts whose ports the switch has learned.
pub fn pair(first: Setup, second: Setup) -> (World, Host, Host) {
    let world = World::new();
    let (first, second) = (first.host(&world), second.host(&world));
    let mut hosts = (first, second);
    hosts.0.send(&frame(hosts.0.mac, hosts.1.mac, 60));
    world.settle();
    hosts.1.send(&frame(hosts.1.mac, hosts.0.mac, 60));
    world.settle();
    assert_eq!((hosts.0.received().len(), hosts.1.received().len()), (1, 1));
    (world, hosts.0, hosts.1)
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
