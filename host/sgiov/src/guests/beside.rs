//! Families whose signals links take: what is for streams with guests is passed on to this side's
//! thread.
//!
//! The links' thread does not know which entries those are, and this thread is not to be woken for
//! all others. So each family has its claims, marks that this thread makes and the links' thread
//! reads: an entry's first signal is passed on, and the next one when that was seen. So a program
//! that raises signals without end has one under way for each of its entries.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::task::Wake;

use slipway_family::Beside;

use super::Bell;
use super::carrying::Command;
use crate::table::ENTRIES;

/// Entries of a part of the marks. A family's entries are its lowest numbers, so most have one
/// part.
const PART: usize = 4096;

#[derive(Debug)]
struct Part {
    claimed: [AtomicU64; PART / 64],
    /// A signal is under way.
    told: [AtomicU64; PART / 64],
}

/// A family's entries that have streams with guests.
pub struct Claims {
    parts: Box<[OnceLock<Box<Part>>]>,
    /// That any may have stirred is under way.
    told: AtomicBool,
}

impl Default for Claims {
    fn default() -> Self {
        let parts = (0..(ENTRIES as usize).div_ceil(PART)).map(|_| OnceLock::new()).collect();
        Self { parts, told: AtomicBool::new(false) }
    }
}

/// The word of an entry, and its bit there.
fn place(entry: usize) -> (usize, u64) {
    (entry % PART / 64, 1 << (entry % 64))
}

impl Claims {
    /// The entry is a stream's with a guest: to be said before anything is asked of the program by
    /// its FIFOs.
    pub fn claim(&self, entry: u32) {
        let Some(part) = self.parts.get(entry as usize / PART) else { return };
        let fresh = || [const { AtomicU64::new(0) }; PART / 64];
        let part = part.get_or_init(|| Box::new(Part { claimed: fresh(), told: fresh() }));
        let (word, bit) = place(entry as usize);
        part.told[word].fetch_and(!bit, Ordering::AcqRel);
        part.claimed[word].fetch_or(bit, Ordering::AcqRel);
    }

    /// Gives the entry up.
    pub fn give_up(&self, entry: u32) {
        if let Some(part) = self.part(entry as usize) {
            let (word, bit) = place(entry as usize);
            part.claimed[word].fetch_and(!bit, Ordering::AcqRel);
        }
    }

    /// Notes that a signal was seen, so that the next one is passed on again. `None` stands for the
    /// signal that any entry may have changed.
    pub fn seen(&self, entry: Option<u32>) {
        let Some(entry) = entry else { return self.told.store(false, Ordering::SeqCst) };
        if let Some(part) = self.part(entry as usize) {
            let (word, bit) = place(entry as usize);
            // Acquire: the thread that looks now sees the writes before a signal that was not
            // passed on.
            part.told[word].fetch_and(!bit, Ordering::AcqRel);
        }
    }

    /// Returns whether a signal of the entry is to be passed on.
    fn tell(&self, entry: usize) -> bool {
        let Some(part) = self.part(entry) else { return false };
        let (word, bit) = place(entry);
        part.claimed[word].load(Ordering::Acquire) & bit != 0
            && part.told[word].fetch_or(bit, Ordering::AcqRel) & bit == 0
    }

    fn part(&self, entry: usize) -> Option<&Part> {
        self.parts.get(entry / PART)?.get().map(Box::as_ref)
    }
}

/// The receiver to which the links' thread passes a family's signals.
pub struct Ear {
    pub family: u32,
    pub claims: Arc<Claims>,
    pub commands: Sender<Command>,
    pub wake: Arc<Bell>,
}

impl Ear {
    fn command(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            self.wake.wake_by_ref();
        }
    }
}

impl Beside for Ear {
    fn stirred(&self, entry: u64) {
        let known = u32::try_from(entry).ok().filter(|entry| self.claims.tell(*entry as usize));
        if let Some(entry) = known {
            self.command(Command::Stirred(self.family, Some(entry)));
        }
    }

    fn overflowed(&self) {
        if !self.claims.told.swap(true, Ordering::SeqCst) {
            self.command(Command::Stirred(self.family, None));
        }
    }

    fn spoiled(&self) {
        self.command(Command::Spoiled(self.family));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claimed_entries_are_told_of_once_until_that_was_seen() {
        let claims = Claims::default();
        let last = ENTRIES - 1;
        for entry in [0, 63, 64, last] {
            assert!(!claims.tell(entry as usize), "nobody's");
            claims.claim(entry);
            assert!(claims.tell(entry as usize) && !claims.tell(entry as usize));
            claims.seen(Some(entry));
            assert!(claims.tell(entry as usize));
            claims.give_up(entry);
            claims.seen(Some(entry));
            assert!(!claims.tell(entry as usize));
        }
        claims.claim(7);
        assert!(!claims.tell(6) && !claims.tell(7 + PART) && !claims.tell(usize::MAX));
        // What was under way for a stream that has ended does not keep the next one's.
        assert!(claims.tell(7));
        claims.give_up(7);
        claims.claim(7);
        assert!(claims.tell(7));
        claims.claim(ENTRIES + 5);
        claims.seen(Some(u32::MAX));
    }
}
