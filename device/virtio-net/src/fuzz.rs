//! The bodies of the fuzz targets: bytes become the actions of a hostile guest.

use std::sync::Arc;
use std::time::Duration;

use slipway_pci::Function;
use slipway_ram::Memory;
use slipway_switch::{BURST, Learning, LearningOptions, Mac, PortConfig, Switch};
use slipway_telemetry::ManualClock;
use slipway_virtio::fuzz::{self, Guest};
use slipway_virtio_spec::net::Features;

use crate::control::execute;
use crate::driven::Driven;
use crate::driver::notification;
use crate::layout::COMMON;
use crate::{Device, Parts, Settings, vectors};

/// A device on a switch of its own.
struct Host {
    device: Device,
    switch: Switch,
}

impl Guest for Host {
    type Device = Device;
    const MEMORY: usize = 1 << 16;

    fn new(memory: &Memory) -> Self {
        let settings = Settings { pairs: 2, queue_size: 16, ..Settings::new(Mac::local(1)) };
        let made = Device::new(Parts {
            memory: memory.clone(),
            interrupts: fuzz::interrupts(vectors(settings.pairs)),
            clock: Arc::new(ManualClock::new()),
            settings,
            journal: None,
        });
        let Ok((device, port)) = made else { unreachable!("the parts fit together") };
        let lookup = Learning::new(LearningOptions::default(), 1);
        let mut switch = Switch::new(Box::new(lookup));
        assert!(switch.attach(Box::new(port), PortConfig::default()).is_ok());
        Self { device, switch }
    }

    fn device(&mut self) -> &mut Device {
        &mut self.device
    }

    fn start(mut self, _: &Memory) -> Self {
        self.equip();
        self
    }

    fn turn(&mut self, _: &[u8]) {
        self.round();
    }

    /// The successor's state differs from the predecessor's by the announcement that it asks for.
    fn succeed(mut self, memory: &Memory) -> Self {
        // The switch has the queues, and gives them back in its turn.
        for _ in 0..2 {
            if !self.device.quiesce() {
                self.switch_turn();
            }
        }
        assert!(self.device.quiesce());
        let mut successor = Self::new(memory);
        assert_eq!(successor.device.restore(&self.device.save()), Ok(()));
        successor
    }

    fn works(mut self, _: &Memory) {
        self.equip();
        assert!(self.device.control().is_up());
    }
}

impl Host {
    /// Lets the device and then the switch do what they have to do.
    fn round(&mut self) {
        self.device.poll();
        self.switch_turn();
    }

    fn switch_turn(&mut self) {
        self.switch.turn(0, BURST, Duration::ZERO);
    }

    /// Sets up the queues and starts the driver, so that inputs reach their subject.
    fn equip(&mut self) {
        let write = |device: &mut Device, at: u64, value: u32| {
            device.write(0, COMMON.start + at, &value.to_le_bytes());
        };
        self.device.write(0, 20, &[3]);
        for half in 0..2 {
            write(&mut self.device, 0, half);
            let mut offered = [0; 4];
            self.device.read(0, 4, &mut offered);
            write(&mut self.device, 8, half);
            write(&mut self.device, 12, u32::from_le_bytes(offered));
        }
        self.device.write(0, 20, &[8]);
        for queue in 0..5_u32 {
            self.device.write(0, 22, &(queue as u16).to_le_bytes());
            for (at, area) in [(32, 0), (40, 0x100), (48, 0x200)] {
                write(&mut self.device, at, queue * 0x400 + area);
            }
            self.device.write(0, 28, &[1, 0]);
        }
        self.device.write(0, 20, &[4]);
        self.round();
    }
}

/// Runs a hostile guest: [`fuzz::device`].
///
/// # Panics
/// When the device has a defect.
pub fn device(data: &[u8]) {
    fuzz::device::<Host>(data);
}

/// Runs a driver whose memory is the input: rings, descriptors and tables.
///
/// # Panics
/// When the device has a defect.
pub fn rings(data: &[u8]) {
    let memory = Memory::heap(Host::MEMORY);
    let mut guest = Host::new(&memory);
    guest.equip();
    for chunk in data.chunks(0x1400) {
        let _ = memory.write(0, chunk);
        for queue in 0..5 {
            guest.device.write(0, notification(queue), &[0; 2]);
        }
        guest.round();
        guest.round();
    }
    fuzz::finish(guest, &memory);
}

/// Runs commands of the control queue.
///
/// # Panics
/// When a command leaves invalid settings.
pub fn control(data: &[u8]) {
    let mut driven = Driven::new(Mac::local(1), 4);
    driven.negotiated(Features::all());
    let mut rest = data;
    while let Some((&len, after)) = rest.split_first() {
        let (command, after) = after.split_at(usize::from(len).min(after.len()));
        let before = driven.clone();
        if execute(command, Features::all(), &mut driven).is_none() {
            assert_eq!(before, driven, "a command that was refused changed something");
        }
        assert!(driven.is_sound(Features::all(), 4));
        rest = after;
    }
}

/// Restores saved states.
///
/// # Panics
/// When an accepted state differs from the state that is saved again.
pub fn state(data: &[u8]) {
    let memory = Memory::heap(Host::MEMORY);
    let mut guest = Host::new(&memory);
    if guest.device.restore(data).is_ok() {
        let saved = guest.device.save();
        let mut again = Host::new(&Memory::heap(Host::MEMORY));
        assert!(again.device.restore(&saved).is_ok());
    }
    fuzz::finish(guest, &memory);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_targets_survive_pseudo_random_input() {
        let targets = [super::device, super::rings, super::control, super::state];
        super::fuzz::survive(60, &targets);
    }
}
