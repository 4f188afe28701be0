//! The Internet checksum (RFC 1071).

/// Returns the sum of the 16-bit words of `bytes`, not folded yet.
#[inline]
pub fn sum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<4>();
    // Any word size gives the same sum once it is folded.
    let whole: u64 = words.iter().map(|word| u64::from(u32::from_be_bytes(*word))).sum();
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    whole + u64::from(u32::from_be_bytes(last))
}

/// Folds a sum into 16 bits. The complement goes into a header.
#[inline]
pub fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}

/// Returns the checksum of TCP or UDP whose covered words have this sum. It is never 0, which would
/// mean that a UDP datagram has no checksum (RFC 768); elsewhere 0 and 0xffff are equal.
#[inline]
pub fn finish(sum: u64) -> u16 {
    match !fold(sum) {
        0 => 0xffff,
        value => value,
    }
}
