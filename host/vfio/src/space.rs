//! Address spaces of the IOMMU: the memory that a device reaches.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;
use slipway_ram::Permissions;
use slipway_vfio_user::MappedRange;

use crate::ioctl::{IoasAlloc, IoasMap, IoasMapFile, IoasUnmap, MapDma, UnmapDma, call};

/// `VFIO_DMA_UNMAP_FLAG_ALL`.
const UNMAP_ALL: u32 = 1 << 1;
/// `IOMMU_IOAS_MAP_FIXED_IOVA`.
const FIXED_IOVA: u32 = 1 << 0;

/// An address space. Each device has its own.
pub(crate) enum Space {
    /// A VFIO container with an IOMMU of type 1.
    Container(OwnedFd),
    /// The address space with this number of an iommufd.
    Iommufd(OwnedFd, u32),
}

impl Space {
    /// Makes an address space of an iommufd.
    pub fn of_iommufd(iommufd: OwnedFd) -> Result<Self, Errno> {
        let mut made = IoasAlloc::default();
        call(&iommufd, &mut made)?;
        Ok(Self::Iommufd(iommufd, made.id))
    }

    /// Pins memory of a client and maps it. Takes as long as the pages' making.
    ///
    /// # Errors
    /// The IOMMU cannot have the range, it overlaps another one, or no memory is left.
    pub fn map(&self, range: &MappedRange<'_>) -> Result<(), Errno> {
        let MappedRange { iova, len, permissions, address, .. } = *range;
        match self {
            Self::Container(container) => {
                let flags = type1_flags(permissions);
                let mut request = MapDma { flags, address, iova, size: len, ..Default::default() };
                call(container, &mut request)
            }
            Self::Iommufd(iommufd, id) => {
                // Without a walk over this process's page tables; not on older kernels, and not by
                // a descriptor that only names its file.
                if map_file(iommufd, *id, range).is_ok() {
                    return Ok(());
                }
                let (id, flags) = (*id, ioas_flags(permissions));
                let mut request = IoasMap { flags, id, address, len, iova, ..Default::default() };
                call(iommufd, &mut request)
            }
        }
    }

    /// Unmaps a range that was mapped whole.
    ///
    /// # Errors
    /// There is no such range.
    pub fn unmap(&self, iova: u64, len: u64) -> Result<(), Errno> {
        let unmapped = match self {
            Self::Container(container) => {
                let mut request = UnmapDma { iova, size: len, ..Default::default() };
                call(container, &mut request)?;
                request.size
            }
            Self::Iommufd(iommufd, id) => {
                let mut request = IoasUnmap { id: *id, iova, len, ..Default::default() };
                call(iommufd, &mut request)?;
                request.len
            }
        };
        if unmapped == len { Ok(()) } else { Err(Errno::NOENT) }
    }

    /// Unmaps everything, if anything is mapped.
    ///
    /// # Errors
    /// Something may still be mapped.
    pub fn clear(&self) -> Result<(), Errno> {
        match self {
            Self::Container(container) => {
                call(container, &mut UnmapDma { flags: UNMAP_ALL, ..Default::default() })
            }
            Self::Iommufd(iommufd, id) => {
                let mut all = IoasUnmap { id: *id, len: u64::MAX, ..Default::default() };
                match call(iommufd, &mut all) {
                    Err(Errno::NOENT) => Ok(()),
                    outcome => outcome,
                }
            }
        }
    }
}

/// Maps memory by its file.
fn map_file(iommufd: &OwnedFd, id: u32, range: &MappedRange<'_>) -> Result<(), Errno> {
    let MappedRange { iova, len, permissions, file: (file, start), .. } = *range;
    let (flags, file) = (ioas_flags(permissions), file.as_raw_fd());
    let mut request = IoasMapFile { flags, id, file, start, len, iova, ..Default::default() };
    call(iommufd, &mut request)
}

/// `VFIO_DMA_MAP_FLAG_READ` and `VFIO_DMA_MAP_FLAG_WRITE`: the accesses of the device.
fn type1_flags(Permissions { read, write }: Permissions) -> u32 {
    u32::from(read) | u32::from(write) << 1
}

/// `IOMMU_IOAS_MAP_READABLE` and `IOMMU_IOAS_MAP_WRITEABLE`.
fn ioas_flags(Permissions { read, write }: Permissions) -> u32 {
    FIXED_IOVA | u32::from(write) << 1 | u32::from(read) << 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_interface_has_its_own_flags() {
        let (both, reads) = (Permissions::READ_WRITE, Permissions::READ_ONLY);
        assert_eq!((type1_flags(both), type1_flags(reads)), (0b11, 0b01));
        assert_eq!((ioas_flags(both), ioas_flags(reads)), (0b111, 0b101));
    }
}
