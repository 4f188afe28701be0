//! The shape of a link, and the numbers of its layout as in the tables of the crate's head.

/// The shape of a link, which both rings have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The number of slots of a ring: a power of two, 16 to 32,768.
    pub slots: u32,
    /// The number of bytes that a slot holds: a multiple of 64, 64 to 65,536.
    pub payload: u32,
}

impl Default for Geometry {
    /// Returns 512 slots of 2,048 bytes: about 2 MiB.
    fn default() -> Self {
        Self { slots: 512, payload: 2048 }
    }
}

impl Geometry {
    /// Returns whether a link may have this shape.
    pub fn is_possible(&self) -> bool {
        self.slots.is_power_of_two()
            && (16..=32_768).contains(&self.slots)
            && self.payload.is_multiple_of(64)
            && (64..=65_536).contains(&self.payload)
    }
}

/// The first word of a link.
pub const MAGIC: u64 = u64::from_le_bytes(*b"slipring");
/// The version of the layout.
pub const VERSION: u64 = 2;
/// The offset of the first ring, whose consumer is the server. Rings begin at multiples of this.
pub const RINGS: usize = 4096;
/// The offset of the head in a ring.
pub const HEAD: usize = 0;
/// The offset in a ring of the word that says that the consumer sleeps. It lies in the head's cache
/// line.
pub const ASLEEP: usize = 8;
/// The offset of the tail in a ring.
pub const TAIL: usize = 64;
/// The offset of the descriptors in a ring.
pub const DESCRIPTORS: usize = 128;

/// Returns the number of bytes from one slot to the next.
pub const fn stride(geometry: &Geometry) -> usize {
    geometry.payload as usize + 64
}

/// Returns the offset of the slots in a ring.
pub const fn data(geometry: &Geometry) -> usize {
    (DESCRIPTORS + 8 * geometry.slots as usize).next_multiple_of(64)
}

/// Returns the size of a ring in bytes, up to the place where the next may begin.
pub const fn ring_size(geometry: &Geometry) -> usize {
    (data(geometry) + geometry.slots as usize * stride(geometry)).next_multiple_of(RINGS)
}
