//! The layout of a link in numbers: those of the tables in the crate's head.

use crate::Geometry;

/// First word of a link.
pub const MAGIC: u64 = u64::from_le_bytes(*b"slipring");
/// Version of the layout.
pub const VERSION: u64 = 2;
/// Offset of the first ring, that whose consumer is the server; rings begin at multiples of it.
pub const RINGS: usize = 4096;
/// Of a ring: offset of the head.
pub const HEAD: usize = 0;
/// Of a ring: offset of the consumer's word that it sleeps, in the head's line.
pub const ASLEEP: usize = 8;
/// Of a ring: offset of the tail.
pub const TAIL: usize = 64;
/// Of a ring: offset of the descriptors.
pub const DESCRIPTORS: usize = 128;

/// Bytes from a slot to the next.
pub const fn stride(geometry: &Geometry) -> usize {
    geometry.payload as usize + 64
}

/// Of a ring: offset of the slots.
pub const fn data(geometry: &Geometry) -> usize {
    (DESCRIPTORS + 8 * geometry.slots as usize).next_multiple_of(64)
}

/// Bytes of a ring, up to where the next may begin.
pub const fn ring_size(geometry: &Geometry) -> usize {
    (data(geometry) + geometry.slots as usize * stride(geometry)).next_multiple_of(RINGS)
}
