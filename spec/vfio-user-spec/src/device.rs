//! Sections *VFIO_USER_DEVICE_GET_INFO*, *VFIO_USER_DEVICE_GET_REGION_INFO* and
//! *VFIO_USER_DEVICE_GET_REGION_IO_FDS*.

use alloc::vec::Vec;

use crate::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

bitflags::bitflags! {
    /// Flags of [`DeviceInfo`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct DeviceFlags: u32 {
        /// `VFIO_USER_DEVICE_RESET` is supported.
        const RESET = 1 << 0;
        /// The device is a PCI device.
        const PCI = 1 << 1;
    }
}

/// Request and reply of `VFIO_USER_DEVICE_GET_INFO`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DeviceInfo {
    /// Request: largest reply payload that the client takes. Reply: bytes of the full payload.
    pub argsz: U32,
    /// [`DeviceFlags`].
    pub flags: U32,
    /// Number of regions, see [`region`].
    pub num_regions: U32,
    /// Number of interrupt types, see [`crate::irq`].
    pub num_irqs: U32,
}

impl DeviceInfo {
    /// Returns the request of a client that takes the structure's 16 bytes in reply.
    pub fn request() -> Self {
        Self { argsz: U32::new(16), ..Self::default() }
    }
}

/// Region indices of a PCI device (`VFIO_PCI_*_REGION_INDEX` of `<linux/vfio.h>`).
pub mod region {
    /// BAR 0; BAR `n` is region `n`, up to 5.
    pub const BAR0: u32 = 0;
    /// BAR 5.
    pub const BAR5: u32 = 5;
    /// Expansion ROM.
    pub const ROM: u32 = 6;
    /// Configuration space.
    pub const CONFIG: u32 = 7;
    /// VGA.
    pub const VGA: u32 = 8;
    /// Number of regions that every PCI device reports.
    pub const COUNT: u32 = 9;
}

bitflags::bitflags! {
    /// Flags of [`RegionInfo`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RegionFlags: u32 {
        /// The region may be read.
        const READ = 1 << 0;
        /// The region may be written.
        const WRITE = 1 << 1;
        /// The region may be mapped; a descriptor comes with the reply.
        const MMAP = 1 << 2;
        /// Capabilities follow the [`RegionInfo`].
        const CAPS = 1 << 3;
    }
}

/// Request and reply of `VFIO_USER_DEVICE_GET_REGION_INFO`; capabilities may follow the reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RegionInfo {
    /// Request: largest reply payload that the client takes. Reply: bytes of the full payload,
    /// including capabilities that were left out because they did not fit.
    pub argsz: U32,
    /// [`RegionFlags`].
    pub flags: U32,
    /// Region index.
    pub index: U32,
    /// Offset of the first capability from the start of this structure; zero if there is none.
    pub cap_offset: U32,
    /// Bytes of the region; zero if there is no such region.
    pub size: U64,
    /// Offset of the region's first byte in the descriptor.
    pub offset: U64,
}

impl RegionInfo {
    /// Returns the request about region `index`, of a client that takes replies of `room` bytes.
    pub fn request(index: u32, room: u32) -> Self {
        Self { argsz: U32::new(room), index: U32::new(index), ..Self::default() }
    }

    /// Returns the parts of the region that may be mapped, each as its offset in the region and its
    /// length in bytes. They are read from the capabilities in `reply`, the whole payload that
    /// begins with this structure. The result is empty if there is no *sparse mmap* capability.
    /// Returns `None` if the capabilities are malformed or overlap so much that they have more
    /// areas than fit into `reply`.
    pub fn areas(&self, reply: &[u8]) -> Option<Vec<(u64, u64)>> {
        let mut areas = Vec::new();
        let mut at = self.cap_offset.get() as usize;
        while at != 0 {
            let rest = reply.get(at..)?;
            let (header, rest) = CapabilityHeader::read_from_prefix(rest).ok()?;
            if header.id.get() == capability::SPARSE_MMAP {
                append_areas(rest, &mut areas)?;
            }
            // Without this bound, overlapping capabilities in a reply of a MiB could have more
            // areas than fit into the machine's memory.
            if areas.len() > reply.len() / size_of::<SparseArea>() {
                return None;
            }
            let next = header.next.get() as usize;
            if next != 0 && next <= at {
                return None; // The chain would have no end.
            }
            at = next;
        }
        Some(areas)
    }
}

/// Appends the areas of a *sparse mmap* capability to `areas`. `bytes` begin behind the
/// capability's header. Returns `None` if `bytes` end before the last area does.
fn append_areas(bytes: &[u8], areas: &mut Vec<(u64, u64)>) -> Option<()> {
    let (sparse, mut rest) = SparseHeader::read_from_prefix(bytes).ok()?;
    for _ in 0..sparse.nr_areas.get() {
        let (area, more) = SparseArea::read_from_prefix(rest).ok()?;
        areas.push((area.offset.get(), area.size.get()));
        rest = more;
    }
    Some(())
}

/// Identifiers of region capabilities (`<linux/vfio.h>`).
pub mod capability {
    /// `VFIO_REGION_INFO_CAP_SPARSE_MMAP`: only some areas may be mapped.
    pub const SPARSE_MMAP: u16 = 1;
}

/// The header of every region capability (*VFIO cap header format*).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CapabilityHeader {
    /// Identifier, see [`capability`].
    pub id: U16,
    /// Version of this capability's format.
    pub version: U16,
    /// Offset of the next capability from the start of [`RegionInfo`]; zero in the last.
    pub next: U32,
}

/// *VFIO region info cap sparse mmap*, after the [`CapabilityHeader`]; [`SparseArea`]s follow.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SparseHeader {
    /// Number of areas.
    pub nr_areas: U32,
    /// Zero.
    pub reserved: U32,
}

/// A part of a region that may be mapped.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SparseArea {
    /// Offset from the region's start; page-aligned.
    pub offset: U64,
    /// Bytes of the area; whole pages.
    pub size: U64,
}

/// Request and reply of `VFIO_USER_DEVICE_GET_REGION_IO_FDS`; [`SubRegion`]s may follow the reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RegionIoFds {
    /// Request: largest reply payload that the client takes. Reply: bytes of the full payload,
    /// including sub-regions that were left out because they did not fit.
    pub argsz: U32,
    /// Zero.
    pub flags: U32,
    /// Region index.
    pub index: U32,
    /// Request: zero. Reply: number of sub-regions that follow.
    pub count: U32,
}

impl RegionIoFds {
    /// Returns the request about region `index`, of a client that takes replies of `room` bytes.
    pub fn request(index: u32, room: u32) -> Self {
        Self { argsz: U32::new(room), index: U32::new(index), ..Self::default() }
    }
}

bitflags::bitflags! {
    /// Flags of [`SubRegion`]: those of `KVM_IOEVENTFD` (`<linux/kvm.h>`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct SubRegionFlags: u32 {
        /// Only a write of the value [`SubRegion::datamatch`] counts.
        const DATAMATCH = 1 << 0;
        /// The region has ports, not memory.
        const PIO = 1 << 1;
    }
}

/// Types of a [`SubRegion`] (libvfio-user, `vfio-user.h`).
pub mod io_fd {
    /// `VFIO_USER_IO_FD_TYPE_IOEVENTFD`: a write raises an eventfd, and its value is dropped.
    pub const IOEVENTFD: u32 = 0;
    /// `VFIO_USER_IO_FD_TYPE_IOREGIONFD`: accesses are messages on a socket. In the
    /// specification's layout, user data takes the place of `datamatch`.
    pub const IOREGIONFD: u32 = 1;
    /// `VFIO_USER_IO_FD_TYPE_IOEVENTFD_SHADOW`: a write is stored in shadow memory, which the guest
    /// does not see, and then raises an eventfd.
    pub const IOEVENTFD_SHADOW: u32 = 2;
}

/// A part of a region whose writes raise an eventfd; part of the reply after [`RegionIoFds`].
///
/// This is libvfio-user's layout (`vfio_user_sub_region_ioeventfd_t`), which it uses for every
/// type. The *Sub-Region IO FD info format (ioeventfd)* of the specification is older and lacks
/// `shadow_offset`: [`SUB_REGION_LEN`]. The reply's `argsz` and `count` tell the length in use.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SubRegion {
    /// Offset from the region's start.
    pub offset: U64,
    /// Bytes that a write must have; zero if that does not matter.
    pub size: U64,
    /// Index of the eventfd among the reply's descriptors.
    pub fd_index: U32,
    /// One of [`io_fd`].
    pub kind: U32,
    /// [`SubRegionFlags`].
    pub flags: U32,
    /// Index of the shadow memory among the reply's descriptors.
    pub shadow_fd_index: U32,
    /// Offset of the written value in the shadow memory.
    pub shadow_offset: U64,
    /// The value that counts, with [`SubRegionFlags::DATAMATCH`].
    pub datamatch: U64,
}

impl SubRegion {
    /// Returns the sub-region at the start of `bytes`: in libvfio-user's layout if there are at
    /// least 48 bytes, and otherwise in the specification's, which has [`SUB_REGION_LEN`]. Returns
    /// `None` if there are fewer, or if the type needs shadow memory and the layout lacks its
    /// offset.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if let Ok((one, _)) = Self::read_from_prefix(bytes) {
            return Some(one);
        }
        // The specification's layout lacks `shadow_offset`, which stays 0.
        let (head, datamatch) = bytes.get(..SUB_REGION_LEN)?.split_at(SUB_REGION_LEN - 8);
        let mut padded = [0; size_of::<Self>()];
        padded[..head.len()].copy_from_slice(head);
        padded[SUB_REGION_LEN..].copy_from_slice(datamatch);
        let one = Self::read_from_bytes(&padded).ok()?;
        (one.kind.get() != io_fd::IOEVENTFD_SHADOW).then_some(one)
    }
}

/// Bytes of a sub-region in the specification, where `datamatch` follows `shadow_fd_index`.
pub const SUB_REGION_LEN: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of areas in a reply of `len` bytes with *sparse mmap* capabilities, each
    /// given by its offset and its number of areas.
    fn areas_of(len: usize, capabilities: &[(u32, u32)]) -> Option<usize> {
        let mut reply = alloc::vec![0; len];
        for (nth, &(at, areas)) in capabilities.iter().enumerate() {
            let header = CapabilityHeader {
                id: U16::new(capability::SPARSE_MMAP),
                version: U16::new(1),
                next: U32::new(capabilities.get(nth + 1).map_or(0, |next| next.0)),
            };
            let sparse = SparseHeader { nr_areas: U32::new(areas), reserved: U32::new(0) };
            let at = at as usize;
            reply[at..at + 8].copy_from_slice(header.as_bytes());
            reply[at + 8..at + 16].copy_from_slice(sparse.as_bytes());
        }
        let info = RegionInfo { cap_offset: U32::new(capabilities[0].0), ..RegionInfo::default() };
        info.areas(&reply).map(|areas| areas.len())
    }

    #[test]
    fn capabilities_have_no_more_areas_than_the_reply_has_room_for() {
        assert_eq!(areas_of(96, &[(32, 1), (64, 1)]), Some(2));
        assert_eq!(areas_of(96, &[(32, 4)]), None, "the last area is cut off");
        assert_eq!(areas_of(96, &[(64, 1), (32, 1)]), None, "the chain has no end");
        // Each capability lies in the areas of the one before.
        assert_eq!(areas_of(112, &[(32, 4), (48, 3), (64, 2)]), None);
    }

    #[test]
    fn sizes_are_the_specified_ones() {
        assert_eq!(size_of::<DeviceInfo>(), 16);
        assert_eq!(size_of::<RegionInfo>(), 32);
        assert_eq!(size_of::<CapabilityHeader>(), 8);
        assert_eq!(size_of::<SparseHeader>(), 8);
        assert_eq!(size_of::<SparseArea>(), 16);
        assert_eq!(size_of::<RegionIoFds>(), 16);
        assert_eq!(size_of::<SubRegion>(), 48);
    }
}
