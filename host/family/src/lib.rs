//! A family's signals, from the side of whoever carries its streams: links to other engines, or a guest's socket
//! function.
//!
//! A program whose stream ends at the engine says by a signal in its family's table
//! (`slipway_sgiov_spec::table`) that the stream stirred, and raises the family's bell when the table says that
//! nobody is looking. What a signal means, and which stream an entry is, is the carrier's affair. Where two carry
//! streams of a family, one of them takes its signals and passes them on ([`Beside`]).
//!
//! Dependencies: `rustix` for the one write(2).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use slipway_ram::Lasting;
use slipway_ring::cross::{Signals, Spoiled};
use slipway_sgiov_spec::table;

/// What a family tells the engine by: its table, and the bell that it raises when the engine sleeps.
pub struct Family {
    table: Lasting,
    signals: Signals,
    bell: Arc<OwnedFd>,
    beside: Option<Box<dyn Beside>>,
}

/// Somebody else who has streams of a family. A signal can be taken once only, so who takes them passes them on: all of
/// them, as it does not know whose an entry is.
pub trait Beside: Send {
    /// A signal was taken: the number of an entry, as the family says.
    fn stirred(&self, entry: u64);

    /// Any entry may have stirred.
    fn overflowed(&self);

    /// The family's counter cannot be. It has no more signals.
    fn spoiled(&self);
}

impl Family {
    /// Over the `table`, which has so many entries and links. None: it is too short.
    pub fn new(table: &Lasting, entries: usize, links: usize, bell: Arc<OwnedFd>) -> Option<Self> {
        let (_, rest) = table.split(table::signals(entries, links))?;
        let signals = Signals::new(rest, table::SIGNALS)?;
        (table.len() > table::ENTRIES).then(|| Self {
            table: table.clone(),
            signals,
            bell,
            beside: None,
        })
    }

    /// The same, with somebody else to whom everything is passed on that is taken here.
    #[must_use]
    pub fn with_beside(self, beside: Box<dyn Beside>) -> Self {
        Self { beside: Some(beside), ..self }
    }

    /// Says whether the bell is to be raised after a signal. Who is about to sleep passes a full barrier and looks
    /// once more after it; who signals passes one as well, before it looks at this.
    pub fn set_asleep(&self, asleep: bool) {
        self.table.words()[table::ASLEEP / 8].store(asleep.into(), Ordering::Relaxed);
    }

    /// The next signal: the number of an entry, as the family says.
    ///
    /// # Errors
    /// [`Spoiled`]: the family's counter cannot be. It has no more signals.
    pub fn take(&mut self) -> Result<Option<u64>, Spoiled> {
        let taken = self.signals.take();
        if let Some(beside) = &self.beside {
            match taken {
                Ok(Some(entry)) => beside.stirred(entry),
                Ok(None) => {}
                Err(Spoiled) => beside.spoiled(),
            }
        }
        taken
    }

    /// Whether a signal found no room since this was asked last: any entry may have stirred.
    pub fn overflowed(&self) -> bool {
        let word = &self.table.words()[table::OVERFLOW / 8];
        // Acquire: what was done before the signal is seen.
        let overflowed = word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::Acquire) != 0;
        if let (true, Some(beside)) = (overflowed, &self.beside) {
            beside.overflowed();
        }
        overflowed
    }

    /// What is readable after the bell was raised.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Lowers the bell. False: its program sees to it that it never is lower.
    pub fn lower_bell(&self) -> bool {
        slipway_peer::eventfd::drain(self.bell())
    }
}

/// Raises an eventfd that this process alone has, and that does not block: a plain write, which needs nothing that others
/// could have taken.
pub fn wake(own: impl AsFd) {
    // Fails when the counter is full: then it is readable already.
    let _ = rustix::io::write(own, &1_u64.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use std::sync::Mutex;

    use super::*;

    struct Heard(Arc<Mutex<Vec<String>>>);

    impl Beside for Heard {
        fn stirred(&self, entry: u64) {
            self.0.lock().unwrap().push(entry.to_string());
        }

        fn overflowed(&self) {
            self.0.lock().unwrap().push("overflowed".into());
        }

        fn spoiled(&self) {
            self.0.lock().unwrap().push("spoiled".into());
        }
    }

    #[test]
    fn a_table_that_is_too_short_is_none_and_signals_come_in_turn() {
        let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let bytes = table::bytes(16, 2);
        assert!(Family::new(&Lasting::heap(bytes - 4096), 16, 2, bell.clone()).is_none());
        let memory = Lasting::heap(bytes);
        let heard = Arc::<Mutex<_>>::default();
        let family = Family::new(&memory, 16, 2, bell).unwrap();
        let mut family = family.with_beside(Box::new(Heard(heard.clone())));
        let (_, signals) = memory.split(table::signals(16, 2)).unwrap();
        let mut program = Signals::new(signals.clone(), table::SIGNALS).unwrap();
        for entry in [3, 5] {
            program.raise(entry).unwrap().unwrap();
        }
        assert_eq!(family.take(), Ok(Some(3)));
        assert_eq!(family.take(), Ok(Some(5)));
        assert_eq!(family.take(), Ok(None));
        family.set_asleep(true);
        assert_eq!(memory.words()[table::ASLEEP / 8].load(Ordering::Relaxed), 1);
        memory.words()[table::OVERFLOW / 8].store(1, Ordering::Relaxed);
        assert!(family.overflowed() && !family.overflowed());
        signals.words()[0].store(u64::MAX, Ordering::Relaxed);
        assert_eq!(family.take(), Err(Spoiled));
        assert_eq!(*heard.lock().unwrap(), ["3", "5", "overflowed", "spoiled"]);
    }
}
