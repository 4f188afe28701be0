//! Section *Read and Write Operations*: registers of the device and memory of the client.

use crate::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// `VFIO_USER_REGION_READ` and `VFIO_USER_REGION_WRITE`, request and reply; data follow the
/// request of a write and the reply of a read.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RegionAccess {
    /// Offset from the region's start.
    pub offset: U64,
    /// Region index, see [`crate::region`].
    pub region: U32,
    /// Bytes of data.
    pub count: U32,
}

impl RegionAccess {
    /// Returns an access to `len` bytes at `offset` of region `region`.
    pub fn new(region: u32, offset: u64, len: usize) -> Self {
        let (offset, region) = (U64::new(offset), U32::new(region));
        Self { offset, region, count: U32::new(len as u32) }
    }
}

/// `VFIO_USER_DMA_READ` and `VFIO_USER_DMA_WRITE`, request and reply; data follow the request of a
/// write and the reply of a read.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DmaAccess {
    /// DMA address.
    pub address: U64,
    /// Bytes of data.
    pub count: U64,
}

/// `VFIO_USER_REGION_WRITE_MULTI`, request (entries follow) and reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WriteMulti {
    /// Request: number of [`WriteMultiEntry`]s. Reply: number of completed writes.
    pub count: U64,
}

/// One write of `VFIO_USER_REGION_WRITE_MULTI` (*Single Device Write Format*).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WriteMultiEntry {
    /// Offset from the region's start.
    pub offset: U64,
    /// Region index.
    pub region: U32,
    /// Bytes of `data` to write, up to 8.
    pub count: U32,
    /// The data.
    pub data: [u8; 8],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_specified_ones() {
        assert_eq!(size_of::<RegionAccess>(), 16);
        assert_eq!(size_of::<DmaAccess>(), 16);
        assert_eq!(size_of::<WriteMulti>(), 8);
        assert_eq!(size_of::<WriteMultiEntry>(), 24);
    }
}
