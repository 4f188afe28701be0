//! Scatter gather lists (section 4.4).

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of an SGL descriptor.
pub const DESCRIPTOR: usize = 16;

open_enum! {
    /// SGL Descriptor Type (section 4.4, "SGL Descriptor Types").
    DescriptorType(u8) {
        /// Data Block: the location of data.
        DataBlock = 0x0,
        /// Bit Bucket: a length of data to discard.
        BitBucket = 0x1,
        /// Segment: the location of the next segment, which is not the last.
        Segment = 0x2,
        /// Last Segment: the location of the last segment.
        LastSegment = 0x3,
        /// Keyed Data Block, for fabrics only.
        KeyedDataBlock = 0x4,
        /// Transport Data Block, for fabrics only.
        TransportDataBlock = 0x5,
        /// Vendor specific.
        Vendor = 0xf,
    }
}

open_enum! {
    /// SGL Descriptor Sub Type (section 4.4).
    DescriptorSubType(u8) {
        /// The address is a memory address.
        Address = 0x0,
        /// The address is an offset into a capsule, for fabrics only.
        Offset = 0x1,
    }
}

/// An SGL descriptor (section 4.4). Data Block, Bit Bucket, Segment and Last Segment share this
/// layout.
#[derive(
    Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, PartialEq,
)]
#[repr(C)]
pub struct SglDescriptor {
    /// Address of the data or of the segment.
    pub address: U64,
    /// Bytes of the data or of the segment.
    pub length: U32,
    reserved: [u8; 3],
    /// Type in bits 7:4, sub type in bits 3:0.
    pub identifier: u8,
}

const _: () = assert!(size_of::<SglDescriptor>() == DESCRIPTOR);

impl SglDescriptor {
    /// Returns a descriptor of memory, sub type Address.
    pub fn new(kind: DescriptorType, address: u64, length: u32) -> Self {
        Self {
            address: address.into(),
            length: length.into(),
            identifier: kind.0 << 4,
            ..Self::default()
        }
    }

    /// Returns the descriptor's type.
    pub fn kind(&self) -> DescriptorType {
        DescriptorType(self.identifier >> 4)
    }

    /// Returns the descriptor's sub type.
    pub fn sub_type(&self) -> DescriptorSubType {
        DescriptorSubType(self.identifier & 0xf)
    }
}
