//! The body of the fuzz target: bytes become what a hostile guest does.

use std::sync::Arc;
use std::time::Duration;

use slipway_block::RamDisk;
use slipway_nvme_spec::registers::{AdminQueueAttributes, Configuration, offset};
use slipway_pci::{Doorbells, FifoSink, Function, Interrupt};
use slipway_ram::Memory;
use slipway_telemetry::ManualClock;

use crate::{Controller, Identity, Limits, Namespace, Parts, doorbell_count};

/// Bytes of guest memory: little, so that addresses hit it.
const MEMORY: usize = 1 << 18;
/// Most steps of one input.
const STEPS: usize = 4096;

/// Takes bytes off the input; zeros when it is used up.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let len = N.min(self.0.len());
        bytes[..len].copy_from_slice(&self.0[..len]);
        self.0 = &self.0[len..];
        bytes
    }

    fn byte(&mut self) -> u8 {
        self.take::<1>()[0]
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }
}

struct Guest {
    memory: Memory,
    controller: Controller,
    clock: ManualClock,
}

/// Interprets `data` as register accesses, memory pokes, commands, polls, resets and moves of the
/// saved state to a fresh controller. It must return, and nothing else is asked of it.
///
/// # Panics
/// When the controller has a defect.
pub fn fuzz(data: &[u8]) {
    let mut input = Input(data);
    let mut guest = Guest::new();
    if input.byte() & 1 == 0 {
        guest.enable();
    }
    for _ in 0..STEPS {
        if input.0.is_empty() {
            break;
        }
        guest.step(&mut input);
    }
    guest.drain();
}

fn namespace() -> Namespace {
    match RamDisk::new(1 << 16, 512) {
        Ok(disk) => Namespace::new(1, Box::new(disk), [7; 16]),
        Err(error) => panic!("64 KiB of address space: {error}"),
    }
}

fn make(memory: &Memory, clock: &ManualClock) -> Controller {
    let sink = FifoSink::new();
    let limits = Limits { queue_pairs: 4, queue_entries: 16, transfer: 1 << 16, in_flight: 64 };
    let parts = Parts {
        memory: memory.clone(),
        interrupts: (0..4).map(|vector| Interrupt::new(sink.clone(), vector)).collect(),
        doorbells: Doorbells::trapped(doorbell_count(limits.queue_pairs)),
        namespaces: vec![namespace()],
        clock: Arc::new(clock.clone()),
        identity: Identity::new("FUZZ"),
        limits,
        journal: None,
    };
    match Controller::new(parts) {
        Ok(controller) => controller,
        Err(error) => panic!("the parts are constant: {error}"),
    }
}

impl Guest {
    fn new() -> Self {
        let (memory, clock) = (Memory::heap(MEMORY), ManualClock::new());
        let controller = make(&memory, &clock);
        Self { memory, controller, clock }
    }

    /// What nearly every input needs first: admin queues at pages 0 and 1.
    fn enable(&mut self) {
        self.write32(offset::AQA, AdminQueueAttributes::new(16).0);
        self.write32(offset::ACQ, 0x1000);
        self.write32(offset::CC, Configuration::ENABLE.0);
        self.controller.poll();
    }

    fn write32(&mut self, at: u64, value: u32) {
        self.controller.write(0, at, &value.to_le_bytes());
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.byte() % 12 {
            0 => {
                let at = u64::from(input.word()) % crate::BAR_SIZE;
                let len = usize::from(input.byte() % 8) + 1;
                let bytes: [u8; 8] = input.take();
                self.controller.write(0, at, &bytes[..len]);
            }
            1 => {
                let at = u64::from(input.word()) % crate::BAR_SIZE;
                let mut bytes = [0; 8];
                let len = usize::from(input.byte() % 8) + 1;
                self.controller.read(0, at, &mut bytes[..len]);
            }
            2 => self.poke(input),
            3 | 4 => self.command(input),
            5 => {
                let (cell, value) = (u64::from(input.byte() % 12), input.byte());
                self.write32(offset::DOORBELLS + 4 * cell, u32::from(value % 20));
            }
            6 => self.write32(offset::CC, input.word()),
            7 => self.clock.advance(Duration::from_millis(input.word().into())),
            8 => self.config(input),
            9 => self.move_house(input.byte()),
            10 => self.change(input.byte()),
            _ => {
                self.controller.poll();
            }
        }
    }

    /// Changes guest memory.
    fn poke(&mut self, input: &mut Input<'_>) {
        let at = u64::from(input.word()) % MEMORY as u64;
        let _ = self.memory.write(at, &input.take::<8>());
    }

    /// Puts an entry into one of the first submission queue slots; addresses mostly hit memory.
    fn command(&mut self, input: &mut Input<'_>) {
        let slot = u64::from(input.byte() % 32) * 64;
        let queue = u64::from(input.byte() % 4) * 0x2000;
        let mut entry = [0; 64];
        entry[0] = input.byte();
        entry[2] = input.byte();
        entry[4] = input.byte() % 4;
        entry[24..27].copy_from_slice(&input.take::<3>());
        entry[32..35].copy_from_slice(&input.take::<3>());
        entry[40..48].copy_from_slice(&input.take::<8>());
        entry[48..52].copy_from_slice(&input.take::<4>());
        let _ = self.memory.write(queue + slot, &entry);
    }

    fn config(&mut self, input: &mut Input<'_>) {
        let at = u16::from_le_bytes(input.take()) & 0xfff;
        self.controller.config_write(at, &input.take::<4>());
        self.controller.config_read(at, &mut [0; 4]);
    }

    /// Saves, and restores into a fresh controller: an own state must be accepted, a damaged one
    /// may be refused but not believed blindly.
    fn move_house(&mut self, damage: u8) {
        while !self.controller.quiesce() {}
        let mut state = self.controller.save();
        let mut fresh = make(&self.memory, &self.clock);
        if damage < 0x80 {
            let restored = fresh.restore(&state);
            assert!(restored.is_ok(), "{restored:?}");
        } else {
            let at = usize::from(damage) * 7 % state.len().max(1);
            if let Some(byte) = state.get_mut(at) {
                *byte ^= damage;
            }
            let _ = fresh.restore(&state);
        }
        self.controller = fresh;
    }

    /// What the host may do at any moment: a namespace comes or goes, or looks at its size. It is
    /// as before when the guest goes on, as the next controller must have the same ones.
    fn change(&mut self, how: u8) {
        self.controller.refresh(u32::from(how & 3), Box::new(drop));
        self.controller.detach(1, Box::new(drop));
        if how & 4 == 0 {
            self.controller.poll();
        }
        while !self.controller.quiesce() {}
        let attached = self.controller.attach(namespace());
        assert!(attached.is_ok(), "{attached:?}");
    }

    fn drain(&mut self) {
        for _ in 0..64 {
            self.controller.poll();
        }
        assert_eq!(self.controller.requests_in_flight(), 0);
    }
}
