//! Loom goes through every interleaving of those that may meet a granule first:
//! `src/late/states.rs`, as it is, on loom's atomics.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do
#![allow(unsafe_code)] // the granule's byte, whose accesses loom checks

#[allow(dead_code)] // a granule that is populated or recycled has one user
#[path = "../src/late/states.rs"]
mod states;

/// The atomics that `states` uses, as loom's.
mod outside {
    pub use loom::sync::atomic::{AtomicU8, Ordering};
}

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use outside::AtomicU8;
use states::TakeOutcome;

/// A granule of one byte. Loom reports accesses to it that are not ordered.
struct Granule {
    state: AtomicU8,
    byte: UnsafeCell<u8>,
    /// The byte with which the user begins.
    first: u8,
}

/// The template's byte.
const TEMPLATE: u8 = 5;

// SAFETY: loom checks that accesses to the byte are ordered.
unsafe impl Sync for Granule {}
// SAFETY: as above.
unsafe impl Send for Granule {}

impl Granule {
    fn dirty() -> Arc<Self> {
        Arc::new(Self::new(7, 0))
    }

    fn set(&self, value: u8) {
        // SAFETY: the pointer is valid, and loom checks that nobody else has it.
        self.byte.with_mut(|byte| unsafe { *byte = value });
    }

    /// A granule whose user begins with the template's byte.
    fn shared() -> Arc<Self> {
        Arc::new(Self { state: AtomicU8::new(states::SHARED), ..Self::new(0, TEMPLATE) })
    }

    fn new(byte: u8, first: u8) -> Self {
        Self { state: AtomicU8::new(states::DIRTY), byte: UnsafeCell::new(byte), first }
    }

    /// A device that only looks: it copies nothing, and has the template's byte where nobody was
    /// given the granule.
    fn look(&self) -> u8 {
        if !states::is_clean(&self.state) {
            return self.first;
        }
        // SAFETY: the pointer is valid, and loom checks that nobody writes.
        self.byte.with(|byte| unsafe { *byte })
    }

    /// A device: takes the granule and returns its byte. Returns `None` if the granule is busy.
    fn try_take(&self) -> Option<u8> {
        match states::take(&self.state) {
            TakeOutcome::Clean => {}
            TakeOutcome::Mine => {
                self.set(self.first);
                states::finish(&self.state, states::CLEAN);
            }
            TakeOutcome::Busy => return None,
        }
        assert!(states::is_clean(&self.state));
        // SAFETY: the pointer is valid, and loom checks that nobody writes.
        Some(self.byte.with(|byte| unsafe { *byte }))
    }

    /// The same, until the granule is not busy.
    fn take(&self) -> u8 {
        loop {
            match self.try_take() {
                Some(byte) => return byte,
                None => loom::thread::yield_now(),
            }
        }
    }

    /// The thread that zeroes ahead.
    fn ahead(&self) {
        if states::begin_ahead(&self.state) {
            self.set(0);
            states::finish(&self.state, states::UNTOUCHED);
        }
    }
}

fn spawn(
    granule: &Arc<Granule>,
    work: impl FnOnce(&Granule) + Send + 'static,
) -> loom::thread::JoinHandle<()> {
    let granule = granule.clone();
    loom::thread::spawn(move || work(&granule))
}

#[test]
fn whoever_takes_a_granule_sees_zeros() {
    loom::model(|| {
        let granule = Granule::dirty();
        let ahead = spawn(&granule, Granule::ahead);
        let device = spawn(&granule, |granule| assert_ne!(granule.try_take(), Some(7)));
        assert_eq!(granule.take(), 0);
        ahead.join().unwrap();
        device.join().unwrap();
    });
}

#[test]
fn no_other_thread_zeroes_what_a_user_wrote() {
    loom::model(|| {
        let granule = Granule::dirty();
        let ahead = spawn(&granule, Granule::ahead);
        assert_eq!(granule.take(), 0);
        granule.set(9);
        ahead.join().unwrap();
        assert_eq!(granule.take(), 9);
    });
}

#[test]
fn whoever_takes_a_granule_of_a_fork_sees_the_template() {
    loom::model(|| {
        let granule = Granule::shared();
        let device = spawn(&granule, |granule| {
            assert!([None, Some(TEMPLATE)].contains(&granule.try_take()));
        });
        let reader = spawn(&granule, |granule| assert_eq!(granule.look(), TEMPLATE));
        assert_eq!(granule.take(), TEMPLATE);
        device.join().unwrap();
        reader.join().unwrap();
    });
}

#[test]
fn no_other_thread_copies_over_what_a_user_of_a_fork_wrote() {
    loom::model(|| {
        let granule = Granule::shared();
        let ahead = spawn(&granule, Granule::ahead);
        let device = spawn(&granule, |granule| assert_ne!(granule.try_take(), Some(0)));
        assert_eq!(granule.take(), TEMPLATE);
        // The other device has taken the granule, or finds it clean: it writes nothing from now on.
        device.join().unwrap();
        granule.set(9);
        ahead.join().unwrap();
        assert_eq!((granule.take(), granule.look()), (9, 9));
    });
}
