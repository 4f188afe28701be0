//! The blocks of a sparse file that have space of the file system.
//!
//! A map with a bit for each page of the file, in chunks that are made when a page in them gets
//! data: at most 2 MiB for a file of 64 GiB. A page without a bit may have space even so. A page
//! with one has it, so a write that takes space is never counted as one that takes none.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use slipway_ram::next_data;

/// The bytes that a bit stands for.
const PAGE: u64 = 4096;
/// The words of a chunk.
const WORDS: usize = 128;
/// The bytes that a chunk stands for.
const CHUNK: u64 = PAGE * 64 * WORDS as u64;
/// The most stretches of data that are looked for in a file that is opened: its last user decided
/// how many there are.
const MOST_STRETCHES: usize = 16_384;

type Chunk = Box<[AtomicU64; WORDS]>;

/// The pages of a file that have space.
pub(super) struct AllocatedPages(Vec<OnceLock<Chunk>>);

impl AllocatedPages {
    /// Makes the map of `file`, which has `bytes` bytes.
    ///
    /// # Errors
    /// The errors of lseek(2).
    pub fn of(file: BorrowedFd<'_>, bytes: u64) -> io::Result<Self> {
        let held = Self::new(bytes);
        let (mut at, end) = (0, bytes as usize);
        for _ in 0..MOST_STRETCHES {
            let Some(data) = next_data(file, at, end)? else { break };
            at = data.end;
            held.set(&(data.start as u64..data.end as u64));
        }
        Ok(held)
    }

    fn new(bytes: u64) -> Self {
        Self((0..bytes.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect())
    }

    /// Returns whether all pages that `bytes` touch have space.
    pub fn has(&self, bytes: &Range<u64>) -> bool {
        masks(touched(bytes)).all(|(word, mask)| {
            self.word(word).is_some_and(|word| word.load(Ordering::SeqCst) & mask == mask)
        })
    }

    /// Enters the pages that lie within `bytes`, as far as the map goes.
    pub fn set(&self, bytes: &Range<u64>) {
        let within = bytes.start.div_ceil(PAGE)..bytes.end / PAGE;
        for (word, mask) in masks(within) {
            let chunk = self.0.get(word / WORDS);
            let chunk =
                chunk.map(|one| one.get_or_init(|| Box::new([const { AtomicU64::new(0) }; WORDS])));
            if let Some(chunk) = chunk {
                chunk[word % WORDS].fetch_or(mask, Ordering::SeqCst);
            }
        }
    }

    /// Removes the pages that `bytes` touch.
    pub fn clear(&self, bytes: &Range<u64>) {
        for (word, mask) in masks(touched(bytes)) {
            if let Some(word) = self.word(word) {
                word.fetch_and(!mask, Ordering::SeqCst);
            }
        }
    }

    fn word(&self, index: usize) -> Option<&AtomicU64> {
        self.0.get(index / WORDS)?.get().map(|chunk| &chunk[index % WORDS])
    }
}

/// Returns the most space in bytes that a write of `bytes` takes: all pages that it touches.
pub(super) fn space(bytes: &Range<u64>) -> u64 {
    let pages = touched(bytes);
    (pages.end - pages.start).saturating_mul(PAGE)
}

fn touched(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / PAGE..bytes.end.div_ceil(PAGE)
}

/// Returns the words that hold the bits of `pages`, each with these bits.
fn masks(pages: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let first = pages.start / 64;
    let end = if pages.is_empty() { first } else { pages.end.div_ceil(64) };
    (first..end).map(move |word| {
        let low = pages.start.saturating_sub(word * 64);
        let high = (pages.end - word * 64).min(64);
        (word as usize, (u64::MAX << low) & (u64::MAX >> (64 - high)))
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn pages_are_held_one_by_one() {
        let held = AllocatedPages::new(3 * CHUNK);
        let bytes = CHUNK - 3 * PAGE..CHUNK + 70 * PAGE;
        assert!(!held.has(&bytes));
        held.set(&bytes);
        assert!(held.has(&bytes) && held.has(&(CHUNK + 1..CHUNK + 2)));
        assert!(!held.has(&(bytes.start - 1..bytes.end)));
        assert!(!held.has(&(bytes.start..bytes.end + 1)));
        // A part of a page is not entered, and takes the whole page out.
        held.set(&(bytes.end..bytes.end + PAGE - 1));
        assert!(!held.has(&(bytes.end..bytes.end + 1)));
        held.clear(&(CHUNK + 100..CHUNK + 200));
        assert!(!held.has(&(CHUNK..CHUNK + PAGE)));
        assert!(held.has(&(bytes.start..CHUNK)) && held.has(&(CHUNK + PAGE..bytes.end)));
        // Beyond the end nothing is entered.
        let beyond = 3 * CHUNK..3 * CHUNK + PAGE;
        held.set(&beyond);
        held.clear(&beyond);
        assert!(!held.has(&beyond));
        held.set(&(64 * PAGE..64 * PAGE));
        assert!(!held.has(&(64 * PAGE..64 * PAGE + 1)));
    }

    #[test]
    fn data_of_a_file_is_held_from_the_first() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&[1; PAGE as usize], 8 * PAGE).unwrap();
        let held = AllocatedPages::of(file.as_fd(), 1 << 20).unwrap();
        assert!(held.has(&(8 * PAGE..9 * PAGE)));
        assert!(!held.has(&(512 << 10..(512 << 10) + PAGE)));
    }
}
