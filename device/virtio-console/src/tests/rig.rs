//! A device with its driver.

use std::sync::Arc;

use slipway_pci::{FifoSink, Function, Progress};
use slipway_ram::Memory;

use crate::driver::{Arena, Direct, Driver, DriverError, Options};
use crate::{Console, Parts, PortSettings, vectors};

/// Bytes of the guest's memory.
pub const MEMORY: usize = 1 << 20;
/// The console's number, and the agent's.
pub const CONSOLE: u16 = 0;
pub const AGENT: u16 = 1;

/// Returns a device with a console and the agent's port.
pub fn device(memory: &Memory) -> (Console, Arc<FifoSink>) {
    let sink = FifoSink::new();
    let parts = Parts {
        memory: memory.clone(),
        interrupts: sink.interrupts(vectors(2)),
        ports: vec![PortSettings::console(), PortSettings::named("slipway.agent")],
    };
    (Console::new(parts).unwrap(), sink)
}

pub struct Rig {
    pub driver: Driver<Direct<Console>>,
    pub memory: Memory,
    pub sink: Arc<FifoSink>,
}

impl Rig {
    /// Makes a device whose host has opened both ports, and a driver that has set them up.
    pub fn new(options: Options) -> Self {
        let memory = Memory::heap(MEMORY);
        let (mut console, sink) = device(&memory);
        console.set_host_open(CONSOLE, true);
        console.set_host_open(AGENT, true);
        let arena = Arena::new(memory.clone(), 0, MEMORY as u64);
        let mut driver = Driver::new(Direct::new(console), arena, options).unwrap();
        if options.multiport {
            driver.open(AGENT, true).unwrap();
        }
        let mut rig = Self { driver, memory, sink };
        rig.settle();
        rig
    }

    pub fn console(&mut self) -> &mut Console {
        &mut self.driver.registers.function
    }

    /// Polls until there is nothing to do, as a host does. Returns the polls that did something.
    pub fn settle(&mut self) -> usize {
        for busy in 0..1000 {
            if self.console().poll() == Progress::Idle(None) {
                return busy;
            }
        }
        panic!("a device that is never idle");
    }

    /// Reads everything that a port has, in calls of `len` bytes.
    pub fn read_all(&mut self, port: u16, len: usize) -> Vec<u8> {
        let (mut all, mut piece) = (Vec::new(), vec![0; len]);
        loop {
            let read = self.console().port_read(port, &mut piece);
            all.extend(&piece[..read]);
            if read < len && self.settle() == 0 {
                return all;
            }
        }
    }

    pub fn needs_reset(&mut self) -> bool {
        use slipway_virtio::driver::Start;
        matches!(self.driver.registers.needs_no_reset(), Err(DriverError::NeedsReset))
    }

    /// Checks that the device works after a reset.
    pub fn recovers(&mut self) {
        self.driver.start().unwrap();
        self.driver.open(AGENT, true).unwrap();
        self.driver.send(AGENT, b"again", 1).unwrap();
        self.settle();
        assert_eq!(self.read_all(AGENT, 100), b"again");
        assert_eq!(self.console().port_write(AGENT, b"yes"), 3);
        assert_eq!(self.driver.receive(AGENT).unwrap(), b"yes");
        assert!(!self.needs_reset());
    }
}

/// Returns bytes that differ from place to place.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251) as u8).collect()
}
