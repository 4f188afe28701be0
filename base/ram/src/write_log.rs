//! The pages of a mapping that this process has written to.
//!
//! A writer stores its bytes and then sets the page's bit. A reader takes the bits, and then copies
//! the pages. So a page whose copy may be older than a write has its bit set again by that write,
//! and is copied again in the next round. A page that a system call writes to has its bit from the
//! beginning of the call, so no such call may be in flight while bits are taken.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The size in bytes of the pages whose writes are noted.
pub const PAGE: usize = 4096;
/// The words of a chunk: one stands for 128 MiB.
const WORDS: usize = 512;

/// Returns the numbers of the pages whose bits are set, ascending.
pub fn bits(words: &[u64]) -> impl Iterator<Item = usize> {
    let of = |(number, word): (usize, &u64)| {
        let mut rest = *word;
        std::iter::from_fn(move || {
            let bit = (rest != 0).then(|| rest.trailing_zeros() as usize)?;
            rest &= rest - 1;
            Some(number * 64 + bit)
        })
    };
    words.iter().enumerate().flat_map(of)
}

/// A bit for each page of a mapping. Without a log that was begun it has no bits.
#[derive(Default)]
pub(crate) struct WriteLog {
    on: AtomicBool,
    /// Made when the first log begins, and kept.
    bits: OnceLock<Bits>,
}

/// The bits of a mapping. The client chooses how large the mapping is. So a chunk of 4 KiB of bits
/// is made by the first write to one of its pages, which takes as much of the client's memory.
struct Bits {
    /// The number of words, whether they are there or not.
    words: usize,
    chunks: Box<[Chunk]>,
}

#[derive(Default)]
struct Chunk {
    /// A bit may be set.
    noted: AtomicBool,
    words: OnceLock<Box<[AtomicU64; WORDS]>>,
}

impl Bits {
    fn new(words: usize) -> Self {
        let chunks = (0..words.div_ceil(WORDS)).map(|_| Chunk::default()).collect();
        Self { words, chunks }
    }

    /// Returns a word, unless no page of its chunk was ever written to.
    fn word(&self, number: usize) -> Option<&AtomicU64> {
        self.chunks.get(number / WORDS)?.words.get().map(|words| &words[number % WORDS])
    }
}

impl Chunk {
    fn set(&self, number: usize, mask: u64) {
        let words = self.words.get_or_init(|| Box::new([const { AtomicU64::new(0) }; WORDS]));
        // Pairs with the acquire in `take`: a thread that takes the bit sees the bytes.
        words[number].fetch_or(mask, Ordering::Release);
        if !self.noted.load(Ordering::Relaxed) {
            self.noted.store(true, Ordering::Relaxed);
        }
    }

    /// Clears all bits. A bit that another thread sets meanwhile may stay.
    fn clear(&self) {
        if self.noted.swap(false, Ordering::Relaxed)
            && let Some(words) = self.words.get()
        {
            words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
    }
}

impl WriteLog {
    /// Begins a log of a mapping of `len` bytes, in which no page was written to.
    pub fn begin(&self, len: usize) {
        let bits = self.bits.get_or_init(|| Bits::new(len.div_ceil(PAGE).div_ceil(64)));
        bits.chunks.iter().for_each(Chunk::clear);
        self.on.store(true, Ordering::Release);
    }

    /// Ends the log.
    pub fn end(&self) {
        self.on.store(false, Ordering::Release);
    }

    /// Notes that `len` bytes at `offset` were written.
    #[inline]
    pub fn note(&self, offset: usize, len: usize) {
        // Pairs with the release in `begin`: the words are there.
        if self.on.load(Ordering::Acquire) && len > 0 {
            self.set(offset / PAGE..(offset + len).div_ceil(PAGE));
        }
    }

    #[cold]
    fn set(&self, pages: Range<usize>) {
        let Some(bits) = self.bits.get() else { return };
        for (number, mask) in masks(pages) {
            if number < bits.words
                && let Some(chunk) = bits.chunks.get(number / WORDS)
            {
                chunk.set(number % WORDS, mask);
            }
        }
    }

    /// Adds the bits of `pages` to `into`, and clears them: whole words, or those up to the last
    /// one. Returns `false` if there is no log, or other pages or words than it has.
    pub fn take(&self, pages: Range<usize>, into: &mut [u64]) -> bool {
        let Some(bits) = self.bits.get().filter(|_| self.on.load(Ordering::Acquire)) else {
            return false;
        };
        let (first, last) = (pages.start / 64, pages.end.div_ceil(64));
        let whole = |page: usize| page.is_multiple_of(64);
        let parted = !whole(pages.start) || !whole(pages.end) && last != bits.words;
        if parted || last > bits.words || last.checked_sub(first) != Some(into.len()) {
            return false;
        }
        for (number, into) in (first..last).zip(into) {
            // Most words are 0, and then a load is all.
            if let Some(word) = bits.word(number).filter(|word| word.load(Ordering::Relaxed) != 0) {
                *into |= word.swap(0, Ordering::Acquire);
            }
        }
        true
    }
}

/// Returns the words in which these bits lie, each with its bits.
fn masks(bits: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    (bits.start / 64..bits.end.div_ceil(64)).map(move |number| {
        let from = bits.start.saturating_sub(number * 64).min(63);
        let past = (bits.end - number * 64).min(64);
        (number, u64::MAX << from & u64::MAX >> (64 - past))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Access, DmaMap, Memory, MessageMemory, Region, View};

    const PAGES: usize = 200;

    fn map() -> (DmaMap, Region) {
        let mut map = DmaMap::new();
        map.add(0, Region::heap(PAGES * PAGE)).unwrap();
        let region = map.regions().remove(0).1;
        (map, region)
    }

    /// Takes all bits. Returns the numbers of their pages.
    fn taken(region: &Region) -> Vec<usize> {
        let mut words = [0; PAGES.div_ceil(64)];
        assert!(region.take_written(0..PAGES, &mut words));
        (0..words.len() * 64).filter(|page| words[page / 64] >> (page % 64) & 1 == 1).collect()
    }

    fn at(page: usize) -> u64 {
        (page * PAGE) as u64
    }

    #[test]
    fn each_kind_of_write_is_noted_once_and_reads_are_not() {
        let (map, region) = map();
        let memory = map.memory();
        memory.write(at(9), &[1]).unwrap();
        assert!(region.log_writes());
        memory.read(at(3), &mut [0; 2 * PAGE]).unwrap();
        assert_eq!(taken(&region), [], "what came before is not noted");
        memory.write(at(1) - 1, &[1, 2]).unwrap();
        memory.write(at(5), &[]).unwrap();
        memory.store_u32(at(64), 1).unwrap();
        memory.publish(at(127), 1).unwrap();
        memory.write(at(190), &[7; 5 * PAGE + 1]).unwrap();
        let expected = [0, 1, 64, 127, 190, 191, 192, 193, 194, 195];
        assert_eq!(taken(&region), expected);
        assert_eq!(taken(&region), []);
    }

    #[test]
    fn spans_note_what_they_write_and_what_the_kernel_may() {
        let (map, region) = map();
        let mut spans = Vec::new();
        let mut view = View::new(map.memory());
        view.pin([(at(2), 3 * PAGE)].into_iter(), Access::Write, &mut spans).unwrap();
        let other = crate::Span::heap(PAGE);
        region.log_writes();
        spans[0].write(PAGE, &[1]).unwrap();
        other.copy_to(0, &spans[0], 2 * PAGE, 8).unwrap();
        spans[0].copy_to(0, &other, 0, 8).unwrap();
        spans[0].store_u16(0, 1).unwrap();
        assert_eq!(taken(&region), [2, 3, 4]);
        let _ = spans[0].slice(PAGE, 2 * PAGE).io_vector();
        assert_eq!(taken(&region), [3, 4]);
        region.end_log();
        spans[0].write(0, &[1]).unwrap();
        assert!(!region.take_written(0..PAGES, &mut [0; 4]), "no log");
        region.log_writes();
        assert_eq!(taken(&region), [], "a new log begins without pages");
    }

    #[test]
    fn parts_of_a_log_are_whole_words() {
        let (map, region) = map();
        assert!(!region.take_written(0..64, &mut [0]), "no log");
        region.log_writes();
        map.memory().write(at(64), &[1]).unwrap();
        assert!(!region.take_written(1..64, &mut [0]));
        assert!(!region.take_written(0..63, &mut [0]), "page 63 would be lost");
        assert!(!region.take_written(0..64, &mut [0; 2]));
        assert!(!region.take_written(192..257, &mut [0; 2]), "beyond the end");
        let mut words = [2];
        assert!(region.take_written(0..64, &mut words));
        assert!(region.take_written(64..128, &mut words));
        assert_eq!(words, [3], "bits are added");
    }

    #[test]
    fn message_only_memory_has_no_log() {
        struct Nobody;
        impl MessageMemory for Nobody {
            fn read(&self, iova: u64, _: &mut [u8]) -> Result<(), crate::Fault> {
                Err(crate::Fault::Remote { iova })
            }
            fn write(&self, iova: u64, _: &[u8]) -> Result<(), crate::Fault> {
                Err(crate::Fault::Remote { iova })
            }
        }
        let region = Region::remote(Arc::new(Nobody), 4096, crate::Permissions::READ_WRITE);
        assert!(!region.log_writes() && !region.take_written(0..1, &mut [0]));
        assert!(Memory::heap(4096).write(0, &[1]).is_ok());
    }

    #[test]
    fn a_log_takes_memory_where_something_was_written() {
        let (len, far) = (1 << 40, (1 << 30) / 4096 * 777);
        let log = WriteLog::default();
        log.begin(len);
        let made = || {
            let chunks = log.bits.get().unwrap().chunks.iter();
            chunks.filter(|chunk| chunk.words.get().is_some()).count()
        };
        assert_eq!(made(), 0);
        log.note(far * PAGE, 2 * PAGE);
        log.note(len - 1, 1);
        log.note(len, PAGE);
        assert_eq!(made(), 2);
        let (last, mut words) = (len / PAGE, [0; 2]);
        assert!(log.take(far..far + 128, &mut words));
        assert!(log.take(last - 64..last, &mut words[1..]));
        assert_eq!(words, [3, 1 << 63]);
        assert!(!log.take(last..last + 64, &mut words[1..]), "beyond the end");
        log.note(far * PAGE, 1);
        log.begin(len);
        assert!(log.take(far..far + 64, &mut words[..1]));
        assert_eq!(words[0], 3, "nothing was added");
    }

    #[test]
    fn masks_have_each_bit_once() {
        let bits = |range: Range<usize>| -> Vec<usize> {
            let of = |(number, mask): (usize, u64)| {
                (0..64).filter(move |bit| mask >> bit & 1 == 1).map(move |bit| number * 64 + bit)
            };
            masks(range).flat_map(of).collect()
        };
        for range in [0..1, 0..64, 1..64, 63..64, 63..65, 64..128, 5..200, 191..193] {
            assert_eq!(bits(range.clone()), range.collect::<Vec<_>>());
        }
        assert_eq!(bits(7..7), []);
    }
}
