//! The bodies of the fuzz targets: bytes become the actions of a hostile guest.

use std::sync::Arc;
use std::time::Duration;

use slipway_pci::{FifoSink, Function, Interrupt};
use slipway_ram::Memory;
use slipway_switch::{BURST, Learning, LearningOptions, Mac, PortConfig, Switch};
use slipway_telemetry::ManualClock;
use slipway_virtio_spec::net::Features;

use crate::control::execute;
use crate::driven::Driven;
use crate::driver::notification;
use crate::layout::{BAR_SIZE, COMMON};
use crate::{Device, Parts, Settings, vectors};

/// Bytes of guest memory: few, so that random addresses hit it.
const MEMORY: usize = 1 << 16;
/// Most steps of one input.
const STEPS: usize = 2048;

/// A device whose guest is the input, on a switch with a port that takes everything.
struct Guest {
    device: Device,
    switch: Switch,
    memory: Memory,
}

impl Guest {
    fn new() -> Self {
        let memory = Memory::heap(MEMORY);
        let settings = Settings { pairs: 2, queue_size: 16, ..Settings::new(Mac::local(1)) };
        let lookup = Learning::new(LearningOptions::default(), 1);
        let mut switch = Switch::new(Box::new(lookup));
        let mut make = |memory: &Memory, settings: Settings| {
            let sink = FifoSink::new();
            let interrupt = |vector| Interrupt::new(sink.clone(), vector);
            let made = Device::new(Parts {
                memory: memory.clone(),
                interrupts: (0..vectors(settings.pairs)).map(interrupt).collect(),
                clock: Arc::new(ManualClock::new()),
                settings,
                journal: None,
            });
            let Ok((device, port)) = made else { unreachable!("the parts fit together") };
            let attached = switch.attach(Box::new(port), PortConfig::default());
            assert!(attached.is_ok());
            device
        };
        let device = make(&memory, settings);
        Self { device, switch, memory }
    }

    fn turn(&mut self) {
        self.device.poll();
        for port in 0..1 {
            self.switch.turn(port, BURST, Duration::ZERO);
        }
    }

    /// Sets up the queues and starts the driver, so that inputs reach their subject.
    fn start(&mut self) {
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
        self.turn();
    }
}

/// Runs accesses to registers and configuration space, changes of memory, and turns of the switch.
///
/// # Panics
/// When the device has a defect.
pub fn device(data: &[u8]) {
    let mut guest = Guest::new();
    if data.first().is_some_and(|first| first & 1 == 1) {
        guest.start();
    }
    for step in data.chunks_exact(8).take(STEPS) {
        let at = u64::from(u16::from_le_bytes([step[1], step[2]]));
        let len = 1 << (step[3] & 3);
        let mut bytes = [step[4], step[5], step[6], step[7], step[4], 0, 0, 0];
        let bytes = &mut bytes[..len];
        match step[0] >> 5 {
            0 => drop(guest.device.read(0, at % BAR_SIZE, bytes)),
            1 => drop(guest.device.write(0, at % COMMON.end.min(64), bytes)),
            2 => drop(guest.device.write(0, at % BAR_SIZE, bytes)),
            3 => guest.device.config_write(at as u16 % 256, bytes),
            4 => drop(guest.memory.write(at % MEMORY as u64, bytes)),
            5 => drop(guest.device.write(0, notification(at as u16 % 8), &[0; 2])),
            6 if step[1] == 0 => drop(guest.device.quiesce()),
            _ => guest.turn(),
        }
    }
    finish(guest);
}

/// Runs a driver whose memory is the input: rings, descriptors and tables.
///
/// # Panics
/// When the device has a defect.
pub fn rings(data: &[u8]) {
    let mut guest = Guest::new();
    guest.start();
    for chunk in data.chunks(0x1400) {
        let _ = guest.memory.write(0, chunk);
        for queue in 0..5 {
            guest.device.write(0, notification(queue), &[0; 2]);
        }
        guest.turn();
        guest.turn();
    }
    finish(guest);
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
    let mut guest = Guest::new();
    if guest.device.restore(data).is_ok() {
        let saved = guest.device.save();
        let mut again = Guest::new();
        assert!(again.device.restore(&saved).is_ok());
    }
    finish(guest);
}

/// Checks that the device works after a reset, whatever happened before.
fn finish(mut guest: Guest) {
    for _ in 0..4 {
        guest.turn();
    }
    guest.device.reset();
    guest.turn();
    guest.turn();
    let mut status = [1];
    guest.device.read(0, 20, &mut status);
    assert_eq!(status, [0]);
    guest.start();
    assert!(guest.device.control().is_up());
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_targets_survive_pseudo_random_input() {
        let mut seed = 1_u64;
        for _ in 0..60 {
            let data: Vec<u8> = (0..4096)
                .map(|_| {
                    seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    (seed >> 56) as u8
                })
                .collect();
            super::device(&data);
            super::rings(&data);
            super::control(&data);
            super::state(&data);
        }
    }
}
