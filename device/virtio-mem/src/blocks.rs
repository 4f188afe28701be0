//! The blocks of a region: which of them are plugged.

use std::ops::Range;

/// Bits of a word of the map.
const WORD: usize = 64;

/// A bit for each block of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    words: Vec<u64>,
    count: usize,
    plugged: usize,
}

impl Blocks {
    /// Makes the map of `count` blocks, none of which is plugged.
    pub fn new(count: usize) -> Self {
        Self { words: vec![0; count.div_ceil(WORD)], count, plugged: 0 }
    }

    /// Returns the number of blocks.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the number of plugged blocks.
    pub fn plugged(&self) -> usize {
        self.plugged
    }

    /// Returns the number of plugged blocks among those of `range`; blocks beyond the last one are
    /// not.
    pub fn plugged_in(&self, range: &Range<usize>) -> usize {
        let ones = |(at, mask): (usize, u64)| {
            self.words.get(at).map_or(0, |word| (word & mask).count_ones() as usize)
        };
        masks(range).map(ones).sum()
    }

    /// Plugs or unplugs the blocks of `range`; blocks beyond the last one do not exist.
    pub fn set(&mut self, range: &Range<usize>, plugged: bool) {
        let range = range.start..range.end.min(self.count);
        for (at, mask) in masks(&range) {
            let Some(word) = self.words.get_mut(at) else { return };
            let before = word.count_ones() as usize;
            *word = if plugged { *word | mask } else { *word & !mask };
            self.plugged = self.plugged + word.count_ones() as usize - before;
        }
    }

    /// Returns the plugged blocks as ranges, ascending, with a gap between any two.
    pub fn runs(&self) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        let is_plugged = |block: &usize| self.words[block / WORD] >> (block % WORD) & 1 != 0;
        for block in (0..self.count).filter(is_plugged) {
            match runs.last_mut() {
                Some(run) if run.end == block => run.end += 1,
                _ => runs.push(block..block + 1),
            }
        }
        runs
    }
}

/// Returns the words of the map that a range of blocks touches, each with a mask of its blocks.
fn masks(range: &Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    let Range { start, end } = range.clone();
    let words = if start < end { start / WORD..end.div_ceil(WORD) } else { 0..0 };
    words.map(move |at| {
        let first = start.saturating_sub(at * WORD);
        let unused = ((at + 1) * WORD).saturating_sub(end);
        (at, u64::MAX << first & u64::MAX >> unused)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_across_words_are_counted_and_set() {
        let mut blocks = Blocks::new(200);
        assert_eq!(blocks.plugged_in(&(0..200)), 0);
        blocks.set(&(60..130), true);
        assert_eq!((blocks.plugged(), blocks.plugged_in(&(0..200))), (70, 70));
        assert_eq!(blocks.plugged_in(&(59..61)), 1);
        assert_eq!(blocks.plugged_in(&(64..128)), 64);
        assert_eq!(blocks.plugged_in(&(129..131)), 1);
        assert_eq!(blocks.plugged_in(&(130..200)), 0);
        assert_eq!(blocks.plugged_in(&(70..70)), 0);
        blocks.set(&(100..101), false);
        blocks.set(&(199..usize::MAX), true);
        assert_eq!(blocks.runs(), [60..100, 101..130, 199..200]);
        assert_eq!(blocks.plugged(), 70);
        blocks.set(&(0..200), false);
        assert_eq!(blocks, Blocks::new(200));
    }
}
