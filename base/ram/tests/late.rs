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
use states::Taken;

/// A granule of one byte. Loom reports accesses to it that are not ordered.
struct Granule {
    state: AtomicU8,
    byte: UnsafeCell<u8>,
}

// SAFETY: loom checks that accesses to the byte are ordered.
unsafe impl Sync for Granule {}
// SAFETY: as above.
unsafe impl Send for Granule {}

impl Granule {
    fn dirty() -> Arc<Self> {
        Arc::new(Self { state: AtomicU8::new(states::DIRTY), byte: UnsafeCell::new(7) })
    }

    fn set(&self, value: u8) {
        // SAFETY: the pointer is valid, and loom checks that nobody else has it.
        self.byte.with_mut(|byte| unsafe { *byte = value });
    }

    /// A device: takes the granule and returns its byte. Returns `None` if the granule is busy.
    fn try_take(&self) -> Option<u8> {
        match states::take(&self.state) {
            Taken::Clean => {}
            Taken::Mine => {
                self.set(0);
                states::finish(&self.state, states::CLEAN);
            }
            Taken::Busy => return None,
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
