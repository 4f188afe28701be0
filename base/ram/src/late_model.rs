//! A model of late memory: bytes that are zero, or those of a template, when a user begins.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags};
use slipway_peer::Bin;

use crate::{Access, DmaMap, GRANULE, LateMemory, Permissions, Region, Span, Template};

const GRANULES: usize = 4;
const LEN: usize = GRANULES * GRANULE;

/// A user of late memory and what it must see.
struct Model {
    memory: Arc<LateMemory>,
    map: DmaMap,
    bytes: Vec<u8>,
}

/// Reads `data` as a list of accesses, of zeroing ahead, of faults, of pages that are given back,
/// and of changes of user, and compares every byte that is read with the model. The first byte
/// tells whether the memory is recycled or begins as a template.
pub fn late_memory(data: &[u8]) {
    let model = match data.first() {
        Some(first) if first % 2 == 1 => template().and_then(|template| Model::fork(&template)),
        _ => recycled(),
    };
    let Some(mut model) = model else { return };
    for step in data.chunks_exact(6) {
        let at = (usize::from(u16::from_le_bytes([step[1], step[2]])) * 4) % LEN;
        let len = usize::from(u16::from_le_bytes([step[3], step[4]])).min(LEN - at);
        match step[0] % 10 {
            0 | 1 => model.write(at, len, step[5]),
            2 => model.read(at, len),
            3 => model.pin(at, len),
            4 => model.word(at & !3, step[5]),
            5 => drop(model.memory.zero_ahead(usize::from(step[5]) % GRANULES)),
            6 => model.fault(at, step[5]),
            7 => assert_eq!(model.memory.take_all(), Ok(())),
            8 => model.give_back(at, len),
            _ => match model.next() {
                Some(next) => model = next,
                None => return,
            },
        }
    }
}

/// Makes a file in memory of `len` bytes without pages.
fn file(len: usize) -> Option<OwnedFd> {
    let file = rustix::fs::memfd_create("late", MemfdFlags::CLOEXEC).ok()?;
    rustix::fs::ftruncate(&file, len as u64).ok()?;
    Some(file)
}

fn recycled() -> Option<Model> {
    Model::of(LateMemory::new(file(LEN)?).ok()?, vec![0; LEN])
}

/// Makes a template whose pages have a byte each, in turn with holes.
fn template() -> Option<Arc<Template>> {
    let file = file(LEN)?;
    for page in (0..LEN / Template::GRANULE).filter(|page| page % 3 != 0) {
        let at = (page * Template::GRANULE) as u64;
        rustix::io::pwrite(&file, &[page as u8 | 1; Template::GRANULE], at).ok()?;
    }
    Some(Arc::new(Template::copy_of(file.as_fd()).ok()?))
}

impl Model {
    fn of(memory: LateMemory, bytes: Vec<u8>) -> Option<Self> {
        let (memory, mut map) = (Arc::new(memory), DmaMap::new());
        let both = Permissions::READ_WRITE;
        map.add(0, Region::late(&memory, 0, LEN as u64, both, &Bin::new()).ok()?).ok()?;
        Some(Self { memory, map, bytes })
    }

    fn fork(template: &Arc<Template>) -> Option<Self> {
        let mut bytes = vec![0; LEN];
        rustix::io::pread(template.file(), &mut bytes, 0).ok()?;
        Self::of(LateMemory::fork(file(LEN)?, template).ok()?, bytes)
    }

    /// The user ends and another one begins: of a fork, one that begins with what the former left.
    fn next(&mut self) -> Option<Self> {
        if self.memory.template().is_some() {
            let template = Arc::new(self.memory.freeze().ok()?);
            let next = Self::fork(&template)?;
            assert!(next.bytes == self.bytes, "the template of a fork");
            return Some(next);
        }
        self.map.clear();
        let memory = std::mem::replace(&mut self.memory, Arc::new(dead()?));
        let mut memory = Arc::into_inner(memory)?;
        memory.recycle().ok()?;
        Self::of(memory, vec![0; LEN])
    }

    fn write(&mut self, at: usize, len: usize, value: u8) {
        self.bytes[at..at + len].fill(value);
        assert_eq!(self.map.memory().write(at as u64, &self.bytes[at..at + len]), Ok(()));
    }

    fn read(&self, at: usize, len: usize) {
        let mut bytes = vec![0xee; len];
        assert_eq!(self.map.memory().read(at as u64, &mut bytes), Ok(()));
        assert!(bytes == self.bytes[at..at + len], "read {at:#x}+{len:#x}");
    }

    fn pin(&self, at: usize, len: usize) {
        let mut spans = Vec::new();
        assert_eq!(self.map.memory().pin(at as u64, len, Access::Write, &mut spans), Ok(()));
        let mut bytes = vec![0xee; len];
        let read = spans.first().map_or(Ok(()), |span| span.read(0, &mut bytes));
        assert!(read.is_ok() && bytes == self.bytes[at..at + len], "pin {at:#x}+{len:#x}");
    }

    fn word(&mut self, at: usize, value: u8) {
        let memory = self.map.memory();
        let held: [u8; 4] = self.bytes[at..at + 4].try_into().unwrap_or_default();
        assert_eq!(memory.load_u32(at as u64), Ok(u32::from_le_bytes(held)));
        self.bytes[at..at + 4].fill(value);
        assert_eq!(memory.store_u32(at as u64, u32::from_ne_bytes([value; 4])), Ok(()));
    }

    /// The user's process gives the whole pages of a range back, if they are its own and no pool's:
    /// those that were taken are zeros from then on, and the others are the template's still.
    fn give_back(&mut self, at: usize, len: usize) {
        let unit = Template::GRANULE;
        let range = at.next_multiple_of(unit)..(at + len) / unit * unit;
        if self.memory.template().is_none() || range.is_empty() {
            return;
        }
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (start, bytes) = (range.start as u64, range.len() as u64);
        assert_eq!(rustix::fs::fallocate(self.memory.file(), hole, start, bytes), Ok(()));
        for page in range.step_by(unit).filter(|page| self.memory.is_taken(*page, unit)) {
            self.bytes[page..page + unit].fill(0);
        }
    }

    /// The user's process touches a byte: its fault is served, and it writes.
    fn fault(&mut self, at: usize, value: u8) {
        let unit = self.memory.granule();
        let granule = at / unit * unit;
        assert_eq!(self.memory.take(granule, unit), Ok(()));
        let mut bytes = vec![0; unit];
        let Ok(its) = Span::file(self.memory.file(), 0, LEN) else { return };
        assert_eq!(its.read(granule, &mut bytes), Ok(()));
        assert!(bytes == self.bytes[granule..granule + unit], "fault {at:#x}");
        self.bytes[at] = value;
        assert_eq!(its.write(at, &[value]), Ok(()));
    }
}

/// Memory in the place of what is taken out of a model that ends.
fn dead() -> Option<LateMemory> {
    LateMemory::new(file(GRANULE)?).ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn late_memory_equals_its_model() {
        for data in crate::fuzz::inputs(11, 1200).take(20) {
            for first in [0, 1] {
                super::late_memory(&[&[first], &data[1..]].concat());
            }
        }
    }
}
