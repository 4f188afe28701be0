//! The self-check: a bug that only a fuzzer with coverage feedback finds in seconds. Each byte is
//! a branch of its own, so that each right guess is new coverage; guessing all eight at once would
//! take 2^64 tries.
#![no_main]

/// Panics on inputs that begin with `KEY`.
fn planted(data: &[u8]) {
    const KEY: [u8; 8] = *b"\x17slipway";
    // A checksum of what was right so far keeps the compiler from turning this into one comparison.
    let mut right = 0u32;
    for (index, expected) in KEY.iter().enumerate() {
        match data.get(index) {
            Some(byte) if byte == expected => right = std::hint::black_box(right + 1),
            _ => return,
        }
        match right {
            1 => std::hint::black_box(1),
            2 => std::hint::black_box(2),
            3 => std::hint::black_box(3),
            4 => std::hint::black_box(4),
            5 => std::hint::black_box(5),
            6 => std::hint::black_box(6),
            7 => std::hint::black_box(7),
            _ => panic!("the planted bug was found"),
        };
    }
}

slipway_fuzz::target!(planted);
