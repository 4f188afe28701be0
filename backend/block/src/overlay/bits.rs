//! A bitmap of any size that costs memory where bits are set.

use std::ops::Range;

use crate::memory::Anonymous;

/// `len` bits, all zero at first.
pub(super) struct Bits(Anonymous);

impl Bits {
    /// # Errors
    /// As for [`Anonymous::new`].
    pub fn new(len: u64) -> std::io::Result<Self> {
        let bytes =
            usize::try_from(len.div_ceil(8)).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        Ok(Self(Anonymous::new(bytes)?.small_pages()))
    }

    pub fn get(&self, index: u64) -> bool {
        self.0.bytes()[(index / 8) as usize] >> (index % 8) & 1 != 0
    }

    pub fn set(&mut self, range: Range<u64>, value: bool) {
        let whole = range.start.div_ceil(8)..range.end / 8;
        if whole.start >= whole.end {
            return self.set_each(range, value);
        }
        self.set_each(range.start..whole.start * 8, value);
        self.set_each(whole.end * 8..range.end, value);
        let bytes = whole.start as usize..whole.end as usize;
        if value {
            self.0.bytes_mut()[bytes].fill(0xff);
        } else {
            self.0.zero(bytes);
        }
    }

    fn set_each(&mut self, range: Range<u64>, value: bool) {
        for index in range {
            // A write would make a page for zeros that are there.
            if self.get(index) != value {
                self.0.bytes_mut()[(index / 8) as usize] ^= 1 << (index % 8);
            }
        }
    }

    /// End of the run of equal bits that begins at `start`, at most `end`; `start < end`.
    pub fn run(&self, start: u64, end: u64) -> u64 {
        let value = self.get(start);
        let whole = if value { 0xff } else { 0 };
        let mut at = start + 1;
        while at < end {
            if at.is_multiple_of(8) && self.0.bytes()[(at / 8) as usize] == whole {
                at += 8;
            } else if self.get(at) == value {
                at += 1;
            } else {
                return at;
            }
        }
        end
    }

    /// Bits of `range` that are zero.
    pub fn zeros(&self, range: Range<u64>) -> u64 {
        let mut count = 0;
        let mut at = range.start;
        while at < range.end {
            let end = self.run(at, range.end);
            count += if self.get(at) { 0 } else { end - at };
            at = end;
        }
        count
    }

    #[cfg(test)]
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
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
    }
}
