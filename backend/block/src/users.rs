//! The state that the disks on one medium share, whatever the medium is.

use std::collections::VecDeque;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::uring::{Engine, RING_ENTRIES, UringRequest};
use crate::{DiskError, Request};

/// The number of disks on a medium, and the state that they share.
pub(crate) struct Users {
    /// The number of blocks, which each disk takes over at its next refresh.
    blocks: AtomicU64,
    /// The error of the first flush that failed, on whichever disk.
    lost: OnceLock<DiskError>,
    count: AtomicU32,
}

/// The load that each disk on a medium may have in the kernel at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// The largest number of requests.
    requests: usize,
    /// The largest number of bytes that the requests move; a single request may have more.
    bytes: u64,
}

impl Share {
    /// The share of a disk that has the medium alone: as many requests as the ring has entries.
    const ALONE: Self = Self { requests: RING_ENTRIES as usize, bytes: u64::MAX };
    /// The share of a disk on a shared medium. A new request waits for those that the medium has:
    /// the limit is low enough that another disk's request does not wait behind hundreds, and high
    /// enough for a fast drive's full speed.
    const SHARED: Self = Self { requests: 32, bytes: 1 << 20 };

    /// Returns whether the kernel may have the first of the `waiting` requests.
    pub fn has_room<J: UringRequest>(
        self,
        engine: &Engine<J>,
        waiting: &VecDeque<Request>,
    ) -> bool {
        let running = engine.running();
        let Some(next) = waiting.front().filter(|_| running < self.requests) else {
            return false;
        };
        running == 0 || engine.bytes().saturating_add(engine.moved(next)) <= self.bytes
    }
}

impl Users {
    /// Creates the state for a medium of `blocks` blocks, without any disk yet.
    pub fn new(blocks: u64) -> Self {
        let (blocks, lost, count) = (AtomicU64::new(blocks), OnceLock::new(), AtomicU32::new(0));
        Self { blocks, lost, count }
    }

    /// Counts one more disk.
    pub fn join(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts one disk less.
    pub fn leave(&self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns each disk's share.
    pub fn share(&self) -> Share {
        // A disk that joins or leaves concurrently affects only later requests.
        if self.count.load(Ordering::Relaxed) > 1 { Share::SHARED } else { Share::ALONE }
    }

    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Acquire)
    }

    pub fn set_blocks(&self, blocks: u64) {
        self.blocks.store(blocks, Ordering::Release);
    }

    /// Records that a flush failed: the writes that it was to cover may be lost.
    pub fn lose(&self, error: DiskError) {
        // The first error stands.
        let _ = self.lost.set(error);
    }

    /// Returns the error of the first flush that failed, with which all later flushes fail.
    pub fn lost(&self) -> Option<DiskError> {
        self.lost.get().copied()
    }
}
