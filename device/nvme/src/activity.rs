//! The figures of I/O commands, for other threads.

use std::sync::{Arc, OnceLock};

use crate::health::{Counters, Published};

/// The I/O commands of a controller since it was made in this process, or took over a state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Io {
    /// Commands that read, whatever their status.
    pub reads: u64,
    /// Bytes that were read, in whole units of 512.
    pub read_bytes: u64,
    /// Commands that wrote, whatever their status.
    pub writes: u64,
    /// Bytes that were written, in whole units of 512.
    pub written_bytes: u64,
    /// Commands that ended with a status of the type Media and Data Integrity Errors.
    pub media_errors: u64,
}

/// A handle with which other threads read a controller's [`Io`], without a word to the controller.
/// It is cheap to clone; after the controller is gone it has the last figures.
#[derive(Clone, Debug, Default)]
pub struct Activity {
    home: Arc<Published>,
    /// One for each lane, once there are lanes.
    lanes: Arc<OnceLock<Vec<Arc<Published>>>>,
}

impl Activity {
    /// Returns the figures. They lag behind by one poll.
    pub fn get(&self) -> Io {
        let mut all = self.home.get();
        self.lanes.get().into_iter().flatten().for_each(|lane| all.add(&lane.get()));
        let Counters { sectors_read, sectors_written, reads, writes, media_errors } = all;
        Io {
            reads,
            read_bytes: sectors_read.saturating_mul(512),
            writes,
            written_bytes: sectors_written.saturating_mul(512),
            media_errors,
        }
    }

    /// Stores the counters of the controller's own thread.
    pub(crate) fn put(&self, counters: &Counters) {
        self.home.put(counters);
    }

    /// Adds the lanes, which are made once.
    pub(crate) fn set_lanes(&self, lanes: Vec<Arc<Published>>) {
        let _ = self.lanes.set(lanes);
    }
}
