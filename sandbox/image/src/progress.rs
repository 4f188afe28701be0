//! Events of fetching and building an image, for progress displays.

use crate::{Digest, Reference};

/// A receiver of [`Event`]s of a pull or an import.
///
/// It is called from several threads at once and between reads of at most a few hundred KiB, so an
/// implementation must be quick and must not block.
pub trait Progress: Send + Sync {
    /// Receives one event.
    fn event(&self, event: Event<'_>);
}

/// A receiver that ignores every event.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn event(&self, _: Event<'_>) {}
}

/// One step of a pull or an import, in the order of the events. Events of different layers
/// interleave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The registry is being asked for the manifest.
    Resolving(&'a Reference),
    /// Another process or task works on the same image; this one waits for it.
    Waiting(&'a Digest),
    /// The list of layers is known.
    Layers {
        /// The number of layers.
        count: usize,
        /// The compressed bytes of all layers.
        bytes: u64,
    },
    /// A layer begins to arrive.
    LayerStarted {
        /// The layer's position; 0 is the lowest layer.
        index: usize,
        /// The layer's digest in the manifest.
        digest: &'a Digest,
        /// The layer's compressed bytes.
        bytes: u64,
    },
    /// More bytes of a layer have arrived.
    LayerBytes {
        /// The layer's position.
        index: usize,
        /// The compressed bytes so far.
        done: u64,
    },
    /// A layer is complete and both its digests are right.
    LayerFinished {
        /// The layer's position.
        index: usize,
    },
    /// The layers are being merged.
    Merging,
    /// The file system is being written.
    Building {
        /// The bytes of file data written so far.
        done: u64,
        /// The bytes of file data in total.
        total: u64,
    },
    /// The image is in the cache.
    Finished(&'a Digest),
}
