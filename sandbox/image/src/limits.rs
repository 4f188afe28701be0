//! How large an image may be before it is refused, and how long a registry may take.

use std::time::Duration;

/// Bounds on what an image may cost. Everything that an image can make grow has one; the defaults
/// let every ordinary image pass (the largest public machine-learning images are about 20 GiB).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a manifest, index or config document. The OCI distribution specification asks
    /// registries to take manifests of at least 4 MiB.
    pub document_bytes: u64,
    /// Longest that a registry may take for a document or for the head of an answer, redirects and
    /// all: an answer that comes byte by byte ends as well.
    pub document_time: Duration,
    /// Longest that nothing may come of an answer. Layers have no other limit of time.
    pub stall_time: Duration,
    /// Layers of one image.
    pub layers: usize,
    /// Compressed bytes of one layer.
    pub layer_compressed: u64,
    /// Compressed bytes of all layers of an image.
    pub image_compressed: u64,
    /// Uncompressed bytes of one layer.
    pub layer_uncompressed: u64,
    /// Uncompressed bytes of all layers of an image, and also of all files of the merged root
    /// (a sparse file counts with its full length).
    pub image_uncompressed: u64,
    /// How many times its compressed size a layer may grow to, and how many times its uncompressed
    /// size its files may come to (a sparse file counts with its full length). Only enforced above
    /// [`ratio_floor`](Self::ratio_floor), since small layers of zeros compress without bound.
    pub ratio: u64,
    /// Uncompressed bytes below which [`ratio`](Self::ratio) does not matter.
    pub ratio_floor: u64,
    /// Files, folders and links of all layers together, whiteouts included.
    pub entries: usize,
    /// Bytes of names, link targets and extended attributes of all layers together: what the
    /// merged tree keeps in memory.
    pub metadata_bytes: u64,
    /// Bytes of a path in the container, leading slash included. Longer ones than 4,095 no program
    /// could open.
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
            layers: 512,
            layer_compressed: 32 * GIB,
            image_compressed: 64 * GIB,
            layer_uncompressed: 64 * GIB,
            image_uncompressed: 128 * GIB,
            ratio: 200,
            ratio_floor: 256 * MIB,
            entries: 4_000_000,
            metadata_bytes: 512 * MIB,
            path_bytes: 4095,
        }
    }
}

impl Limits {
    /// Uncompressed bytes allowed to a layer of `compressed` bytes.
    pub(crate) fn layer_bytes(&self, compressed: u64) -> u64 {
        self.by_ratio(compressed).min(self.layer_uncompressed)
    }

    /// Uncompressed bytes allowed to an archive that was compressed as a whole to `compressed` bytes.
    pub(crate) fn archive_bytes(&self, compressed: u64) -> u64 {
        self.by_ratio(compressed).min(self.image_uncompressed)
    }

    fn by_ratio(&self, compressed: u64) -> u64 {
        compressed.saturating_mul(self.ratio).max(self.ratio_floor)
    }
}
