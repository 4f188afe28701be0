//! Claims: the signals of a family that the links' carrier passes on to the carrier of guests.
//!
//! Where an engine has links and guests, the links' carrier takes all signals of families. It does
//! not know which entries belong to streams with guests, and must not wake the carrier of guests
//! for the others. So each family has its claims, marks that the carrier of guests makes and the
//! links' carrier reads: the first signal of a claimed entry is passed on, and the next one once
//! the first was seen. So a program that raises signals without end has one in flight for each of
//! its entries.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::table::ENTRIES;

/// The number of entries in a part of the marks. A family uses its lowest entries, so most families
/// have one part.
const PART: usize = 4096;

#[derive(Debug)]
struct ClaimWords {
    claimed: [AtomicU64; PART / 64],
    /// Entries with a signal in flight.
    in_flight: [AtomicU64; PART / 64],
}

/// The entries of a family that have streams with guests.
pub struct Claims {
    parts: Box<[OnceLock<Box<ClaimWords>>]>,
    /// Set while the signal that any entry may have changed is in flight.
    overflow_in_flight: AtomicBool,
}

impl Default for Claims {
    fn default() -> Self {
        let parts = (0..(ENTRIES as usize).div_ceil(PART)).map(|_| OnceLock::new()).collect();
        Self { parts, overflow_in_flight: AtomicBool::new(false) }
    }
}

/// Returns the word of an entry, and its bit there.
fn place(entry: usize) -> (usize, u64) {
    (entry % PART / 64, 1 << (entry % 64))
}

impl Claims {
    /// Claims the entry for a stream with a guest. To be called before the FIFOs ask the program
    /// for a wake-up.
    pub fn claim(&self, entry: u32) {
        let Some(part) = self.parts.get(entry as usize / PART) else { return };
        let fresh = || [const { AtomicU64::new(0) }; PART / 64];
        let part =
            part.get_or_init(|| Box::new(ClaimWords { claimed: fresh(), in_flight: fresh() }));
        let (word, bit) = place(entry as usize);
        part.in_flight[word].fetch_and(!bit, Ordering::AcqRel);
        part.claimed[word].fetch_or(bit, Ordering::AcqRel);
    }

    /// Gives the entry up.
    pub fn give_up(&self, entry: u32) {
        if let Some(part) = self.part(entry as usize) {
            let (word, bit) = place(entry as usize);
            part.claimed[word].fetch_and(!bit, Ordering::AcqRel);
        }
    }

    /// Notes that a signal was seen, so that the next one is passed on again. Without an entry, the
    /// signal is that any entry may have changed.
    pub fn seen(&self, entry: Option<u32>) {
        let Some(entry) = entry else {
            return self.overflow_in_flight.store(false, Ordering::SeqCst);
        };
        if let Some(part) = self.part(entry as usize) {
            let (word, bit) = place(entry as usize);
            // Acquire: the thread that looks now sees the writes before a signal that was not
            // passed on.
            part.in_flight[word].fetch_and(!bit, Ordering::AcqRel);
        }
    }

    /// Returns whether a signal of the entry is to be passed on. If so, it is in flight until
    /// [`Claims::seen`].
    pub fn pass_on(&self, entry: usize) -> bool {
        let Some(part) = self.part(entry) else { return false };
        let (word, bit) = place(entry);
        part.claimed[word].load(Ordering::Acquire) & bit != 0
            && part.in_flight[word].fetch_or(bit, Ordering::AcqRel) & bit == 0
    }

    /// Returns whether the signal that any entry may have changed is to be passed on. If so, it is
    /// in flight until [`Claims::seen`].
    pub fn pass_on_overflow(&self) -> bool {
        !self.overflow_in_flight.swap(true, Ordering::SeqCst)
    }

    fn part(&self, entry: usize) -> Option<&ClaimWords> {
        self.parts.get(entry / PART)?.get().map(Box::as_ref)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_of_claimed_entries_are_passed_on_once_until_seen() {
        let claims = Claims::default();
        let last = ENTRIES - 1;
        for entry in [0, 63, 64, last] {
            assert!(!claims.pass_on(entry as usize), "nobody's");
            claims.claim(entry);
            assert!(claims.pass_on(entry as usize) && !claims.pass_on(entry as usize));
            claims.seen(Some(entry));
            assert!(claims.pass_on(entry as usize));
            claims.give_up(entry);
            claims.seen(Some(entry));
            assert!(!claims.pass_on(entry as usize));
        }
        claims.claim(7);
        assert!(!claims.pass_on(6) && !claims.pass_on(7 + PART) && !claims.pass_on(usize::MAX));
        // A signal in flight for a stream that has ended does not hold back the next stream's.
        assert!(claims.pass_on(7));
        claims.give_up(7);
        claims.claim(7);
        assert!(claims.pass_on(7));
        claims.claim(ENTRIES + 5);
        claims.seen(Some(u32::MAX));
    }
}
