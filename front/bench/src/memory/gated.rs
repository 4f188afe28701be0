//! Memory that a device accesses: of the pool, all of it clean, and other memory. All subjects have
//! the same pages, since an access to some pages takes longer than to others.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::fs::{MemfdFlags, SealFlags};
use slipway_peer::Bin;
use slipway_ram::{Access, DmaMap, LateMemory, Memory, Permissions, Region, Span, View};

use super::{MemoryLoad, MemoryMeasured, Operation};
use crate::block::native::{Cpus, pinned};
use crate::measurement::Subject;

/// The size of the memory in bytes.
const LEN: usize = 64 << 20;
/// The bytes of a disk's request.
const BLOCK: usize = 4096;
/// The most bytes of one access.
const MOST: usize = 128 << 10;
/// The number of accesses between two looks at the clock.
const BATCH: u64 = 10_000;
/// The same for accesses that copy [`MOST`] bytes.
const STREAM_BATCH: u64 = 1_000;
/// The accesses of a turn: so many batches, after one that is not measured.
const BATCHES: u64 = 20;

/// The gate before a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// Memory that is not the pool's.
    Absent,
    /// Memory of the pool, which may still zero some of it, so that each access looks at the
    /// table.
    Closed,
    /// Memory of the pool, all of which was given: no access looks at the table any more.
    Open,
}

/// Memory of which every page is there and clean, and a device's accesses to it.
pub struct Gated {
    name: &'static str,
    about: String,
    cpus: Cpus,
    memory: Memory,
    /// The map that `memory` is a view of.
    _map: DmaMap,
}

impl Gated {
    /// Makes the file of the pages that the subjects of a run share.
    ///
    /// # Errors
    /// The host has no memory left.
    pub fn pages() -> Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("slipway-bench", flags).context("a file in memory")?;
        rustix::fs::ftruncate(&file, LEN as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(file)
    }

    /// Maps the `pages` of [`Gated::pages`], and touches all of them. Accesses run on the client's
    /// processors of `cpus`.
    ///
    /// # Errors
    /// The host has no memory left.
    pub fn new(
        (name, about): (&'static str, &str),
        gate: Gate,
        pages: &OwnedFd,
        cpus: &Cpus,
    ) -> Result<Self> {
        let mut map = DmaMap::new();
        map.add(0, region(gate, pages)?)?;
        let memory = map.memory();
        memory.write(0, &vec![1; LEN])?;
        Ok(Self { name, about: about.to_owned(), cpus: cpus.clone(), memory, _map: map })
    }

    fn turn(&self, operation: Operation) -> Result<MemoryMeasured> {
        let mut device = Device::new(&self.memory);
        let mut elapsed = Duration::ZERO;
        let each = if operation == Operation::Stream { STREAM_BATCH } else { BATCH };
        for batch in 0..=BATCHES {
            let began = Instant::now();
            for number in batch * each..(batch + 1) * each {
                let at = match operation {
                    Operation::Stream => number * MOST as u64 % LEN as u64,
                    // Whole pages apart, as requests of a guest are.
                    _ => (number * 4096 * 37) % (LEN - MOST) as u64,
                };
                device.access(operation, at)?;
            }
            if batch > 0 {
                elapsed += began.elapsed();
            }
        }
        let elapsed_ns = elapsed.as_nanos() as u64;
        Ok(MemoryMeasured::Accessed { count: BATCHES * each, elapsed_ns })
    }
}

fn region(gate: Gate, pages: &OwnedFd) -> Result<Region> {
    let len = LEN as u64;
    if gate == Gate::Absent {
        let region = Region::mapped(pages.as_fd(), 0, len, Permissions::READ_WRITE);
        return region.context("mapping memory");
    }
    // The table of a pool's memory is the subject's own.
    let late = Arc::new(LateMemory::new(pages.try_clone()?).context("memory of a pool")?);
    let region = Region::late(&late, 0, len, Permissions::READ_WRITE, &Bin::new());
    let region = region.context("mapping memory of a pool")?;
    if gate == Gate::Open {
        late.take_all().map_err(|_| anyhow!("memory that nobody else has is busy"))?;
    }
    Ok(region)
}

/// A device's view of memory, and its own buffers.
struct Device<'a> {
    memory: &'a Memory,
    view: View,
    spans: Vec<Span>,
    block: [u8; BLOCK],
    piece: Vec<u8>,
}

impl<'a> Device<'a> {
    fn new(memory: &'a Memory) -> Self {
        Self {
            memory,
            view: View::new(memory.clone()),
            spans: Vec::new(),
            block: [0; BLOCK],
            piece: vec![0; MOST],
        }
    }

    fn access(&mut self, operation: Operation, at: u64) -> Result<()> {
        match operation {
            Operation::Block => {
                self.pin(at, BLOCK)?;
                let span = self.spans.first().context("a block is one span")?;
                span.read(0, &mut self.block)?;
            }
            Operation::Pin => self.pin(at, MOST)?,
            Operation::Word => self.memory.store_u32(at, 7)?,
            Operation::Stream => self.memory.read(at, &mut self.piece)?,
        }
        Ok(())
    }

    fn pin(&mut self, at: u64, len: usize) -> Result<()> {
        Ok(self.view.pin([(at, len)].into_iter(), Access::Read, &mut self.spans)?)
    }
}

impl Subject for Gated {
    type Load = MemoryLoad;
    type Measured = MemoryMeasured;

    fn name(&self) -> &str {
        self.name
    }

    fn about(&self) -> String {
        self.about.clone()
    }

    fn takes(&self, load: &MemoryLoad) -> bool {
        matches!(load, MemoryLoad::Gate(_))
    }

    fn run(&mut self, load: &MemoryLoad) -> Result<MemoryMeasured> {
        let MemoryLoad::Gate(operation) = *load else { bail!("{load} is a sandbox's load") };
        pinned(&self.cpus.client, || self.turn(operation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gate_and_access_is_measured() {
        let (cpus, pages) = (Cpus::split(1).unwrap(), Gated::pages().unwrap());
        for gate in [Gate::Absent, Gate::Closed, Gate::Open] {
            let mut gated = Gated::new(("name", "about"), gate, &pages, &cpus).unwrap();
            for load in ["gate-block", "gate-pin", "gate-word", "gate-stream"] {
                match gated.run(&load.parse().unwrap()).unwrap() {
                    MemoryMeasured::Accessed { count, elapsed_ns } => {
                        assert!(count > 0 && elapsed_ns > 0, "{gate:?} {load}");
                    }
                    other => panic!("{other:?}"),
                }
            }
            assert!(gated.run(&"16M-4k".parse().unwrap()).is_err());
        }
    }
}
