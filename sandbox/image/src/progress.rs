//! What happens while an image is fetched and built, for whoever draws it.

use crate::{Digest, Reference};

/// Receives [`Event`]s of a pull or an import.
///
/// Called from several threads at once and between reads of at most a few hundred KiB: an
/// implementation must be quick and must not block.
pub trait Progress: Send + Sync {
    /// Something happened.
    fn event(&self, event: Event<'_>);
}

/// Shows nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn event(&self, _: Event<'_>) {}
}

/// One step of a pull or an import, in the order in which they come; events of different layers
/// interleave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The registry is asked for the manifest.
    Resolving(&'a Reference),
    /// Another process or task works on the same image; this one waits for it.
    Waiting(&'a Digest),
    /// The layers are known.
    Layers {
        /// How many.
        count: usize,
        /// Compressed bytes of all.
        bytes: u64,
    },
    /// A layer begins to arrive.
    LayerStarted {
        /// Position, 0 is the lowest layer.
        index: usize,
        /// Its digest as the manifest has it.
        digest: &'a Digest,
        /// Its compressed bytes.
        bytes: u64,
    },
    /// More of a layer has arrived.
    LayerBytes {
        /// Position.
        index: usize,
        /// Compressed bytes so far.
        done: u64,
    },
    /// A layer is there and both its digests are right.
    LayerFinished {
        /// Position.
        index: usize,
    },
    /// The layers are being merged.
    Merging,
    /// The file system is being written.
    Building {
        /// Bytes of file data handed to mkfs.erofs so far.
        done: u64,
        /// Bytes of file data in all.
        total: u64,
    },
    /// The image is in the cache.
    Finished(&'a Digest),
}
