//! The bodies of the fuzz targets: bytes become the actions of a hostile guest. [`fuzz`] does
//! anything; [`admin`], [`io`] and [`pointers`] reach their subjects directly.

pub mod doorbells;

use std::sync::Arc;
use std::time::Duration;

use slipway_block::RamDisk;
use slipway_doorbells::Doorbells;
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::registers::{
    AdminQueueAttributes, Configuration, head_doorbell, offset, tail_doorbell,
};
use slipway_nvme_spec::sgl::{DescriptorType, SglDescriptor};
use slipway_pci::{FifoSink, Function};
use slipway_ram::Memory;
use slipway_telemetry::ManualClock;
use zerocopy::IntoBytes;

use crate::admin::COMMANDS;
use crate::prp::Walker;
use crate::{Controller, Identity, Limits, Namespace, Parts, doorbell_count};

/// Bytes of guest memory: few, so that random addresses hit it.
const MEMORY: usize = 1 << 18;
/// Most steps of one input.
const STEPS: usize = 4096;

/// Takes bytes off the input, and zeros after its end.
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

    /// Takes an address in a small memory, or sometimes beyond it.
    fn address(&mut self) -> u64 {
        let [low, high, beyond, align] = self.take();
        let mask = if align & 1 == 0 { !0xfff } else { !0 };
        let far = if beyond == 0xff { u64::MAX << 18 } else { 0 };
        (u64::from(u16::from_le_bytes([low, high])) & mask) | far
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }
}

/// Runs admin commands on an enabled controller.
///
/// # Panics
/// When the controller has a defect.
pub fn admin(data: &[u8]) {
    let mut input = Input(data);
    let mut guest = FuzzedController::new();
    guest.enable();
    let opcodes = [COMMANDS.as_slice(), &MORE_ADMIN].concat();
    while !input.0.is_empty() {
        let opcode = opcodes[usize::from(input.byte()) % opcodes.len()].0;
        let entry = guest.entry(opcode, 0, &mut input);
        guest.submit(0, &[entry]);
    }
    guest.drain();
}

/// Runs commands of two I/O queues, with PRPs and SGLs, and some that abort them.
///
/// # Panics
/// When the controller has a defect.
pub fn io(data: &[u8]) {
    let mut input = Input(data);
    let mut guest = FuzzedController::new();
    guest.enable();
    for id in 1..=2u8 {
        for (opcode, page) in [(5, 2), (1, 0)] {
            let mut entry = [0; 64];
            entry[0] = opcode;
            entry[25] = 0x20 * id + 0x10 * page;
            entry[40..48].copy_from_slice(&[id, 0, 15, 0, 1, 0, id, 0]);
            guest.submit(0, &[entry]);
        }
    }
    while !input.0.is_empty() {
        let (queue, opcode) = (input.byte(), input.byte());
        match queue % 16 {
            0 => {
                let (queue, id) = (opcode % 3, input.byte());
                let mut entry = [0; 64];
                (entry[0], entry[40], entry[42]) = (8, queue, id);
                guest.submit(0, &[entry]);
            }
            1 | 2 => guest.segment(&mut input),
            3 => {
                guest.controller.poll();
            }
            _ => {
                let opcode = IO[usize::from(opcode) % IO.len()].0;
                let entry = guest.entry(opcode, 1, &mut input);
                // A write of the same blocks makes a pair that may fit.
                let mut second = entry;
                (second[0], second[1]) = (NvmOpcode::Write.0, entry[1] & 0xc0 | 2);
                let count = if entry[1] & 3 == 1 { 2 } else { 1 };
                guest.submit(1 + queue % 2, &[entry, second][..count]);
            }
        }
    }
    guest.drain();
}

/// Walks data pointers. Whatever they are, the walk must end, and give exactly the bytes that were
/// asked for or a status.
///
/// # Panics
/// When the walk has a defect.
pub fn pointers(data: &[u8]) {
    let mut input = Input(data);
    let memory = Memory::heap(1 << 16);
    let mut entry = SubmissionEntry { flags: input.byte(), ..SubmissionEntry::default() };
    entry.prp1.set(input.address());
    entry.prp2.set(input.address());
    if entry.data_pointer_type() > 0 {
        let [length, kind, _, _] = input.take();
        let length = u32::from(length) * 4;
        entry =
            entry.with_sgl(SglDescriptor::new(DescriptorType(kind & 15), entry.prp1.get(), length));
    }
    let len = usize::from(u16::from_le_bytes(input.take())) * 16 + 1;
    let page = 4096 << (input.byte() % 5);
    // The rest of the input is repeated through memory, so that pointers find it.
    for at in 0..if input.0.is_empty() { 0 } else { (1 << 16) / input.0.len() } {
        let _ = memory.write((at * input.0.len()) as u64, input.0);
    }
    let mut walker = Walker::default();
    match walker.find(&memory, page, &entry, len) {
        Ok(()) => assert_eq!(walker.runs.iter().map(|run| run.len).sum::<usize>(), len),
        Err(status) => assert!(!status.is_success()),
    }
    assert!(walker.runs.iter().all(|run| run.len > 0));
}

/// Admin opcodes beside those that every controller supports: one that this controller supports,
/// and two that none supports.
const MORE_ADMIN: [AdminOpcode; 3] =
    [AdminOpcode::DoorbellBufferConfig, AdminOpcode::FormatNvm, AdminOpcode(0xff)];

/// I/O opcodes: all that the controller supports, and one (0x04) that it does not.
const IO: [NvmOpcode; 9] = [
    NvmOpcode::Flush,
    NvmOpcode::Write,
    NvmOpcode::Read,
    NvmOpcode::Compare,
    NvmOpcode::WriteZeroes,
    NvmOpcode::DatasetManagement,
    NvmOpcode::Verify,
    NvmOpcode::Copy,
    NvmOpcode(0x04),
];

struct FuzzedController {
    memory: Memory,
    controller: Controller,
    clock: ManualClock,
}

/// Interprets `data` as register accesses, memory pokes, commands, polls, resets and moves of the
/// saved state to a fresh controller. It must return; nothing else is checked.
///
/// # Panics
/// When the controller has a defect.
pub fn fuzz(data: &[u8]) {
    let mut input = Input(data);
    let mut guest = FuzzedController::new();
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
    let limits =
        Limits { queue_pairs: 4, queue_entries: 16, transfer: 1 << 16, in_flight: 64, lanes: 1 };
    let parts = Parts {
        memory: memory.clone(),
        interrupts: FifoSink::new().interrupts(4),
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

impl FuzzedController {
    fn new() -> Self {
        let (memory, clock) = (Memory::heap(MEMORY), ManualClock::new());
        let controller = make(&memory, &clock);
        Self { memory, controller, clock }
    }

    /// Makes admin queues at pages 0 and 1, which nearly every input needs first.
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
        entry[1] = input.byte();
        entry[2] = input.byte();
        entry[4] = input.byte() % 4;
        entry[24..27].copy_from_slice(&input.take::<3>());
        entry[32..35].copy_from_slice(&input.take::<3>());
        entry[40..48].copy_from_slice(&input.take::<8>());
        entry[48..52].copy_from_slice(&input.take::<4>());
        let _ = self.memory.write(queue + slot, &entry);
    }

    /// Returns an entry with plausible fields.
    fn entry(&mut self, opcode: u8, nsid: u8, input: &mut Input<'_>) -> [u8; 64] {
        let mut entry = [0; 64];
        let [flags, id, namespace, kind] = input.take();
        (entry[0], entry[2], entry[4]) = (opcode, id, nsid);
        if namespace > 0xf0 {
            entry[4..8].fill(namespace << 4);
        }
        // FUSE and PSDT; mostly none.
        entry[1] = if flags < 0x80 { 0 } else { flags & 0xc3 };
        entry[24..32].copy_from_slice(&input.address().to_le_bytes());
        entry[32..40].copy_from_slice(&input.address().to_le_bytes());
        if entry[1] >> 6 > 0 {
            entry[36..39].fill(0);
            entry[39] = kind & 0x3f;
        }
        let [cdw10, cdw10_high, cdw11, cdw11_high, cdw12, cdw12_high] = input.take();
        (entry[40], entry[42]) = (cdw10, cdw10_high);
        (entry[44], entry[46], entry[48], entry[51]) = (cdw11, cdw11_high, cdw12, cdw12_high);
        entry
    }

    /// Puts entries where queue `queue` is looked at next, rings once, polls, and takes the
    /// completions.
    fn submit(&mut self, queue: u8, entries: &[[u8; 64]]) {
        let id = u16::from(queue);
        let Some((submission, completion)) = self.controller.home.engine.queues.pair(id) else {
            return;
        };
        let (base, size, mut tail) = (submission.base, submission.size, submission.tail);
        let (taken, head) = (completion.tail, completion.id);
        for entry in entries {
            let at = base.wrapping_add(u64::from(tail) * 64);
            let _ = self.memory.write(at, entry);
            tail = (tail + 1) % size;
        }
        self.write32(offset::DOORBELLS + 4 * head_doorbell(head) as u64, taken);
        self.write32(offset::DOORBELLS + 4 * tail_doorbell(id) as u64, tail);
        self.controller.poll();
    }

    /// Writes some SGL descriptors or PRPs.
    fn segment(&mut self, input: &mut Input<'_>) {
        let mut at = input.address();
        for _ in 0..input.byte() % 5 {
            let (address, [length, kind]) = (input.address(), input.take());
            let descriptor =
                SglDescriptor::new(DescriptorType(kind >> 4), address, u32::from(length) * 16);
            let _ = self.memory.write(at, descriptor.as_bytes());
            at = at.wrapping_add(16);
        }
    }

    fn config(&mut self, input: &mut Input<'_>) {
        let at = u16::from_le_bytes(input.take()) & 0xfff;
        self.controller.config_write(at, &input.take::<4>());
        self.controller.config_read(at, &mut [0; 4]);
    }

    /// Saves, and restores into a fresh controller. The controller must accept an undamaged state;
    /// it may refuse a damaged one, but must not trust it.
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

    /// Makes a change that the host may make at any moment: a namespace leaves and comes back, or
    /// its size is looked at. Afterwards the namespaces are the same as before, since the next
    /// controller must have the same ones.
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
        // A Copy of 128 ranges takes two steps for each.
        for _ in 0..512 {
            self.controller.poll();
        }
        assert_eq!(self.controller.requests_in_flight(), 0);
    }
}
