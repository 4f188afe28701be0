//! A bitmap of any size that takes memory only where bits are set.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use slipway_ram::Lasting;

use super::points::point;
use crate::memory::{Anonymous, page_size};

/// The number of bits in a word.
const WORD: u64 = 64;
/// Bytes of a record that are read at a time.
const CHUNK: usize = 4096;

/// A bitmap of `len` bits, in words, all zero at first. Every decision uses this process's own
/// copy. If there is a *record*, every change is also stored there for a successor, and never read
/// again.
pub(super) struct Bits {
    own: Anonymous,
    /// The pages of `own` that were written. They are never given back.
    touched: Touched,
    record: Option<Lasting>,
}

/// Marks of pages that were touched, each of which is counted once and for good.
pub(super) struct Touched {
    map: Anonymous,
    count: u64,
}

impl Touched {
    /// Creates marks of `len` pages, none of which was touched.
    ///
    /// # Errors
    /// The errors of [`Anonymous::new`].
    pub fn new(len: u64) -> std::io::Result<Self> {
        Ok(Self { map: Anonymous::new(bytes_of(len)?)?.small_pages(), count: 0 })
    }

    /// Returns the number of pages that were touched.
    pub fn count(&self) -> u64 {
        self.count
    }

    pub fn has(&self, page: u64) -> bool {
        self.map.words()[(page / WORD) as usize] >> (page % WORD) & 1 != 0
    }

    pub fn note(&mut self, page: u64) {
        if !self.has(page) {
            self.map.words_mut()[(page / WORD) as usize] |= 1 << (page % WORD);
            self.count += 1;
        }
    }

    /// Returns the pages that were touched, ascending.
    fn pages(&self) -> impl Iterator<Item = u64> {
        let bits = |(at, word): (u64, &u64)| {
            let word = *word;
            (0..WORD).filter(move |bit| word >> bit & 1 != 0).map(move |bit| at * WORD + bit)
        };
        (0..).zip(self.map.words()).flat_map(bits)
    }
}

impl Bits {
    /// Creates a bitmap of zeros without a record.
    ///
    /// # Errors
    /// The errors of [`Anonymous::new`].
    pub fn new(len: u64) -> std::io::Result<Self> {
        let bytes = bytes_of(len)?;
        let own = Anonymous::new(bytes)?.small_pages();
        let touched = Touched::new(bytes.div_ceil(page_size()) as u64)?;
        Ok(Self { own, touched, record: None })
    }

    /// Returns the number of pages of memory that the bitmap holds, its record included.
    pub fn held_pages(&self) -> u64 {
        // Every change is stored in both, at the same place.
        self.touched.count * if self.record.is_some() { 2 } else { 1 }
    }

    /// Reads a predecessor's bits from `record`, which is `file` from byte `start` on. Returns the
    /// bitmap and the number of set bits, or `None` if a bit beyond the last one is set.
    ///
    /// # Errors
    /// The errors of [`Anonymous::new`], and of reading the file.
    pub fn of(
        len: u64,
        record: Lasting,
        place: (&OwnedFd, u64),
    ) -> std::io::Result<Option<(Self, u64)>> {
        let read = Self::read(len, place)?;
        Ok(read.map(|(bits, ones)| (Self { record: Some(record), ..bits }, ones)))
    }

    /// Reads the bits of a record, as [`Bits::of`], into a bitmap without a record. The bitmap that
    /// stores its changes there may be in use.
    ///
    /// # Errors
    /// The errors of [`Bits::of`].
    pub fn read(len: u64, (file, start): (&OwnedFd, u64)) -> std::io::Result<Option<(Self, u64)>> {
        let mut bits = Self::new(len)?;
        let words = bits.own.words_mut();
        let end = start + (words.len() * 8) as u64;
        let (mut at, mut ones) = (start, 0);
        // Read by system calls: reading a hole through a mapping would allocate a page.
        while let Some(data) = next_data(file, at)?.filter(|data| *data < end) {
            at = data / CHUNK as u64 * CHUNK as u64;
            let mut chunk = [0; CHUNK];
            let part = CHUNK.min((end - at) as usize);
            let read = rustix::io::pread(file, &mut chunk[..part], at)?;
            let first = ((at - start) / 8) as usize;
            for (word, bytes) in words[first..].iter_mut().zip(chunk[..read].as_chunks().0) {
                *word = u64::from_ne_bytes(*bytes);
                ones += u64::from(word.count_ones());
            }
            bits.touched.note(page_of(first));
            at += CHUNK as u64;
        }
        let (beyond, last) = (len % WORD, words[((len - 1) / WORD) as usize]);
        Ok((beyond == 0 || last >> beyond == 0).then_some((bits, ones)))
    }

    pub fn get(&self, index: u64) -> bool {
        self.own.words()[(index / WORD) as usize] >> (index % WORD) & 1 != 0
    }

    pub fn set(&mut self, range: Range<u64>, value: bool) {
        for (index, mask) in parts(range) {
            let old = self.own.words()[index];
            let new = if value { old | mask } else { old & !mask };
            // Storing zeros over zeros would allocate a page.
            if new != old {
                self.own.words_mut()[index] = new;
                self.touched.note(page_of(index));
                self.record(index, new);
            }
        }
    }

    /// Stores with Release: a successor that sees the bits also sees the stores before them.
    fn record(&self, index: usize, value: u64) {
        let Some(record) = &self.record else { return };
        point();
        if let Some(word) = record.words().get(index) {
            word.store(value, Ordering::Release);
        }
        point();
    }

    /// Returns the end of the run of equal bits that begins at `start`, at most `end`. `start` must
    /// be below `end`.
    pub fn run(&self, start: u64, end: u64) -> u64 {
        let value = self.get(start);
        let differs = |(index, mask): (usize, u64)| {
            let word = self.own.words()[index];
            let others = if value { !word & mask } else { word & mask };
            (others != 0).then(|| index as u64 * WORD + u64::from(others.trailing_zeros()))
        };
        parts(start..end).find_map(differs).unwrap_or(end)
    }

    /// Returns the number of bits in `range` that are zero.
    pub fn zeros(&self, range: Range<u64>) -> u64 {
        let zeros = |(index, mask): (usize, u64)| (!self.own.words()[index] & mask).count_ones();
        parts(range).map(|part| u64::from(zeros(part))).sum()
    }

    /// Returns the first bit of each word in which a bit is set, ascending.
    pub fn words_with_ones(&self) -> impl Iterator<Item = u64> {
        let (words, per_page) = (self.own.words(), page_size() / size_of::<u64>());
        let of_page = move |page: u64| {
            let first = page as usize * per_page;
            first..words.len().min(first + per_page)
        };
        let indexes = self.touched.pages().flat_map(of_page);
        indexes.filter(move |index| words[*index] != 0).map(|index| index as u64 * WORD)
    }

    #[cfg(test)]
    pub fn bytes(&self) -> &[u8] {
        self.own.bytes()
    }
}

/// Returns the page of word `index`.
fn page_of(index: usize) -> u64 {
    (index * size_of::<u64>() / page_size()) as u64
}

/// Returns the bytes that `len` bits take in whole words.
pub(super) fn bytes_of(len: u64) -> std::io::Result<usize> {
    usize::try_from(len.div_ceil(WORD) * (WORD / 8))
        .map_err(|_| std::io::ErrorKind::OutOfMemory.into())
}

/// Returns the words of a range, each with a mask of the bits that lie in the range.
fn parts(range: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let words = if range.is_empty() { 0..0 } else { range.start / WORD..range.end.div_ceil(WORD) };
    words.map(move |word| {
        let first = range.start.saturating_sub(word * WORD);
        let last = (range.end - 1 - word * WORD).min(WORD - 1);
        (word as usize, !0 << first & !0 >> (WORD - 1 - last))
    })
}

/// Returns the first offset from `at` on that holds data, or `None` if there is none.
fn next_data(file: impl AsFd, at: u64) -> std::io::Result<Option<u64>> {
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(data) => Ok(Some(data)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_and_counts_equal_a_plain_vector() {
        let mut bits = Bits::new(1000).unwrap();
        let mut plain = vec![false; 1000];
        let noise = crate::model::noise(3, 4000);
        for step in noise.chunks_exact(4) {
            let start = u64::from(step[0]) * 3;
            let end = (start + 1 + u64::from(step[1])).min(1000);
            let value = step[2] & 1 != 0;
            bits.set(start..end, value);
            plain[start as usize..end as usize].fill(value);
            let from = usize::from(step[3]) * 3;
            let run = plain[from..].iter().take_while(|&&bit| bit == plain[from]).count();
            assert_eq!(bits.run(from as u64, 1000), (from + run) as u64);
            let zeros = plain[from..].iter().filter(|&&bit| !bit).count();
            assert_eq!(bits.zeros(from as u64..1000), zeros as u64);
        }
        assert!((0..1000).all(|at| bits.get(at) == plain[at as usize]));
        let has_ones = |word: &u64| (*word..(word + 64).min(1000)).any(|at| plain[at as usize]);
        let expected: Vec<u64> = (0..1000).step_by(64).filter(has_ones).collect();
        assert_eq!(bits.words_with_ones().collect::<Vec<_>>(), expected);
        bits.set(5..5, true);
        assert_eq!(bits.zeros(7..7), 0);
    }
}
