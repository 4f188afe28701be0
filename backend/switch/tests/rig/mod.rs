//! A switch with programs at its ports, for tests.

pub mod offloads;

use std::time::Duration;

use slipway_ring::{Consumer, Descriptor, Geometry, Link, Producer};
use slipway_switch::ports::{MemoryPort, Tell};
use slipway_switch::{
    Abilities, BURST, BadConfig, Learning, LearningOptions, Mac, Port, PortConfig, PortIndex,
    PortStats, PortTurn, Switch,
};

/// Returns the address for a number.
pub fn mac(number: u64) -> Mac {
    Mac::local(number)
}

/// Returns a frame of an experimental type.
pub fn untagged(from: u64, to: u64, payload: &[u8]) -> Vec<u8> {
    let mut frame = [mac(to).0, mac(from).0].concat();
    frame.extend([0x88, 0xb5]);
    frame.extend(payload);
    frame
}

/// The number of slots of 2,048 bytes in each ring.
const SLOTS: u32 = 16;

pub struct Rig {
    pub switch: Switch,
    peers: Vec<Option<(Consumer, Producer)>>,
}

impl Default for Rig {
    fn default() -> Self {
        let table = Learning::new(LearningOptions::default(), 0x5851_f42d_4c95_7f2d);
        Self { switch: Switch::new(Box::new(table)), peers: Vec::new() }
    }
}

impl Rig {
    fn port() -> (Box<MemoryPort>, Link) {
        Self::able(Abilities::ALL)
    }

    fn able(abilities: Abilities) -> (Box<MemoryPort>, Link) {
        let link = Link::new(Geometry { slots: SLOTS, payload: 2048 }).unwrap();
        (Box::new(MemoryPort::new(&link, Tell::new().unwrap(), abilities)), link)
    }

    pub fn attach(&mut self, config: PortConfig) -> PortIndex {
        self.attach_able(config, Abilities::ALL)
    }

    pub fn attach_able(&mut self, config: PortConfig, abilities: Abilities) -> PortIndex {
        self.attach_wrapped(config, abilities, |port| port)
    }

    /// Attaches the port that `wrap` makes of a program's.
    pub fn attach_wrapped(
        &mut self,
        config: PortConfig,
        abilities: Abilities,
        wrap: impl FnOnce(Box<MemoryPort>) -> Box<dyn Port>,
    ) -> PortIndex {
        let (port, link) = Self::able(abilities);
        let index = self.switch.attach(wrap(port), config).map_err(|(error, _)| error).unwrap();
        let at = usize::from(index);
        self.peers.resize_with(self.peers.len().max(at + 1), || None);
        self.peers[at] = Some(link.peer());
        index
    }

    pub fn attach_refused(&mut self, config: PortConfig) -> BadConfig {
        self.switch.attach(Self::port().0, config).map_err(|(error, _)| error).unwrap_err()
    }

    pub fn detach(&mut self, port: PortIndex) {
        self.switch.detach(port).unwrap();
        self.peers[usize::from(port)] = None;
    }

    /// Replaces the program of a port.
    pub fn replace(&mut self, port: PortIndex) {
        let (new, link) = Self::port();
        drop(self.switch.replace(port, new).map_err(|(error, _)| error).unwrap());
        self.peers[usize::from(port)] = Some(link.peer());
    }

    pub fn configure(&mut self, port: PortIndex, config: PortConfig) {
        self.switch.configure(port, config).unwrap();
    }

    /// Queues a frame of any length in the port's ring.
    pub fn queue(&mut self, port: usize, frame: &[u8]) {
        self.queue_described(port, frame, |descriptor| descriptor);
    }

    pub fn queue_described(
        &mut self,
        port: usize,
        frame: &[u8],
        describe: impl Fn(Descriptor) -> Descriptor,
    ) {
        let (_, output) = self.peers[port].as_mut().unwrap();
        let parts: Vec<_> = frame.chunks(2048).collect();
        assert!(output.free(parts.len()).unwrap() >= parts.len());
        for (at, part) in parts.iter().enumerate() {
            output.memory().write(output.place(at), part).unwrap();
            let mut descriptor = Descriptor::new(part.len() as u32);
            if at == 0 {
                descriptor = describe(descriptor);
            }
            output.describe(
                at,
                if at + 1 < parts.len() { descriptor.and_more() } else { descriptor },
            );
        }
        output.publish(parts.len());
    }

    /// Fills the port's ring with copies of a frame.
    pub fn fill(&mut self, port: usize, frame: &[u8]) {
        while self.peers[port].as_mut().unwrap().1.free(SLOTS as usize).unwrap() > 0 {
            self.queue(port, frame);
        }
    }

    pub fn send(&mut self, port: usize, frame: &[u8]) {
        self.queue(port, frame);
        self.run();
    }

    /// Runs turns until no frames are left.
    pub fn run(&mut self) {
        for port in self.switch.ports().collect::<Vec<_>>() {
            while self.switch.turn(port, BURST, Duration::ZERO) != PortTurn::Idle {}
        }
    }

    /// Returns the frames that the program at a port has got since the last call.
    pub fn received_at(&mut self, port: usize) -> Vec<Vec<u8>> {
        let Some((input, _)) = self.peers[port].as_mut() else { return Vec::new() };
        let there = input.available(SLOTS as usize).unwrap();
        let (mut frames, mut frame) = (Vec::new(), Vec::new());
        for slot in 0..there {
            let descriptor = input.descriptor(slot);
            let mut part = vec![0; descriptor.len()];
            input.memory().read(input.place(slot), &mut part).unwrap();
            frame.extend(part);
            if !descriptor.has_more() {
                frames.push(std::mem::take(&mut frame));
            }
        }
        input.release(there);
        assert!(frame.is_empty(), "half a frame");
        frames
    }

    pub fn received(&mut self) -> Vec<Vec<Vec<u8>>> {
        (0..self.peers.len()).map(|port| self.received_at(port)).collect()
    }

    /// Returns the number of frames that each program has got since the last call.
    pub fn counts(&mut self) -> Vec<usize> {
        self.received().iter().map(Vec::len).collect()
    }

    pub fn stats(&mut self, port: PortIndex) -> PortStats {
        self.switch.stats(port).unwrap().clone()
    }

    pub fn dropped_in(&mut self, port: PortIndex) -> Vec<(&'static str, u64)> {
        self.stats(port).causes_in().collect()
    }
}
