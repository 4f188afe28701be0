//! Counts lost, late and duplicate frames of a run, by their numbers.

/// The number of recent frames that are remembered, to tell late frames from duplicates.
const WINDOW: u64 = 4096;

/// Counts of one run's frames. A number that is missing is lost until it comes.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// The number that is due next, or `None` before the first frame.
    next: Option<u64>,
    first: u64,
    /// One bit for each of the last numbers: set if the frame came.
    seen: Box<[u64; WINDOW as usize / 64]>,
    received: u64,
    lost: u64,
    late: u64,
    duplicates: u64,
}

impl Default for Sequence {
    fn default() -> Self {
        let seen = Box::new([0; WINDOW as usize / 64]);
        Self { next: None, first: 0, seen, received: 0, lost: 0, late: 0, duplicates: 0 }
    }
}

impl Sequence {
    /// Counts a frame with this number.
    #[inline]
    pub fn see(&mut self, number: u64) {
        let next = *self.next.get_or_insert(number);
        if self.received == 0 {
            self.first = number;
        }
        self.received += 1;
        if number < next {
            return self.see_late(number, next);
        }
        if number > next {
            self.skip(next, number);
        }
        self.mark(number);
        self.next = Some(number.saturating_add(1));
    }

    #[cold]
    fn skip(&mut self, next: u64, number: u64) {
        self.lost += number - next;
        for missing in next.max(number.saturating_sub(WINDOW))..number {
            self.seen[(missing % WINDOW / 64) as usize] &= !(1 << (missing % 64));
        }
    }

    #[cold]
    fn see_late(&mut self, number: u64, next: u64) {
        if next - number > WINDOW || number < self.first {
            // Too old: nothing tells whether it came before.
            self.late += 1;
        } else if self.seen[(number % WINDOW / 64) as usize] >> (number % 64) & 1 != 0 {
            self.duplicates += 1;
        } else {
            self.mark(number);
            self.late += 1;
            self.lost -= 1;
        }
    }

    #[inline]
    fn mark(&mut self, number: u64) {
        self.seen[(number % WINDOW / 64) as usize] |= 1 << (number % 64);
    }

    /// Returns the number of frames that came, duplicates included.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Returns the number of frames that are missing between the first and the last that came.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Returns the number of frames that came after one with a higher number.
    pub fn late(&self) -> u64 {
        self.late
    }

    /// Returns the number of frames that had come before.
    pub fn duplicates(&self) -> u64 {
        self.duplicates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(numbers: impl IntoIterator<Item = u64>) -> (u64, u64, u64, u64) {
        let mut sequence = Sequence::default();
        numbers.into_iter().for_each(|number| sequence.see(number));
        (sequence.received(), sequence.lost(), sequence.late(), sequence.duplicates())
    }

    #[test]
    fn what_is_missing_is_lost_until_it_comes() {
        assert_eq!(counts(0..20_000), (20_000, 0, 0, 0));
        assert_eq!(counts(7..9), (2, 0, 0, 0));
        assert_eq!(counts([0, 1, 4, 5]), (4, 2, 0, 0));
        assert_eq!(counts([0, 1, 4, 3, 2, 5]), (6, 0, 2, 0));
        assert_eq!(counts([0, 1, 1, 4, 3, 3]), (6, 1, 1, 2));
        // A gap longer than the window, which reuses the slots of older numbers.
        assert_eq!(counts([0, 4097, 1, 4098]), (4, 4096, 1, 0));
        assert_eq!(counts([0, 4096, 1, 4097]), (4, 4094, 1, 0));
        assert_eq!(counts([0, 10_000, 1]), (3, 9999, 1, 0));
        assert_eq!(counts([5, 4]), (2, 0, 1, 0));
        assert_eq!(counts([0, u64::MAX, u64::MAX]).1, u64::MAX - 1);
    }
}
