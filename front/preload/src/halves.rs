//! Values of options that share a word of an endpoint's entry: 32 bits each, two in a word.

use std::sync::atomic::Ordering;

use slipway_socket::{Endpoint, option};

/// `SO_RCVTIMEO` in milliseconds; 0 for no timeout.
pub const RECEIVE_TIMEOUT: HalfWord = HalfWord::low(option::TIMEOUTS);
/// `SO_SNDTIMEO` in milliseconds; 0 for no timeout.
pub const SEND_TIMEOUT: HalfWord = HalfWord::high(option::TIMEOUTS);
/// `SO_RCVBUF` in bytes; 0 if the program set none.
pub const RECEIVE_BUFFER: HalfWord = HalfWord::low(option::BUFFERS);
/// `SO_SNDBUF` in bytes; 0 if the program set none.
pub const SEND_BUFFER: HalfWord = HalfWord::high(option::BUFFERS);
/// `SO_RCVLOWAT` in bytes; 0 if the program set none. The low half of its word counts holders and
/// belongs to `slipway_socket`.
pub const RECEIVE_LOW_WATER: HalfWord = HalfWord::high(option::HOLDERS);

/// The bits of the low half of a word.
const LOW: u64 = 0xffff_ffff;

/// The part of a word of an endpoint's entry in which a value lies.
#[derive(Clone, Copy)]
pub struct HalfWord {
    /// The index of the word: a constant of [`option`].
    word: usize,
    /// The bit of the word with which the value begins: 0 or 32.
    shift: u32,
}

impl HalfWord {
    const fn low(word: usize) -> Self {
        Self { word, shift: 0 }
    }

    const fn high(word: usize) -> Self {
        Self { word, shift: 32 }
    }

    /// Returns the endpoint's value.
    pub fn get(self, endpoint: &Endpoint) -> u64 {
        self.of(endpoint.option(self.word).load(Ordering::Relaxed))
    }

    /// Stores the low 32 bits of `value` for the endpoint. The other half of the word keeps what
    /// other threads and processes of the family store there meanwhile.
    pub fn set(self, endpoint: &Endpoint, value: u64) {
        let replaced = |word| Some(self.replaced(word, value));
        let word = endpoint.option(self.word);
        let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, replaced);
    }

    /// Returns the value in `word`.
    fn of(self, word: u64) -> u64 {
        word >> self.shift & LOW
    }

    /// Returns `word` with the low 32 bits of `value` in this half.
    fn replaced(self, word: u64, value: u64) -> u64 {
        word & !(LOW << self.shift) | (value & LOW) << self.shift
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_half_changes_and_the_other_one_stays() {
        let word = 0x1111_1111_2222_2222;
        assert_eq!(RECEIVE_TIMEOUT.of(word), 0x2222_2222);
        assert_eq!(SEND_TIMEOUT.of(word), 0x1111_1111);
        assert_eq!(RECEIVE_TIMEOUT.replaced(word, 7), 0x1111_1111_0000_0007);
        assert_eq!(SEND_TIMEOUT.replaced(word, 7), 0x0000_0007_2222_2222);
    }

    #[test]
    fn a_value_of_more_than_32_bits_does_not_reach_the_other_half() {
        assert_eq!(RECEIVE_BUFFER.replaced(0, u64::MAX), 0xffff_ffff);
        assert_eq!(SEND_BUFFER.replaced(5, u64::MAX), 0xffff_ffff_0000_0005);
    }

    #[test]
    fn values_do_not_overlap() {
        let all = [RECEIVE_TIMEOUT, SEND_TIMEOUT, RECEIVE_BUFFER, SEND_BUFFER, RECEIVE_LOW_WATER];
        let mut places = all.map(|value| (value.word, value.shift));
        places.sort_unstable();
        assert!(places.windows(2).all(|pair| pair[0] != pair[1]));
        let holders = (option::HOLDERS, 0);
        assert!(!places.contains(&holders), "the number of holders is not an option");
    }
}
