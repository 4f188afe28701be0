//! Split virtqueues (section 2.7).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{U16, U32, U64};

/// Most descriptors of a queue (section 2.7: the number is a power of two, at most 32768).
pub const MAX_SIZE: u16 = 32_768;
/// Bytes of a descriptor.
pub const DESCRIPTOR: usize = 16;
/// Bytes of an element of the used ring.
pub const USED_ELEMENT: usize = 8;

/// Flags of a descriptor (section 2.7.5).
pub mod flag {
    /// The chain continues at `next`.
    pub const NEXT: u16 = 1;
    /// The device writes the buffer; without this flag, it reads the buffer.
    pub const WRITE: u16 = 2;
    /// The buffer is a table of descriptors.
    pub const INDIRECT: u16 = 4;
}

/// `struct virtq_desc` (section 2.7.5).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Descriptor {
    /// Address of the buffer.
    pub address: U64,
    /// Bytes of the buffer.
    pub len: U32,
    /// Flags, see [`flag`].
    pub flags: U16,
    /// Index of the next descriptor of the chain, with [`flag::NEXT`].
    pub next: U16,
}

/// `struct virtq_used_elem` (section 2.7.8).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct UsedElement {
    /// Index of the chain's first descriptor.
    pub id: U32,
    /// Bytes that the device wrote to the chain's buffers.
    pub len: U32,
}

/// Returns the bytes of the descriptor area of a queue with `size` descriptors (section 2.7).
pub const fn descriptor_area(size: u16) -> usize {
    DESCRIPTOR * size as usize
}

/// The available ring, or driver area (section 2.7.6): flags, index, ring, used_event.
pub mod available {
    /// Alignment of the available ring, bytes.
    pub const ALIGN: u64 = 2;
    /// Offset of flags, 16 bits.
    pub const FLAGS: usize = 0;
    /// Offset of idx, 16 bits: the position of the driver's next entry, modulo the queue's size.
    pub const INDEX: usize = 2;
    /// Offset of ring, 16 bits an entry.
    pub const RING: usize = 4;
    /// Flag: the driver wants no interrupts. Only without event index.
    pub const NO_INTERRUPT: u16 = 1;

    /// Returns the offset of entry `index`, which wraps.
    pub const fn entry(index: u16, size: u16) -> usize {
        RING + 2 * (index % size) as usize
    }

    /// Returns the offset of used_event (section 2.7.7).
    pub const fn used_event(size: u16) -> usize {
        RING + 2 * size as usize
    }

    /// Returns the bytes of the area for a queue of `size` descriptors.
    pub const fn area(size: u16) -> usize {
        used_event(size) + 2
    }
}

/// The used ring, or device area (section 2.7.8): flags, index, ring, avail_event.
pub mod used {
    use super::USED_ELEMENT;

    /// Alignment of the used ring, bytes.
    pub const ALIGN: u64 = 4;
    /// Offset of flags, 16 bits.
    pub const FLAGS: usize = 0;
    /// Offset of idx, 16 bits: the position of the device's next element, modulo the queue's size.
    pub const INDEX: usize = 2;
    /// Offset of ring, 8 bytes an element.
    pub const RING: usize = 4;
    /// Flag: the device wants no notifications. Only without event index.
    pub const NO_NOTIFY: u16 = 1;

    /// Returns the offset of element `index`, which wraps.
    pub const fn entry(index: u16, size: u16) -> usize {
        RING + USED_ELEMENT * (index % size) as usize
    }

    /// Returns the offset of avail_event (section 2.7.10).
    pub const fn avail_event(size: u16) -> usize {
        RING + USED_ELEMENT * size as usize
    }

    /// Returns the bytes of the area for a queue of `size` descriptors.
    pub const fn area(size: u16) -> usize {
        avail_event(size) + 2
    }
}

/// Alignment of the descriptor area, bytes (section 2.7).
pub const DESCRIPTOR_ALIGN: u64 = 16;

/// Returns whether an index that moved from `old` to `new` has passed `event`, so that the side
/// that wrote `event` is to be notified (section 2.7.7, `vring_need_event`).
pub const fn passes(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_the_specification() {
        assert_eq!(size_of::<Descriptor>(), DESCRIPTOR);
        assert_eq!(size_of::<UsedElement>(), USED_ELEMENT);
        // Section 2.7: 16 bytes a descriptor, 6 + 2 an available entry, 6 + 8 a used element.
        assert_eq!(descriptor_area(256), 4096);
        assert_eq!(available::area(256), 6 + 512);
        assert_eq!(used::area(256), 6 + 2048);
        assert_eq!((available::entry(257, 256), used::entry(257, 256)), (6, 12));
    }

    #[test]
    fn an_event_is_passed_when_the_index_steps_over_it() {
        for old in [0, 7, 0x7fff, 0x8000, 0xfff0, 0xffff_u16] {
            for steps in 0..40_u16 {
                for event in (0..60_u16).map(|at| old.wrapping_sub(10).wrapping_add(at)) {
                    let ahead = event.wrapping_sub(old);
                    let expected = ahead < steps;
                    assert_eq!(passes(event, old, old.wrapping_add(steps)), expected);
                }
            }
        }
    }
}
