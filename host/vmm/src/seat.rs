//! The state of the CPUs, which their threads ask for before each entry to the guest.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use crate::board::Board;
use crate::lock::lock;
use crate::registers::CpuState;
use crate::{Error, Result};

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
    parked: Mutex<Parked>,
    changed: Condvar,
    /// Held by the thread that saves: of two saves at once, one would take the other's states.
    saving: Mutex<()>,
}

/// The CPUs outside of the guest.
#[derive(Default)]
struct Parked {
    /// CPUs that are outside of the guest: they wait, are not there, or their threads have ended.
    count: usize,
    /// A thread has ended.
    left: bool,
    /// CPUs that have to save their state, a bit each.
    asked: u32,
    /// The states that CPUs have saved, by the CPUs' numbers.
    saved: BTreeMap<u32, Result<CpuState>>,
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
            parked: Mutex::default(),
            changed: Condvar::new(),
            saving: Mutex::default(),
        };
        Self { shared: Arc::new(shared), board: Arc::clone(board) }
    }

    /// Changes the state. CPUs in the guest have to be kicked out of it by the caller. Returns
    /// `false` if the state was `Ended`.
    pub fn set(&self, wanted: Wanted) -> bool {
        let parked = lock(&self.shared.parked);
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
        let parked = lock(&self.shared.parked);
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
        lock(&self.shared.parked).count
    }

    /// Waits, as CPU `cpu`, until it may be in the guest, and saves its state by `save` when it is
    /// asked to meanwhile. Returns `false` if the state is `Ended`.
    pub fn may_run(&self, cpu: u32, save: impl Fn() -> Result<CpuState>) -> bool {
        if self.is_running(cpu) {
            return true;
        }
        let bit = 1 << (cpu & 31);
        let mut parked = lock(&self.shared.parked);
        parked.count += 1;
        self.board.tell();
        while !self.is_running(cpu) && !self.is(Wanted::Ended) {
            if parked.asked & bit == 0 {
                parked = self.shared.changed.wait(parked).unwrap_or_else(|p| p.into_inner());
                continue;
            }
            parked.asked &= !bit;
            drop(parked);
            let saved = save();
            parked = lock(&self.shared.parked);
            parked.saved.insert(cpu, saved);
            self.shared.changed.notify_all();
        }
        parked.count -= 1;
        self.is(Wanted::Running)
    }

    /// Has each of `count` CPUs save its state, and waits for all of them. A CPU is outside of the
    /// guest, so none takes long. Waits for another thread that saves before.
    ///
    /// # Errors
    /// [`Error::State`] if the CPUs are not all paused, or are told to run meanwhile;
    /// [`Error::Kvm`].
    pub fn save(&self, count: u32) -> Result<Vec<CpuState>> {
        let failed = |what: &str| Err(Error::State(what.into()));
        let _saving = lock(&self.shared.saving);
        let mut parked = lock(&self.shared.parked);
        if !self.is(Wanted::Paused) || parked.count != count as usize || parked.left {
            return failed("the guest is not stopped");
        }
        parked.saved.clear();
        parked.asked = first(count);
        self.shared.changed.notify_all();
        while parked.saved.len() < count as usize {
            if !self.is(Wanted::Paused) || parked.left {
                parked.asked = 0;
                return failed("the guest was told to run while it was saved");
            }
            parked = self.shared.changed.wait(parked).unwrap_or_else(|p| p.into_inner());
        }
        std::mem::take(&mut parked.saved).into_values().collect()
    }

    /// Counts a CPU as one that is outside of the guest for good.
    pub fn leave(&self) {
        let mut parked = lock(&self.shared.parked);
        (parked.count, parked.left) = (parked.count + 1, true);
        drop(parked);
        self.shared.changed.notify_all();
        self.board.tell();
    }
}

/// Returns the bits of the first `count` CPUs, at most 32.
pub fn first(count: u32) -> u32 {
    u32::MAX.checked_shr(32 - count.min(32)).unwrap_or(0)
}
