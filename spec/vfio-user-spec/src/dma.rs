//! Sections *VFIO_USER_DMA_MAP* and *VFIO_USER_DMA_UNMAP*.

use crate::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

bitflags::bitflags! {
    /// Flags of [`DmaMap`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct DmaMapFlags: u32 {
        /// The device may read the memory.
        const READ = 1 << 0;
        /// The device may write the memory.
        const WRITE = 1 << 1;
        /// The descriptor may be mapped. Newer clients set this flag; a descriptor without it means
        /// the same.
        const MMAP = 1 << 2;
        /// The descriptor may be read and written with file I/O.
        const FILE_IO = 1 << 3;
    }
}

/// Request of `VFIO_USER_DMA_MAP`. The reply has no payload.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DmaMap {
    /// Bytes of this structure, since the reply has no payload.
    pub argsz: U32,
    /// [`DmaMapFlags`].
    pub flags: U32,
    /// Offset into the descriptor that comes with the message; zero without a descriptor.
    pub offset: U64,
    /// First DMA address.
    pub address: U64,
    /// Bytes of the map.
    pub size: U64,
}

impl DmaMap {
    /// Returns the request to map `len` bytes at `offset` of the descriptor to the address `iova`,
    /// for reading, or also for writing.
    pub fn new(iova: u64, len: u64, offset: u64, writable: bool) -> Self {
        let mut flags = DmaMapFlags::READ;
        flags.set(DmaMapFlags::WRITE, writable);
        Self {
            argsz: U32::new(32),
            flags: U32::new(flags.bits()),
            offset: U64::new(offset),
            address: U64::new(iova),
            size: U64::new(len),
        }
    }
}

bitflags::bitflags! {
    /// Flags of [`DmaUnmap`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct DmaUnmapFlags: u32 {
        /// The client wants a dirty-page bitmap with the reply.
        const GET_DIRTY_BITMAP = 1 << 0;
        /// Unmaps everything; address and size must be zero.
        const ALL = 1 << 1;
    }
}

/// Request of `VFIO_USER_DMA_UNMAP`, echoed in the reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DmaUnmap {
    /// Largest reply payload that the client takes.
    pub argsz: U32,
    /// [`DmaUnmapFlags`].
    pub flags: U32,
    /// First DMA address of an existing map.
    pub address: U64,
    /// Bytes to unmap: exactly the map's size.
    pub size: U64,
}

impl DmaUnmap {
    /// Returns the request to remove the map of `len` bytes at the address `iova`.
    pub fn new(iova: u64, len: u64) -> Self {
        let (argsz, address, size) = (U32::new(24), U64::new(iova), U64::new(len));
        Self { argsz, flags: U32::new(0), address, size }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_specified_ones() {
        assert_eq!(size_of::<DmaMap>(), 32);
        assert_eq!(size_of::<DmaUnmap>(), 24);
    }
}
