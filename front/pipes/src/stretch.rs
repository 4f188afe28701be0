//! Stretches: a position in a ring and a number of bytes from there, which may wrap.

use std::ops::Range;

/// A run of `length` bytes from `position` of a ring whose size is a power of two. A position
/// counts the bytes since the ring's creation (modulo 2^64); the byte's place in memory is the
/// position modulo the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    position: u64,
    length: usize,
    size: usize,
}

impl Stretch {
    /// Makes the stretch of `length` bytes from `position` of a ring of `size` bytes. Returns
    /// `None` if `size` is not a power of two or `length` exceeds `size`, as a hostile or broken
    /// peer's indices may have it.
    pub fn new(position: u64, length: u64, size: u64) -> Option<Self> {
        let (length, size) = (usize::try_from(length).ok()?, usize::try_from(size).ok()?);
        (size.is_power_of_two() && length <= size).then_some(Self { position, length, size })
    }

    /// Makes a stretch of `length` bytes of memory that is no ring. It begins at 0 and never wraps.
    pub fn flat(length: usize) -> Self {
        Self { position: 0, length, size: length.next_power_of_two() }
    }

    /// Returns the first byte's position, counted from the ring's creation.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Returns the number of bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Returns whether the stretch has no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the size of the whole ring in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the first byte's offset in the ring's memory.
    pub fn offset(&self) -> usize {
        (self.position & (self.size as u64 - 1)) as usize
    }

    /// Returns the number of the stretch's bytes before the end of the ring's memory. This is its
    /// length unless it wraps.
    pub fn head(&self) -> usize {
        self.length.min(self.size - self.offset())
    }

    /// Returns whether the stretch continues at the beginning of the ring's memory.
    pub fn wraps(&self) -> bool {
        self.head() < self.length
    }

    /// Returns the first `length` bytes of the stretch, or the whole stretch if it is shorter.
    pub fn first(&self, length: usize) -> Self {
        Self { length: length.min(self.length), ..*self }
    }

    /// Returns the part after the first `length` bytes, which is empty if the stretch is not
    /// longer.
    pub fn after(&self, length: usize) -> Self {
        let gone = length.min(self.length);
        let position = self.position.wrapping_add(gone as u64);
        Self { position, length: self.length - gone, size: self.size }
    }

    /// Returns the stretch's ranges in the ring's memory, in order. The second is empty unless the
    /// stretch wraps.
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
    fn positions_wrap_at_the_greatest_number() {
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
