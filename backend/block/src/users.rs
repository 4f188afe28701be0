//! What the disks on one medium have in common, whatever the medium is.

use std::collections::VecDeque;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::uring::{Engine, RING_ENTRIES, Work};
use crate::{DiskError, Request};

/// The disks on a medium.
pub(crate) struct Users {
    /// The size to be taken over.
    blocks: AtomicU64,
    /// The first flush that failed, whose disk it was.
    lost: OnceLock<DiskError>,
    count: AtomicU32,
}

/// What the disks on a medium may have with the kernel at a time, each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// Requests.
    requests: usize,
    /// Bytes that they move; a single request may have more.
    bytes: u64,
}

impl Share {
    /// Of one that has the medium alone: as many as a ring has places.
    const ALONE: Self = Self { requests: RING_ENTRIES as usize, bytes: u64::MAX };
    /// Of one that shares it. What comes after waits for what the medium has: few enough that
    /// somebody else's request does not stand behind hundreds, and enough for a fast drive's full
    /// speed.
    const SHARED: Self = Self { requests: 32, bytes: 1 << 20 };

    /// Whether the kernel may have the first of the `waiting` requests.
    pub fn has_room<J: Work>(self, engine: &Engine<J>, waiting: &VecDeque<Request>) -> bool {
        let running = engine.running();
        let Some(next) = waiting.front().filter(|_| running < self.requests) else {
            return false;
        };
        running == 0 || engine.bytes().saturating_add(engine.moved(next)) <= self.bytes
    }
}

impl Users {
    /// Nobody yet, on a medium of so many blocks.
    pub fn new(blocks: u64) -> Self {
        let (blocks, lost, count) = (AtomicU64::new(blocks), OnceLock::new(), AtomicU32::new(0));
        Self { blocks, lost, count }
    }

    /// There is one disk more.
    pub fn join(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// There is one less.
    pub fn leave(&self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }

    /// What each may have with the kernel.
    pub fn share(&self) -> Share {
        // Who comes or goes at this moment makes a difference to the next request.
        if self.count.load(Ordering::Relaxed) > 1 { Share::SHARED } else { Share::ALONE }
    }

    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Acquire)
    }

    pub fn set_blocks(&self, blocks: u64) {
        self.blocks.store(blocks, Ordering::Release);
    }

    /// A flush failed: what it would have vouched for may be lost.
    pub fn lose(&self, error: DiskError) {
        // The first error stands.
        let _ = self.lost.set(error);
    }

    /// The error of the first flush that failed: that of all later ones.
    pub fn lost(&self) -> Option<DiskError> {
        self.lost.get().copied()
    }
}
