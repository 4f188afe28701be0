//! A start that many threads have in common.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The time that threads have to fall asleep before the start.
const SETTLE: Duration = Duration::from_millis(20);

/// A start for which all threads wait, so that they begin together.
pub(crate) struct Gate {
    waiting: AtomicU32,
    start: Barrier,
    threads: u32,
}

impl Gate {
    /// Makes a gate for this number of threads beside the one that opens it.
    pub(crate) fn new(threads: u32) -> Self {
        let start = Barrier::new(threads as usize + 1);
        Self { waiting: AtomicU32::new(0), start, threads }
    }

    /// Waits for the start.
    pub(crate) fn wait(&self) {
        self.waiting.fetch_add(1, Ordering::Release);
        self.start.wait();
    }

    /// Waits until all threads sleep at the gate.
    pub(crate) fn settle(&self) {
        while self.waiting.load(Ordering::Acquire) < self.threads {
            std::thread::yield_now();
        }
        std::thread::sleep(SETTLE);
    }

    /// Has all threads begin. The caller has seen them [`settle`](Self::settle).
    pub(crate) fn open(&self) {
        self.start.wait();
    }
}
