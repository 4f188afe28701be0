//! The body of the fuzz target: bytes become the actions of a hostile guest, on registers,
//! descriptors and the communication status block.

use std::sync::Arc;
use std::time::Duration;

use slipway_doorbells::Doorbells;
use slipway_e1000_spec::{control, csb, rctl, register, tctl};
use slipway_pci::{FifoSink, Function, Interrupt};
use slipway_ram::Memory;
use slipway_switch::ports::LoopbackPort;
use slipway_switch::{BURST, Learning, LearningOptions, Mac, PortConfig, PortTurn, Switch};
use slipway_telemetry::{Clock, ManualClock};

use crate::{DOORBELLS, Device, Parts, Settings};

/// Bytes of the guest's memory.
const MEMORY: usize = 1 << 16;
/// The rings, the block and the buffers.
const TRANSMIT: u32 = 0;
const RECEIVE: u32 = 0x1000;
const BLOCK: u32 = 0x2000;
/// Bytes of each ring.
const RING: u32 = 0x400;

/// A device on a switch with a port that sends every frame back.
struct FuzzedDevice {
    device: Device,
    tails: Doorbells,
    switch: Switch,
    memory: Memory,
    clock: ManualClock,
}

impl FuzzedDevice {
    fn new(memory: &Memory, clock: &ManualClock, csb: bool) -> Self {
        let tails = Doorbells::trapped(DOORBELLS);
        let made = Device::new(Parts {
            memory: memory.clone(),
            interrupt: Interrupt::new(FifoSink::new(), 0),
            doorbells: tails.clone(),
            clock: Arc::new(clock.clone()),
            settings: Settings { csb, ..Settings::new(Mac::local(1)) },
        });
        let Ok((device, port)) = made else { unreachable!("the parts fit together") };
        let lookup = Learning::new(LearningOptions::default(), 1);
        let mut switch = Switch::new(Box::new(lookup));
        assert!(switch.attach(Box::new(port), PortConfig::default()).is_ok());
        let back = Box::new(LoopbackPort::default());
        assert!(switch.attach(back, PortConfig::default()).is_ok());
        Self { device, tails, switch, memory: memory.clone(), clock: clock.clone() }
    }

    fn set(&mut self, offset: u32, value: u32) {
        self.device.write(0, offset.into(), &value.to_le_bytes());
    }

    /// Starts the rings, so that inputs reach their subject.
    fn start(&mut self) {
        self.device.config_write(4, &[6]);
        for (offset, value) in [
            (register::TDBAL, TRANSMIT),
            (register::TDLEN, RING),
            (register::RDBAL, RECEIVE),
            (register::RDLEN, RING),
            (register::RXCSUM, 0x300),
            (register::CTRL, control::VME),
            (register::CSBAL, BLOCK | csb::ENABLE),
            (register::TCTL, tctl::EN),
            (register::RCTL, rctl::EN | rctl::UPE | rctl::MPE | rctl::LPE),
            (register::RDT, 63),
            (register::IMS, u32::MAX),
        ] {
            self.set(offset, value);
        }
        self.clock.advance(Duration::from_millis(2));
        self.round();
    }

    /// Lets the device and then the switch do what they have to do.
    fn round(&mut self) {
        self.device.poll();
        let now = self.clock.now();
        for port in 0..2 {
            self.switch.turn(port, BURST, now);
        }
    }

    /// Checks that the port falls asleep: it does not wait for work that it cannot do.
    fn falls_asleep(&mut self) {
        // Frames in loopback could write the ring, or the tail in the block.
        self.set(register::RCTL, 0);
        // A turn reads 256 descriptors or more, if as many wait; the ring has fewer than 64 Ki.
        let sleeps = (0..512).any(|_| {
            self.switch.turn(0, BURST, self.clock.now()) == PortTurn::Idle && !self.switch.arm(0)
        });
        assert!(sleeps, "the port keeps its thread awake");
    }

    fn quiesce(&mut self) {
        for _ in 0..2 {
            if !self.device.quiesce() {
                self.switch.turn(0, BURST, self.clock.now());
            }
        }
        assert!(self.device.quiesce(), "the port gives the rings back in its turn");
    }

    /// Carries out one action of the guest: a kind, two bytes, four bytes.
    fn act(&mut self, action: &[u8; 8]) {
        let [kind, extra, low, high, value @ ..] = *action;
        let at = u16::from_le_bytes([low, high]);
        let value = u32::from_le_bytes(value);
        match kind % 8 {
            0 => self.set(u32::from(at & 0x7ffc), value),
            1 => {
                let len = usize::from(extra % 9);
                self.device.read(0, (at & 0x7fff).into(), &mut [0; 8][..len]);
            }
            2 => {
                let _ = self.memory.write(at.into(), &action[1..]);
            }
            3 if extra & 1 != 0 => {
                // A VMM that was taken over stores any value.
                self.tails.store(usize::from(extra >> 1 & 1), value);
                self.device.notified(u64::from(value));
            }
            3 => self.set(register::TDT, value & 0x3f),
            4 => self.set(register::RDT, value & 0x3f),
            5 => self.clock.advance(Duration::from_nanos(value.into())),
            6 => {
                let len = usize::from(extra % 5);
                self.device.config_write(at % 256, &value.to_le_bytes()[..len]);
            }
            _ => {
                let word = BLOCK + u32::from(extra % 16) * 4;
                let _ = self.memory.write(word.into(), &(value & 0x7f).to_le_bytes());
            }
        }
    }

    /// Replaces the device by a successor with its saved state.
    fn succeed(mut self, csb: bool) -> Self {
        self.quiesce();
        let state = self.device.save();
        let mut next = Self::new(&self.memory, &self.clock, csb);
        assert_eq!(next.device.restore(&state), Ok(()));
        assert!(next.device.save() == state, "a successor has the same state");
        next
    }
}

/// Runs a hostile guest. The first byte says whether the device has the block, whether a successor
/// takes over in the middle, and whether received frames may have work left; the rest are the
/// memory, then actions.
///
/// # Panics
/// When the device has a defect.
pub fn device(data: &[u8]) {
    let Some((&first, rest)) = data.split_first() else { return };
    let (memory, clock) = (Memory::heap(MEMORY), ManualClock::new());
    let csb = first & 1 != 0;
    let (contents, actions) = rest.split_at(rest.len() / 2);
    for (at, part) in contents.chunks(RING as usize).enumerate().take(MEMORY / RING as usize) {
        // Rings first, then the block, then buffers.
        let place = [TRANSMIT, RECEIVE, BLOCK].get(at).copied().unwrap_or(at as u32 * 0x1000);
        let _ = memory.write((place as usize % MEMORY) as u64, part);
    }
    let mut guest = FuzzedDevice::new(&memory, &clock, csb);
    guest.start();
    if first & 4 != 0 {
        guest.set(register::CSBAL, BLOCK | csb::ENABLE | csb::OFFLOADS);
    }
    let actions = actions.as_chunks::<8>().0;
    for (number, action) in actions.iter().enumerate() {
        guest.act(action);
        if action[0] & 0x80 == 0 {
            guest.round();
        }
        if first & 2 != 0 && number == actions.len() / 2 {
            guest = guest.succeed(csb);
        }
    }
    guest.round();
    guest.falls_asleep();
    guest.quiesce();
    works(guest);
}

/// Checks that a guest which resets its device can go on.
fn works(mut guest: FuzzedDevice) {
    guest.device.poll();
    guest.device.reset();
    for _ in 0..2 {
        guest.round();
    }
    guest.start();
    guest.clock.advance(Duration::from_millis(20));
    guest.round();
    assert!(guest.device.control().is_up());
}

/// Restores saved states.
///
/// # Panics
/// When an accepted state differs from the state that is saved again.
pub fn state(data: &[u8]) {
    let (memory, clock) = (Memory::heap(MEMORY), ManualClock::new());
    let mut guest = FuzzedDevice::new(&memory, &clock, true);
    if guest.device.restore(data).is_ok() {
        guest.quiesce();
        let saved = guest.device.save();
        let mut again = FuzzedDevice::new(&memory, &clock, true);
        assert_eq!(again.device.restore(&saved), Ok(()));
        assert!(again.device.save() == saved, "a successor has the same state");
    }
    works(guest);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_targets_survive_pseudo_random_input() {
        for data in slipway_ram::fuzz::inputs(1, 4096).take(300) {
            super::device(&data);
            super::state(&data);
        }
    }
}
