//! The state of the CPUs, which their threads ask for before each entry to the guest.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
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
    /// The CPUs that the machine has at present, a bit each; stored and read as `wanted` is.
    present: AtomicU32,
    /// CPUs that are outside of the guest: they wait, are not there, or their threads have ended.
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
    /// Makes the state of CPUs that are paused, of which those in `present`, a bit each, are there.
    /// The board is told when one has stopped.
    pub fn new(board: &Arc<Board>, present: u32) -> Self {
        let shared = Shared {
            wanted: AtomicU8::new(Wanted::Paused as u8),
            present: AtomicU32::new(present),
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

    /// Adds CPU `cpu`, 0 to 31, or takes it away. The caller has to kick it out of the guest then.
    pub fn set_present(&self, cpu: u32, present: bool) {
        let parked = self.shared.parked();
        let bit = 1 << (cpu & 31);
        if present {
            self.shared.present.fetch_or(bit, Ordering::SeqCst);
        } else {
            self.shared.present.fetch_and(!bit, Ordering::SeqCst);
        }
        drop(parked);
        self.shared.changed.notify_all();
    }

    fn has(&self, cpu: u32) -> bool {
        self.shared.present.load(Ordering::SeqCst) >> (cpu & 31) & 1 != 0
    }

    /// Returns whether CPU `cpu` may be in the guest.
    pub fn is_running(&self, cpu: u32) -> bool {
        self.is(Wanted::Running) && self.has(cpu)
    }

    /// Returns whether the state is `wanted`.
    pub fn is(&self, wanted: Wanted) -> bool {
        self.shared.wanted.load(Ordering::SeqCst) == wanted as u8
    }

    /// Returns the number of CPUs that are outside of the guest.
    pub fn parked(&self) -> usize {
        *self.shared.parked()
    }

    /// Waits, as CPU `cpu`, until it may be in the guest. Returns `false` if the state is `Ended`.
    pub fn may_run(&self, cpu: u32) -> bool {
        if self.is_running(cpu) {
            return true;
        }
        let mut parked = self.shared.parked();
        *parked += 1;
        self.board.tell();
        while !self.is_running(cpu) && !self.is(Wanted::Ended) {
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
