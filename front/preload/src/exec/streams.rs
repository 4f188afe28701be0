//! A set of descriptors, on the stack: in a child of vfork(2) nothing may be allocated.

use libc::c_int;

/// One more than the highest number in a set. Numbers of descriptors that survive execve(2) are
/// lower: they are below the first hidden one, which is at most this (`slipway_socket::hidden`).
const NUMBERS: usize = 16_384;
/// The numbers that one word of the set stands for.
const WORD: usize = u64::BITS as usize;

/// Descriptors of connections: a bit for each number.
pub struct Streams([u64; NUMBERS / WORD]);

impl Default for Streams {
    fn default() -> Self {
        Self([0; NUMBERS / WORD])
    }
}

impl Streams {
    /// Adds `fd`. A number that is too high is not added.
    pub fn insert(&mut self, fd: c_int) {
        let Ok(number) = usize::try_from(fd) else { return };
        if let Some(word) = self.0.get_mut(number / WORD) {
            *word |= 1 << (number % WORD);
        }
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// Returns those that `keeps` keeps.
    pub fn filter(&self, mut keeps: impl FnMut(c_int) -> bool) -> Self {
        let mut kept = Self::default();
        self.iter().filter(|fd| keeps(*fd)).for_each(|fd| kept.insert(fd));
        kept
    }

    /// Returns the descriptors, the lowest first.
    pub fn iter(&self) -> impl Iterator<Item = c_int> {
        let words = self.0.iter().zip((0..).step_by(WORD));
        words.flat_map(|(word, first)| {
            let bits = (0..WORD).filter(move |bit| (*word >> bit) & 1 != 0);
            bits.map(move |bit| (first + bit) as c_int)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_come_once_and_in_order() {
        let mut all = Streams::default();
        assert!(all.is_empty());
        for fd in [16_383, 0, 64, 63, 0, 5000, -1, 16_384, c_int::MAX] {
            all.insert(fd);
        }
        assert!(!all.is_empty());
        assert_eq!(all.iter().collect::<Vec<_>>(), [0, 63, 64, 5000, 16_383]);
        let odd = all.filter(|fd| fd % 2 == 1);
        assert_eq!(odd.iter().collect::<Vec<_>>(), [63, 16_383]);
        assert!(all.filter(|_| false).is_empty());
    }

    #[test]
    fn as_many_as_there_are_numbers() {
        let mut all = Streams::default();
        (0..16_384).for_each(|fd| all.insert(fd));
        assert!(all.iter().eq(0..16_384));
    }
}
