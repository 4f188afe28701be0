//! The floor: a queue pair in shared memory, the copy, and nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use slipway_load::native::bell::Bell;
use slipway_load::native::controller::BASE;
use slipway_load::native::load::{self, Lane, Taker};
use slipway_load::native::{Cpus, pin};
use slipway_nvme::driver::PinnedPair;
use slipway_nvme_spec::command::{
    COMPLETION_ENTRY, CompletionEntry, SUBMISSION_ENTRY, SubmissionEntry,
};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::registers::tail_doorbell;
use slipway_ram::{Access, Memory, Span};
use slipway_vfio_user_client::TestGuest;
use zerocopy::{FromZeros, IntoBytes};

use crate::block::{Measured, Subject, Workload};

/// Bytes of a logical block.
const BLOCK: u32 = 512;

/// Our driver on a queue pair whose other end is a thread of this process. That thread polls the
/// tail, copies 64 bytes of command and the data, and writes 16 bytes of completion. It makes no
/// checks and supports no PRP lists (buffers are contiguous), no further queues, no sleep and no
/// interrupts. A target's additional cost is the target's own.
pub struct Bare {
    cpus: Cpus,
    disk: Vec<u8>,
}

impl Bare {
    /// Makes a floor with a disk of `disk_bytes`, filled.
    pub fn new(disk_bytes: u64, cpus: Cpus) -> Self {
        let mut disk = Vec::with_capacity(disk_bytes as usize);
        huge_pages(&mut disk);
        let words = (0..disk_bytes / 8).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        disk.extend(words.flat_map(u64::to_le_bytes));
        Self { cpus, disk }
    }
}

/// Asks for huge pages behind the future contents of `disk`, as a RAM disk does: the floor must not
/// be slower without them. This is a hint, so errors do not matter.
#[allow(unsafe_code)]
fn huge_pages(disk: &mut Vec<u8>) {
    let spare = disk.spare_capacity_mut();
    let address = spare.as_mut_ptr();
    let start = address.align_offset(rustix::param::page_size());
    let Some(len) = spare.len().checked_sub(start) else { return };
    // SAFETY: the range lies inside the vector's own memory, on a page's border; the advice changes
    // no content.
    let _ = unsafe {
        let first = address.add(start).cast();
        rustix::mm::madvise(first, len, rustix::mm::Advice::LinuxHugepage)
    };
}

/// The other end of one queue pair.
struct Queue {
    id: u16,
    submission: usize,
    completion: usize,
    entries: u32,
    head: u32,
    phase: bool,
}

impl Queue {
    /// Executes the submitted commands. Returns whether there were any.
    fn serve(&mut self, cells: &[AtomicU32], memory: &Span, disk: &mut [u8]) -> Result<bool> {
        let tail = cells[tail_doorbell(self.id)].load(Ordering::Acquire);
        if tail == self.head {
            return Ok(false);
        }
        while self.head != tail {
            let mut command = SubmissionEntry::new_zeroed();
            let at = self.submission + self.head as usize * SUBMISSION_ENTRY;
            memory.read(at, command.as_mut_bytes())?;
            let from = command.starting_lba() as usize * BLOCK as usize;
            let place = &mut disk[from..from + command.block_count() as usize * BLOCK as usize];
            let buffer = (command.prp1.get() - BASE) as usize;
            if command.opcode == NvmOpcode::Read.0 {
                memory.write(buffer, place)?;
            } else {
                memory.read(buffer, place)?;
            }
            // The phase tag of each slot is inverted in each round.
            let word = u32::from(command.id.get()) | u32::from(self.phase) << 16;
            let at = self.completion + self.head as usize * COMPLETION_ENTRY;
            memory.store_u32(at + CompletionEntry::PHASE_DWORD, word)?;
            self.head += 1;
            if self.head == self.entries {
                self.head = 0;
                self.phase = !self.phase;
            }
        }
        Ok(true)
    }
}

/// The memory and the queues of a load, and the queues' other ends.
struct Layout {
    memory: Memory,
    len: u64,
    cells: Arc<[AtomicU32]>,
    lanes: Vec<Lane>,
    queues: Vec<Queue>,
}

impl Layout {
    fn new(workload: &Workload) -> Result<Self> {
        let page = |bytes: u64| bytes.next_multiple_of(4096);
        let entries = (workload.depth + 1).next_power_of_two().max(16);
        let submission = page(u64::from(entries) * SUBMISSION_ENTRY as u64);
        let completion = page(u64::from(entries) * COMPLETION_ENTRY as u64);
        let (depth, block) = (u64::from(workload.depth), page(workload.block_size.into()));
        let each = submission + completion + depth * block;
        let len = each * u64::from(workload.threads);
        let memory = TestGuest::new(BASE, len)?.memory;
        let count = tail_doorbell(workload.threads as u16 + 1);
        let cells: Arc<[AtomicU32]> = (0..count).map(|_| AtomicU32::new(0)).collect();
        let (mut lanes, mut queues) = (Vec::new(), Vec::new());
        for (id, start) in (1..=workload.threads as u16).zip((0..).step_by(each as usize)) {
            let places = (BASE + start, BASE + start + submission);
            let data = places.1 + completion;
            let blocks = workload.block_size / BLOCK;
            let command = |slot: u64| {
                let mut command = slipway_nvme::driver::io(NvmOpcode::Read, 1, 0, blocks);
                command.id.set(slot as u16);
                command.prp1.set(data + slot * block);
                command
            };
            // The pages are allocated before anything is timed.
            memory.write(BASE + start, &vec![0; each as usize])?;
            let pair = PinnedPair::new(id, entries, places, &memory)?;
            let bell = Bell::Cells(cells.clone());
            lanes.push(Lane { pair, bell, commands: (0..depth).map(command).collect() });
            let (submission, completion) = (start as usize, (start + submission) as usize);
            queues.push(Queue { id, submission, completion, entries, head: 0, phase: true });
        }
        Ok(Self { memory, len, cells, lanes, queues })
    }
}

impl Subject for Bare {
    fn name(&self) -> &str {
        "bare"
    }

    fn about(&self) -> String {
        "the floor: our driver on a queue pair in shared memory, the copy and nothing else".into()
    }

    fn run(&mut self, workload: &Workload, warm_up: Duration, time: Duration) -> Result<Measured> {
        let Layout { memory, len, cells, lanes, mut queues } = Layout::new(workload)?;
        let mut spans = Vec::new();
        memory.pin(BASE, len as usize, Access::Write, &mut spans)?;
        let memory = spans.pop().context("the memory is not there")?;
        let (stop, disk, cpus) = (AtomicBool::new(false), &mut self.disk, &self.cpus);
        let blocks = disk.len() as u64 / u64::from(BLOCK);
        std::thread::scope(|scope| {
            let server = std::thread::Builder::new().name("bare".into());
            let server = server.spawn_scoped(scope, || -> Result<()> {
                pin(&cpus.target)?;
                while !stop.load(Ordering::Relaxed) {
                    for queue in &mut queues {
                        if !queue.serve(&cells, &memory, disk)? {
                            std::hint::spin_loop();
                        }
                    }
                }
                Ok(())
            })?;
            let taker = Taker { cpus, blocks, block_size: BLOCK, pid: None };
            let loaded = load::run(lanes, &taker, workload, warm_up, time);
            stop.store(true, Ordering::Relaxed);
            server.join().map_err(|_| anyhow::anyhow!("the floor panicked"))??;
            Ok(loaded?.1)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_takes_every_pattern() {
        let cpus = Cpus::split(1).unwrap();
        let mut bare = Bare::new(4 << 20, cpus);
        let before = bare.disk.clone();
        let time = Duration::from_millis(20);
        for name in ["randread-4k-d1", "read-128k-d4", "randrw-512-d32-t2", "write-4k-d40"] {
            let workload: Workload = name.parse().unwrap();
            let measured = bare.run(&workload, Duration::ZERO, time).unwrap();
            // Even on a heavily loaded machine a few commands end.
            assert!(measured.latency.count() > 0, "{name}");
            let bytes = measured.latency.count() * u64::from(workload.block_size);
            assert_eq!(measured.bytes, bytes);
            assert!(measured.elapsed_ns >= 20_000_000);
        }
        assert!(bare.disk != before, "writes reach the disk");
    }
}
