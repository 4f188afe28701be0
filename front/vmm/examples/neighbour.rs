//! A program in a guest that is disturbed by nothing but its machine: `neighbour MIB FILE`. It has
//! MIB mebibytes, checks a part of them every millisecond, and measures the time between two
//! checks. FILE names what happens beside it at present, by one word. The word `end` ends it.
//!
//! Prints a line `neighbour: WORD longest-us=N checks=N` for each word, or the first byte that was
//! wrong.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The bytes of a check.
const PART: usize = 8 << 10;

/// Returns the byte at a place: no two pages are the same.
fn byte(at: usize) -> u8 {
    ((at >> 12).wrapping_mul(0x9e37_79b9) >> 7) as u8 ^ at as u8
}

/// Returns the place of a byte of the part at `start` that has changed.
fn changed(bytes: &[u8], start: usize) -> Option<usize> {
    let mut part = bytes[start..start + PART].iter().enumerate();
    part.find(|(at, found)| **found != byte(start + at)).map(|(at, _)| start + at)
}

fn main() -> Outcome<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [mib, file] = &words[..] else { return Err("neighbour MIB FILE".into()) };
    let bytes: Vec<u8> = (0..mib.parse::<usize>()? << 20).map(byte).collect();
    let mut pauses: BTreeMap<String, (Duration, u64)> = BTreeMap::new();
    let (mut last, mut start) = (Instant::now(), 0);
    loop {
        let word = std::fs::read_to_string(file)?.trim().to_owned();
        if word == "end" {
            break;
        }
        if let Some(at) = changed(&bytes, start) {
            return Err(format!("byte {at} has changed").into());
        }
        start = (start + PART) % bytes.len();
        let now = Instant::now();
        let (longest, checks) = pauses.entry(word).or_default();
        *longest = (*longest).max(now - last);
        *checks += 1;
        last = now;
        std::thread::sleep(Duration::from_millis(1));
    }
    for (word, (longest, checks)) in pauses {
        println!("neighbour: {word} longest-us={} checks={checks}", longest.as_micros());
    }
    Ok(())
}
