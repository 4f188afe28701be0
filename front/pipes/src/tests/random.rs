//! Pseudo-random numbers, the same in every run.

/// xorshift64*.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        ((u128::from(self.next()) * limit as u128) >> 64) as usize
    }

    /// Returns bytes that do not compress.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.next() as u8).collect()
    }

    /// Returns bytes that compress.
    pub fn text(&mut self, length: usize) -> Vec<u8> {
        let words: [&[u8]; 4] = [b"harbour ", b"slip ", b"the ", b"crane and cargo "];
        let mut text = Vec::new();
        while text.len() < length {
            text.extend_from_slice(words[self.below(4)]);
        }
        text.truncate(length);
        text
    }
}
