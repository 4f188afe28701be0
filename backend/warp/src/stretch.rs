//! A stretch of a ring: from a position on, so many bytes, around the end or not.

use std::ops::Range;

/// `length` bytes from `position` of a ring whose size is a power of two. Positions count from the
/// ring's beginning of time and never wrap; the byte's place is the position modulo the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    position: u64,
    length: usize,
    size: usize,
}

impl Stretch {
    /// None when `size` is no power of two, or `length` is more than `size`: the indices of a peer that
    /// lies, or of one that is broken.
    pub fn new(position: u64, length: u64, size: u64) -> Option<Self> {
        let (length, size) = (usize::try_from(length).ok()?, usize::try_from(size).ok()?);
        (size.is_power_of_two() && length <= size).then_some(Self { position, length, size })
    }

    /// All of `length` bytes of memory that is no ring: it never wraps.
    pub fn flat(length: usize) -> Self {
        Self { position: 0, length, size: length.next_power_of_two() }
    }

    /// Where it begins, counted from the ring's beginning of time.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Whether it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Bytes of the whole ring.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Where it begins in the ring's memory.
    pub fn offset(&self) -> usize {
        (self.position & (self.size as u64 - 1)) as usize
    }

    /// Bytes up to the ring's end, or all.
    pub fn head(&self) -> usize {
        self.length.min(self.size - self.offset())
    }

    /// Whether it goes on at the beginning of the ring's memory.
    pub fn wraps(&self) -> bool {
        self.head() < self.length
    }

    /// The first `length` bytes of it, or all.
    pub fn first(&self, length: usize) -> Self {
        Self { length: length.min(self.length), ..*self }
    }

    /// What follows the first `length` bytes; empty when there are no more.
    pub fn after(&self, length: usize) -> Self {
        let gone = length.min(self.length);
        let position = self.position.wrapping_add(gone as u64);
        Self { position, length: self.length - gone, size: self.size }
    }

    /// The ranges of the ring's memory, in order; the second is empty unless it wraps.
    pub fn ranges(&self) -> [Range<usize>; 2] {
        let (at, head) = (self.offset(), self.head());
        [at..at + head, 0..self.length - head]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_indices_are_refused() {
        assert!(Stretch::new(0, 0, 0).is_none());
        assert!(Stretch::new(0, 1, 12).is_none());
        assert!(Stretch::new(0, 17, 16).is_none());
        assert!(Stretch::new(0, u64::MAX, 1 << 63).is_none());
        assert!(Stretch::new(u64::MAX, 16, 16).is_some());
    }

    #[test]
    fn positions_go_over_the_end_of_numbers() {
        let stretch = Stretch::new(u64::MAX - 1, 8, 16).unwrap();
        assert_eq!(stretch.ranges(), [14..16, 0..6]);
        assert_eq!(stretch.after(3).position(), 1);
        assert_eq!(stretch.after(3).ranges(), [1..6, 0..0]);
    }

    #[test]
    fn flat_memory_never_wraps() {
        for length in 0..70 {
            assert_eq!(Stretch::flat(length).ranges()[0], 0..length);
            assert!(!Stretch::flat(length).wraps());
        }
    }
}
