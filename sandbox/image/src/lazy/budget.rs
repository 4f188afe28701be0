//! Memory for requests.
//!
//! The requests of all images of a process have up to 72 MiB in memory for what is wanted, and 72
//! MiB for what is fetched ahead: blobs, and for each request one uncompressed chunk, which is
//! checked before it is written. A request that needs more than 72 MiB for both is alone. Beside
//! these, an image takes about 100 bytes for each chunk of its files.

use std::sync::Arc;

use tokio::sync::{Semaphore, SemaphorePermit};

use super::members::MOST_STREAM;

/// Memory for blobs and chunks, which the images of a process share.
pub(crate) struct Budget {
    wanted: Semaphore,
    ahead: Semaphore,
}

impl Budget {
    /// The unit of a permit, bytes.
    const UNIT: u64 = 1 << 10;

    pub(crate) fn new() -> Arc<Self> {
        let permits = (MOST_STREAM / Self::UNIT) as usize;
        Arc::new(Self { wanted: Semaphore::new(permits), ahead: Semaphore::new(permits) })
    }

    /// Waits for room for `bytes` bytes, which the permit holds.
    pub(crate) async fn room(&self, bytes: u64, urgency: Urgency) -> Option<SemaphorePermit<'_>> {
        let units = bytes.div_ceil(Self::UNIT).min(MOST_STREAM / Self::UNIT) as u32;
        let semaphore = match urgency {
            Urgency::Wanted => &self.wanted,
            Urgency::Ahead => &self.ahead,
        };
        // The semaphores are never closed.
        semaphore.acquire_many(units).await.ok()
    }
}

/// The reason for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// Somebody waits for the members. A failed request is repeated, then they are told.
    Wanted,
    /// Nobody waited when the request began. It is made once.
    Ahead,
}
