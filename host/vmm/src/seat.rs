//! The state of the CPUs, which their threads ask for before each entry to the guest.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::board::Board;

/// The state that all CPUs are to be in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Wanted {
    /// In the guest, or serving an exit of it.
    Running,
    /// Outside of the guest, until the state changes.
    Paused,
    /// Outside of the guest for good. No other state follows.
    Ended,
}

struct Shared {
    /// A [`Wanted`]. It is stored under the lock of `parked`, so that no CPU misses a change while
    /// it goes to sleep, and read without the lock before each entry to the guest.
    wanted: AtomicU8,
    /// CPUs that are outside of the guest: they wait, or their threads have ended.
    parked: Mutex<usize>,
    changed: Condvar,
}

impl Shared {
    fn parked(&self) -> MutexGuard<'_, usize> {
        self.parked.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The state, and the CPUs that have not left the guest yet. Clones are the same.
#[derive(Clone)]
pub struct Seats {
    shared: Arc<Shared>,
    board: Arc<Board>,
}

impl Seats {
    /// Makes the state of CPUs that are paused. The board is told when one has stopped.
    pub fn new(board: &Arc<Board>) -> Self {
        let shared = Shared {
            wanted: AtomicU8::new(Wanted::Paused as u8),
            parked: Mutex::new(0),
            changed: Condvar::new(),
        };
        Self { shared: Arc::new(shared), board: Arc::clone(board) }
    }

    /// Changes the state. CPUs in the guest have to be kicked out of it by the caller. Returns
    /// `false` if the state was `Ended`.
    pub fn set(&self, wanted: Wanted) -> bool {
        let parked = self.shared.parked();
        if self.is(Wanted::Ended) {
            return false;
        }
        self.shared.wanted.store(wanted as u8, Ordering::SeqCst);
        drop(parked);
        self.shared.changed.notify_all();
        true
    }

    /// Returns whether the state is `wanted`.
    pub fn is(&self, wanted: Wanted) -> bool {
        self.shared.wanted.load(Ordering::SeqCst) == wanted as u8
    }

    /// Returns the number of CPUs that are outside of the guest.
    pub fn parked(&self) -> usize {
        *self.shared.parked()
    }

    /// Waits, as one CPU, until the state is no longer `Paused`. Returns whether it is `Running`.
    pub fn may_run(&self) -> bool {
        if self.is(Wanted::Running) {
            return true;
        }
        let mut parked = self.shared.parked();
        *parked += 1;
        self.board.tell();
        while self.is(Wanted::Paused) {
            parked = self.shared.changed.wait(parked).unwrap_or_else(|p| p.into_inner());
        }
        *parked -= 1;
        self.is(Wanted::Running)
    }

    /// Counts a CPU as one that is outside of the guest for good.
    pub fn leave(&self) {
        *self.shared.parked() += 1;
        self.board.tell();
    }
}
