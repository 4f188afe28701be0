//! The parts of a sandbox's memory that lie with the keeper.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use slipway_keeper::{Keeper, Shelf};
use slipway_numa::NumaNode;
use slipway_pool_spec::Range;
use slipway_ram::{Lasting, LateMemory};

use crate::templates::Templates;
use crate::userfault::Userfault;

/// The number of the keeper's slots for one sandbox's memory.
pub const SLOTS: u32 = 8;
const FILE: u32 = 0;
const TABLE: u32 = 1;
const FAULTS: u32 = 2;
const CONNECTION: u32 = 3;
const RANGES: u32 = 4;
const TEMPLATE: u32 = 5;

/// First word of the ranges: their layout.
const LAYOUT: u64 = u64::from_be_bytes(*b"slipmem1");

/// The keeper's slots for the memory of sandboxes. Clones share them.
#[derive(Clone)]
pub struct Shelves {
    keeper: Arc<Keeper>,
    slots: std::ops::Range<u32>,
    taken: Arc<Mutex<BTreeSet<u32>>>,
}

/// The parts of a sandbox's memory that a predecessor left.
pub struct Left {
    /// The number of its place.
    pub number: u32,
    /// Descriptors by slot.
    pub files: BTreeMap<u32, OwnedFd>,
}

/// The keeper's slots for one sandbox's memory. Dropping it clears and frees them.
pub(crate) struct ShelfPlace {
    number: u32,
    shelf: Shelf,
    all: Shelves,
}

impl Shelves {
    /// Uses the slots `slots` of `keeper`.
    pub fn new(keeper: Arc<Keeper>, slots: std::ops::Range<u32>) -> Self {
        Self { keeper, slots, taken: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        // Changed in single calls: a panic leaves it consistent.
        self.taken.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns a free place.
    pub(crate) fn place(&self) -> Option<ShelfPlace> {
        let mut taken = self.lock();
        let number = (0..self.slots.len() as u32 / SLOTS).find(|one| !taken.contains(one))?;
        taken.insert(number);
        drop(taken);
        Some(self.at(number))
    }

    /// Returns the place that a predecessor used.
    pub(crate) fn used(&self, number: u32) -> ShelfPlace {
        self.lock().insert(number);
        self.at(number)
    }

    fn at(&self, number: u32) -> ShelfPlace {
        let start = self.slots.start + number * SLOTS;
        let shelf = Shelf::new(self.keeper.clone(), start..start + SLOTS);
        ShelfPlace { number, shelf, all: self.clone() }
    }
}

impl Drop for ShelfPlace {
    fn drop(&mut self) {
        // An error means that the keeper is gone, and then it holds nothing.
        let _ = self.shelf.clear_all();
        self.all.lock().remove(&self.number);
    }
}

impl ShelfPlace {
    /// Leaves everything that a successor needs with the keeper. The userfaultfd last: the keeper's
    /// place is complete when it is there.
    pub(crate) fn put(
        &self,
        memory: &LateMemory,
        connection: impl AsFd,
        faults: &Userfault,
        ranges: &[Range],
    ) -> std::io::Result<()> {
        let parts = ranges.iter().flat_map(|one| [one.address, one.len, one.offset]);
        let kept = Lasting::new("slipway-ranges", (4 + 3 * ranges.len()) * 8)?;
        let words = [LAYOUT, ranges.len() as u64].into_iter().chain(parts);
        let fork = u64::from(memory.template().is_some());
        let words = words.chain([home_word(memory.home()), fork]);
        for (word, value) in kept.words().iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        if let Some(template) = memory.template() {
            self.shelf.put(TEMPLATE, template.file())?;
        }
        self.shelf.put(FILE, memory.file())?;
        self.shelf.put(TABLE, memory.table()?)?;
        self.shelf.put(CONNECTION, connection)?;
        let ranges = kept.file().ok_or(std::io::ErrorKind::Unsupported)?;
        self.shelf.put(RANGES, ranges)?;
        self.shelf.put(FAULTS, faults)
    }
}

/// The parts that a predecessor left.
pub(crate) struct Parts {
    pub(crate) memory: LateMemory,
    pub(crate) connection: OwnedFd,
    pub(crate) faults: Userfault,
    pub(crate) ranges: Vec<Range>,
    /// The NUMA node of the pages, if there is one.
    pub(crate) home: Option<NumaNode>,
}

impl Left {
    /// Returns whether the faults are there, which are left last.
    pub(crate) fn has_faults(&self) -> bool {
        self.files.contains_key(&FAULTS)
    }

    /// Takes the parts.
    ///
    /// # Errors
    /// One is missing or has another layout.
    pub(crate) fn take_apart(mut self, templates: &Templates) -> std::io::Result<Parts> {
        let mut part = |slot| {
            self.files.remove(&slot).ok_or_else(|| std::io::Error::other("a part was not kept"))
        };
        let faults = Userfault::of_peer(part(FAULTS)?)?;
        let (file, table) = (part(FILE)?, part(TABLE)?);
        let (connection, kept) = (part(CONNECTION)?, Lasting::of(part(RANGES)?)?);
        let words: Vec<u64> =
            kept.words().iter().map(|word| word.load(Ordering::Relaxed)).collect();
        let Words { ranges, home, fork } =
            parse(&words).ok_or_else(|| std::io::Error::other("another layout"))?;
        // Without its template such memory would be shown as zeros.
        let template = match fork {
            true => Some(templates.of_predecessor(part(TEMPLATE)?)?),
            false => None,
        };
        let memory = LateMemory::of_predecessor(file, table, template)?;
        Ok(Parts { memory, connection, faults, ranges, home })
    }
}

/// The words that a predecessor left.
#[derive(Debug, PartialEq, Eq)]
struct Words {
    ranges: Vec<Range>,
    home: Option<NumaNode>,
    /// Set if the memory began as a template.
    fork: bool,
}

/// Returns what a predecessor left, or `None` if the words have another layout.
fn parse(words: &[u64]) -> Option<Words> {
    let (&[LAYOUT, count], rest) = words.split_first_chunk()? else { return None };
    let (ranges, rest) = rest.split_at_checked(usize::try_from(count).ok()?.checked_mul(3)?)?;
    let range = |&[address, len, offset]: &[u64; 3]| Range { address, len, offset };
    let ranges = ranges.as_chunks().0.iter().map(range).collect();
    let home = rest.first().copied().unwrap_or(0).checked_sub(1).and_then(NumaNode::new);
    let fork = match rest.get(1) {
        None | Some(0) => false,
        Some(1) => true,
        Some(_) => return None,
    };
    Some(Words { ranges, home, fork })
}

/// Returns the word that stands for the home of memory: its number plus 1, or 0 if there is none.
/// It lies behind the ranges, where the pages of a predecessor that knew no homes have zeros, and
/// before the word for a template, where those that knew no templates have zeros.
fn home_word(home: Option<NumaNode>) -> u64 {
    home.map_or(0, |home| u64::from(home.number()) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(address: u64) -> Range {
        Range { address, len: 8192, offset: 4096 }
    }

    #[test]
    fn ranges_are_read_with_a_home_and_without() {
        let words = |behind: &[u64]| [&[LAYOUT, 2, 1, 8192, 4096, 2, 8192, 4096], behind].concat();
        let expected = |home, fork| Some(Words { ranges: vec![range(1), range(2)], home, fork });
        let (home, none) = (NumaNode::new(0), None);
        for (behind, home, fork) in [
            (&[][..], none, false),
            (&[0, 0], none, false),
            (&[1, 0], home, false),
            (&[1, 1, 0], home, true),
            (&[0, 1], none, true),
        ] {
            assert_eq!(parse(&words(behind)), expected(home, fork), "{behind:?}");
        }
        for number in [0, 1023] {
            let home = NumaNode::new(number);
            assert_eq!(parse(&words(&[home_word(home)])), expected(home, false));
        }
        assert_eq!(parse(&words(&[u64::MAX])), expected(None, false));
    }

    #[test]
    fn words_of_another_layout_are_refused() {
        for words in [
            &[][..],
            &[LAYOUT],
            &[LAYOUT ^ 1, 0, 0],
            &[LAYOUT, 2, 1, 8192, 4096, 2, 8192],
            &[LAYOUT, u64::MAX, 0],
            &[LAYOUT, u64::MAX / 3 + 1, 0],
            &[LAYOUT, 0, 0, 2],
        ] {
            assert_eq!(parse(words), None, "{words:?}");
        }
    }
}
