//! The blocks of an image's file that are known to be there.

use std::ops::Range;

/// The number of bits in a word.
const WORD: u64 = 64;

/// A bitmap of the blocks of a file, which takes memory up to the last block that is there.
pub(super) struct Blocks {
    words: Vec<u64>,
    /// The number of blocks of the file.
    count: u64,
    /// The number of blocks that are there.
    there: u64,
}

impl Blocks {
    /// Creates the map of a file of `count` blocks, all of which are missing.
    pub fn new(count: u64) -> Self {
        Self { words: Vec::new(), count, there: 0 }
    }

    /// Returns the number of blocks of the file.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns whether no block is missing.
    pub fn are_all_there(&self) -> bool {
        self.there == self.count
    }

    /// Notes that all blocks are there.
    pub fn fill(&mut self) {
        (self.words, self.there) = (Vec::new(), self.count);
    }

    /// Notes that the blocks of `range`, which ends within the file, are there.
    pub fn mark(&mut self, range: Range<u64>) {
        if range.is_empty() || self.are_all_there() {
            return;
        }
        let words = range.end.div_ceil(WORD) as usize;
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
        for (index, mask) in masks(range) {
            let word = &mut self.words[index];
            self.there += u64::from((mask & !*word).count_ones());
            *word |= mask;
        }
    }

    /// Returns the first block of `range` that is missing.
    pub fn next_missing(&self, range: Range<u64>) -> Option<u64> {
        if self.are_all_there() {
            return None;
        }
        masks(range).find_map(|(index, mask)| first(index, mask & !self.word(index)))
    }

    /// Returns the first block of `range` that is there.
    pub fn next_there(&self, range: Range<u64>) -> Option<u64> {
        if self.are_all_there() {
            return (!range.is_empty()).then_some(range.start);
        }
        masks(range).find_map(|(index, mask)| first(index, mask & self.word(index)))
    }

    fn word(&self, index: usize) -> u64 {
        self.words.get(index).copied().unwrap_or(0)
    }
}

/// Returns the words that hold the bits of `range`: the index of each, and a mask of its bits.
fn masks(range: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    // An index of a word in memory fits `usize`.
    (range.start / WORD..range.end.div_ceil(WORD)).map(move |index| {
        let first = index * WORD;
        let low = range.start.max(first) - first;
        let high = range.end.min(first + WORD) - first;
        (index as usize, below(high) & !below(low))
    })
}

/// Returns a word whose lowest `bits` bits are set, at most 64.
fn below(bits: u64) -> u64 {
    if bits < WORD { (1 << bits) - 1 } else { u64::MAX }
}

/// Returns the number of the first bit that is set in `word`, which is word `index` of a map.
fn first(index: usize, word: u64) -> Option<u64> {
    (word != 0).then(|| index as u64 * WORD + u64::from(word.trailing_zeros()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_equals_its_model() {
        const COUNT: u64 = 200;
        let ranges = [(70, 71), (0, 3), (60, 70), (63, 65), (128, 192), (190, 200), (150, 150)];
        let (mut blocks, mut model) = (Blocks::new(COUNT), vec![false; COUNT as usize]);
        for (start, end) in ranges {
            blocks.mark(start..end);
            model[start as usize..end as usize].fill(true);
            for from in 0..COUNT {
                for to in [from, from + 1, from + 64, COUNT].map(|to| to.min(COUNT)) {
                    let first = |there| (from..to).find(|at| model[*at as usize] == there);
                    assert_eq!(blocks.next_missing(from..to), first(false), "{from}..{to}");
                    assert_eq!(blocks.next_there(from..to), first(true), "{from}..{to}");
                }
            }
            assert!(!blocks.are_all_there());
        }
        assert_eq!(
            blocks.next_missing(Range { start: 100, end: 10 }),
            None,
            "a range that is inverted is empty"
        );
        assert_eq!(blocks.next_missing(Range { start: 70, end: 69 }), None);
        blocks.mark(0..COUNT);
        assert!(blocks.are_all_there());
        assert_eq!((blocks.next_missing(0..COUNT), blocks.next_there(7..COUNT)), (None, Some(7)));
    }

    #[test]
    fn a_map_takes_memory_up_to_the_last_block_that_is_there() {
        let mut blocks = Blocks::new(1 << 28);
        assert_eq!(blocks.next_missing(1 << 27..1 << 28), Some(1 << 27));
        assert!(blocks.words.is_empty());
        blocks.mark(100..130);
        assert_eq!(blocks.words.len(), 3);
        blocks.fill();
        assert!(blocks.are_all_there() && blocks.words.is_empty());
        blocks.mark(5..9);
        assert!(blocks.are_all_there() && blocks.words.is_empty());
    }
}
