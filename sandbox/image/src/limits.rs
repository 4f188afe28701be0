//! Limits on the size of an image and on the time of a registry.
//!
//! A new limit is a field of `Limits` with its default. Where it is reached the error is
//! `Error::too_large`, before anything is allocated. No setting changes limits: callers take the
//! defaults, and tests smaller ones (`src/tests/hostile.rs`, `hostile_registry.rs`).

use std::time::Duration;

/// Limits on the cost of an image. Everything that an image can make grow has one. The defaults let
/// every ordinary image pass (the largest public machine-learning images are about 20 GiB).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// The most bytes of a manifest, index or config document. The OCI distribution specification
    /// asks registries to accept manifests of at least 4 MiB.
    pub document_bytes: u64,
    /// The longest time for a document or for the head of an answer, including redirects. It also
    /// ends an answer that arrives byte by byte.
    pub document_time: Duration,
    /// The longest time without a byte of an answer.
    pub stall_time: Duration,
    /// The time that is waited for bytes of a layer after which they are compared with
    /// [`least_rate`](Self::least_rate). Layers have no other time limit.
    pub rate_time: Duration,
    /// The least bytes of a layer in a second, on average over [`rate_time`](Self::rate_time).
    /// Three layers of an image are fetched at once.
    pub least_rate: u64,
    /// The longest time for the indexes of all layers of an image that is pulled lazily.
    pub indexes_time: Duration,
    /// The most layers of one image.
    pub layers: usize,
    /// The most compressed bytes of one layer.
    pub layer_compressed: u64,
    /// The most compressed bytes of all layers of an image.
    pub image_compressed: u64,
    /// The most uncompressed bytes of one layer.
    pub layer_uncompressed: u64,
    /// The most uncompressed bytes of all layers of an image, and also of all files of the merged
    /// root (a sparse file counts with its full length).
    pub image_uncompressed: u64,
    /// The largest ratio of a layer's uncompressed to its compressed size, and of its files' total
    /// size to its uncompressed size (a sparse file counts with its full length). It is enforced
    /// only above [`ratio_floor`](Self::ratio_floor), since small layers of zeros compress without
    /// bound.
    pub ratio: u64,
    /// The uncompressed bytes below which [`ratio`](Self::ratio) is not enforced.
    pub ratio_floor: u64,
    /// The most files, folders and links of all layers together, including whiteouts.
    pub entries: usize,
    /// The most bytes of memory for the names, link targets and extended attributes of all layers
    /// together, and for the inodes of the merged tree. A folder of which an archive is made has
    /// the same limit.
    pub metadata_bytes: u64,
    /// The most bytes of a path in the container, including the leading slash. No program could
    /// open a path of more than 4,095.
    pub path_bytes: usize,
}

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

impl Default for Limits {
    fn default() -> Self {
        Self {
            document_bytes: 4 * MIB,
            document_time: Duration::from_secs(120),
            stall_time: Duration::from_secs(60),
            rate_time: Duration::from_secs(300),
            least_rate: 16 << 10,
            indexes_time: Duration::from_secs(600),
            layers: 512,
            layer_compressed: 32 * GIB,
            image_compressed: 64 * GIB,
            layer_uncompressed: 64 * GIB,
            image_uncompressed: 128 * GIB,
            ratio: 200,
            ratio_floor: 256 * MIB,
            entries: 4_000_000,
            metadata_bytes: 2 * GIB,
            path_bytes: 4095,
        }
    }
}

impl Limits {
    /// Returns the uncompressed bytes allowed for a layer of `compressed` bytes.
    pub(crate) fn layer_bytes(&self, compressed: u64) -> u64 {
        self.by_ratio(compressed).min(self.layer_uncompressed)
    }

    /// Returns the uncompressed bytes allowed for an archive that was compressed as a whole to
    /// `compressed` bytes.
    pub(crate) fn archive_bytes(&self, compressed: u64) -> u64 {
        self.by_ratio(compressed).min(self.image_uncompressed)
    }

    /// Returns the bytes allowed for the index of a layer, and for those of all layers as they are
    /// sent. The index is in memory as text while the tree grows from it.
    pub(crate) fn index_bytes(&self) -> u64 {
        self.metadata_bytes / 4
    }

    fn by_ratio(&self, compressed: u64) -> u64 {
        compressed.saturating_mul(self.ratio).max(self.ratio_floor)
    }
}
