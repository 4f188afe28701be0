//! Signals of a family, for the carrier of its streams: links to other engines, or a guest's socket
//! function.
//!
//! A program whose stream ends at the engine reports changes of the stream by a signal in its
//! family's table (`slipway_sgiov_spec::table`), and raises the family's bell if the table says
//! that the carrier sleeps. The carrier knows which stream an entry is, and what a signal means. If
//! two carriers have streams of a family, one of them takes the signals and passes them on
//! ([`Beside`]).
//!
//! With the feature `carrier` there is the frame of a carrier, too: [`Carrier`], its owner's
//! handle, [`Work`], what differs between carriers, and [`Stalls`], by which a carrier leaves out
//! peers whose memory made it sleep.
//!
//! Dependencies: `rustix` for eventfds.

#[cfg(feature = "carrier")]
mod carrier;
#[cfg(feature = "carrier")]
mod mailbox;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use slipway_ram::Lasting;
use slipway_ring::cross::{Signals, Spoiled};
use slipway_ring::sleep::{ANY, SleepWord};
use slipway_sgiov_spec::table;

#[cfg(feature = "carrier")]
pub use self::carrier::{Carrier, Families, NAP, Rest, Work};
#[cfg(feature = "carrier")]
pub use self::mailbox::{CommandSender, NewsReceiver, NewsSender, news};
#[cfg(feature = "carrier")]
pub use slipway_reactor::Stalls;

/// The engine's end of a family's signals: the table, and the bell that is raised when the engine
/// sleeps.
pub struct Family {
    table: Lasting,
    signals: Signals,
    bell: Arc<OwnedFd>,
    beside: Option<Box<dyn Beside>>,
    tenant: Arc<str>,
}

/// Another carrier of the family's streams. A signal can be taken only once, so the carrier that
/// takes signals passes on all of them: it does not know whose an entry is.
pub trait Beside: Send {
    /// Handles a signal that was taken: the number of an entry, as the family says.
    fn stirred(&self, entry: u64);

    /// Handles an overflow: any entry may have changed.
    fn overflowed(&self);

    /// Handles that no more signals follow: the family's counter is invalid, or the carrier that
    /// takes its signals cannot watch its bell.
    fn spoiled(&self);
}

impl Family {
    /// Makes the engine's end over `table`, which has `entries` entries and `links` links. Returns
    /// `None` if the table is too short.
    pub fn new(table: &Lasting, entries: usize, links: usize, bell: Arc<OwnedFd>) -> Option<Self> {
        let (_, rest) = table.split(table::signals(entries, links))?;
        let signals = Signals::new(rest, table::SIGNALS)?;
        (table.len() > table::ENTRIES).then(|| Self {
            table: table.clone(),
            signals,
            bell,
            beside: None,
            tenant: Arc::default(),
        })
    }

    /// Names the family's tenant, which pays if the table makes a carrier sleep. Families for which
    /// this is not called have a tenant without a name, and pay for each other.
    #[must_use]
    pub fn of_tenant(self, tenant: &str) -> Self {
        Self { tenant: tenant.into(), ..self }
    }

    /// Returns the family's tenant.
    pub fn tenant(&self) -> &Arc<str> {
        &self.tenant
    }

    /// Adds another carrier, to which everything that is taken here is passed on.
    #[must_use]
    pub fn with_beside(self, beside: Box<dyn Beside>) -> Self {
        Self { beside: Some(beside), ..self }
    }

    /// Tells the other carrier, if there is one, that nobody takes the family's signals.
    pub fn give_up(self) {
        if let Some(beside) = &self.beside {
            beside.spoiled();
        }
    }

    /// Sets whether the bell must be raised after a signal ([`SleepWord`]). A thread that is about
    /// to sleep passes a full barrier after this call and then looks for signals once more; one
    /// barrier serves any number of families.
    pub fn set_asleep(&self, asleep: bool) {
        let word = SleepWord::new(&self.table.words()[table::ASLEEP / 8]);
        if asleep { word.announce(ANY) } else { word.withdraw() }
    }

    /// Takes the next signal: the number of an entry, as the family says. Returns `None` if there
    /// is none.
    ///
    /// # Errors
    /// [`Spoiled`]: the family's counter is invalid, and no more signals follow.
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

    /// Returns whether a signal found no room since the last call: then any entry may have changed.
    pub fn overflowed(&self) -> bool {
        let word = &self.table.words()[table::OVERFLOW / 8];
        // Acquire: makes visible what the program did before the signal.
        let overflowed = word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::Acquire) != 0;
        if let (true, Some(beside)) = (overflowed, &self.beside) {
            beside.overflowed();
        }
        overflowed
    }

    /// Returns the bell, which is readable after it was raised.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Returns the bell, for a reactor that holds it while it watches it.
    pub fn shared_bell(&self) -> Arc<OwnedFd> {
        self.bell.clone()
    }

    /// Lowers the bell. Returns `false` if its program raises it again and again, so that it stays
    /// readable.
    pub fn lower_bell(&self) -> bool {
        slipway_peer::eventfd::drain(self.bell())
    }
}

/// Raises a non-blocking eventfd that only this process has: a plain write, which needs no resource
/// that others could have used up.
pub fn wake(own: impl AsFd) {
    // Fails if the counter is full: then the eventfd is readable already.
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
