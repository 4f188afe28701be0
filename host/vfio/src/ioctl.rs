//! The requests of ioctl(2) to VFIO and iommufd (*linux/vfio.h*, *linux/iommufd.h*).
//!
//! Each structure is that of one request. Its first field tells the kernel the structure's length:
//! [`call`] fills it in, whatever a caller has put there. `tests` compares the sizes of structures
//! and the numbers of requests with the kernel's.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

/// Returns the number of a request of VFIO or of iommufd: both have the type `;` of ioctl(2), and
/// neither has the length of its structure in the number.
const fn number(command: u8) -> u16 {
    (b';' as u16) << 8 | command as u16
}

/// The number of the first request of VFIO within the type: `VFIO_BASE`.
const VFIO: u8 = 100;
const GET_API_VERSION: u16 = number(VFIO);
const CHECK_EXTENSION: u16 = number(VFIO + 1);
const SET_IOMMU: u16 = number(VFIO + 2);
const GROUP_SET_CONTAINER: u16 = number(VFIO + 4);
const GROUP_GET_DEVICE: u16 = number(VFIO + 6);
const DEVICE_SET_IRQS: u16 = number(VFIO + 10);
const DEVICE_RESET: u16 = number(VFIO + 11);

/// `VFIO_TYPE1v2_IOMMU`.
const TYPE1V2: u64 = 3;

/// A request with a structure.
///
/// # Safety
/// The request `NUMBER` reads and writes no more bytes than the structure's first field says, and
/// [`Request::tell_size`] makes that field the size of the structure. The kernel accesses no memory
/// that addresses in the structure lead to, except memory of clients: such a field is the address
/// of a mapping.
pub(crate) unsafe trait Request {
    /// The number of the request.
    const NUMBER: u16;

    /// Sets the first field to the size of the structure in bytes.
    fn tell_size(&mut self);
}

macro_rules! requests {
    ($(
        $(#[$about:meta])*
        $name:ident: $number:expr, { $size:ident: u32, $($field:ident: $kind:ty),* $(,)? }
    )*) => {
        $(
            $(#[$about])*
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
            #[repr(C)]
            pub(crate) struct $name {
                /// The size of the structure in bytes, which [`call`] fills in.
                pub $size: u32,
                $(pub $field: $kind,)*
            }

            // SAFETY: the structure is that of the kernel's header, whose size `tests` compares.
            unsafe impl Request for $name {
                const NUMBER: u16 = $number;

                fn tell_size(&mut self) {
                    self.$size = size_of_request::<Self>();
                }
            }
        )*
    };
}

requests! {
    /// `VFIO_GROUP_GET_STATUS`.
    GroupStatus: number(VFIO + 3), { argsz: u32, flags: u32 }
    /// `VFIO_DEVICE_GET_INFO`, without capabilities.
    DeviceInfo: number(VFIO + 7), { argsz: u32, flags: u32, regions: u32, irqs: u32 }
    /// `VFIO_DEVICE_GET_REGION_INFO`, without capabilities.
    RegionInfo: number(VFIO + 8), {
        argsz: u32,
        flags: u32,
        index: u32,
        capabilities: u32,
        size: u64,
        offset: u64,
    }
    /// `VFIO_DEVICE_GET_IRQ_INFO`.
    IrqInfo: number(VFIO + 9), { argsz: u32, flags: u32, index: u32, count: u32 }
    /// `VFIO_IOMMU_MAP_DMA`. `address` is that of a client's memory in this process.
    MapDma: number(VFIO + 13), { argsz: u32, flags: u32, address: u64, iova: u64, size: u64 }
    /// `VFIO_IOMMU_UNMAP_DMA`. The kernel returns the size that was unmapped.
    UnmapDma: number(VFIO + 14), { argsz: u32, flags: u32, iova: u64, size: u64 }
    /// `VFIO_DEVICE_BIND_IOMMUFD`.
    BindIommufd: number(VFIO + 18), { argsz: u32, flags: u32, iommufd: i32, id: u32 }
    /// `VFIO_DEVICE_ATTACH_IOMMUFD_PT`.
    AttachTable: number(VFIO + 19), { argsz: u32, flags: u32, table: u32 }
    /// `IOMMU_IOAS_ALLOC`.
    IoasAlloc: number(0x81), { size: u32, flags: u32, id: u32 }
    /// `IOMMU_IOAS_MAP`. `address` is that of a client's memory in this process.
    IoasMap: number(0x85), {
        size: u32,
        flags: u32,
        id: u32,
        reserved: u32,
        address: u64,
        len: u64,
        iova: u64,
    }
    /// `IOMMU_IOAS_UNMAP`. The kernel returns the length that was unmapped.
    IoasUnmap: number(0x86), { size: u32, id: u32, iova: u64, len: u64 }
    /// `IOMMU_IOAS_MAP_FILE`, since Linux 6.13.
    IoasMapFile: number(0x8f), {
        size: u32,
        flags: u32,
        id: u32,
        file: i32,
        start: u64,
        len: u64,
        iova: u64,
    }
}

/// Returns the size of a structure in bytes, as its first field tells it to the kernel.
const fn size_of_request<R: Request>() -> u32 {
    size_of::<R>() as u32
}

/// Makes a request with a structure, in which the kernel leaves its answer.
pub(crate) fn call<R: Request>(file: impl AsFd, request: &mut R) -> Result<(), Errno> {
    let file = file.as_fd().as_raw_fd();
    request.tell_size();
    // SAFETY: `Request` says that the kernel keeps to the structure, which lives until the call
    // returns.
    check(unsafe { libc::ioctl(file, libc::Ioctl::from(R::NUMBER), std::ptr::from_mut(request)) })
        .map(drop)
}

/// Returns whether `container` speaks this interface and has an IOMMU of type 1, version 2.
pub(crate) fn has_type1(container: impl AsFd) -> bool {
    let file = container.as_fd().as_raw_fd();
    // SAFETY: the request takes no argument.
    let version = unsafe { libc::ioctl(file, libc::Ioctl::from(GET_API_VERSION)) };
    // SAFETY: the argument is a number.
    let has = unsafe { libc::ioctl(file, libc::Ioctl::from(CHECK_EXTENSION), TYPE1V2) };
    version == 0 && has > 0
}

/// Gives a container with a group an IOMMU of type 1, version 2.
pub(crate) fn set_type1(container: impl AsFd) -> Result<(), Errno> {
    let file = container.as_fd().as_raw_fd();
    // SAFETY: the argument is a number.
    check(unsafe { libc::ioctl(file, libc::Ioctl::from(SET_IOMMU), TYPE1V2) }).map(drop)
}

/// Puts a group into a container.
pub(crate) fn set_container(group: impl AsFd, container: impl AsFd) -> Result<(), Errno> {
    let (group, container) = (group.as_fd().as_raw_fd(), container.as_fd().as_raw_fd());
    let request = libc::Ioctl::from(GROUP_SET_CONTAINER);
    // SAFETY: the kernel reads the number behind the pointer, which lives until the call returns.
    check(unsafe { libc::ioctl(group, request, &raw const container) }).map(drop)
}

/// Opens the device of this name in a group.
pub(crate) fn device_of(group: impl AsFd, name: &std::ffi::CStr) -> Result<OwnedFd, Errno> {
    let group = group.as_fd().as_raw_fd();
    // SAFETY: the kernel reads the string, which lives until the call returns.
    let file = unsafe { libc::ioctl(group, libc::Ioctl::from(GROUP_GET_DEVICE), name.as_ptr()) };
    let file = check(file)?;
    // SAFETY: the kernel has just returned the descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}

/// Resets a device.
pub(crate) fn reset(device: impl AsFd) -> Result<(), Errno> {
    let file = device.as_fd().as_raw_fd();
    // SAFETY: the request takes no argument.
    check(unsafe { libc::ioctl(file, libc::Ioctl::from(DEVICE_RESET)) }).map(drop)
}

/// The bytes of `struct vfio_irq_set` before its data: five words.
const IRQ_SET_HEADER: u32 = 20;

/// The request `VFIO_DEVICE_SET_IRQS`, as words: the length of all in bytes, flags, the type of the
/// interrupts, the first one, their number; then a descriptor for each, or nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SetIrqs(Vec<u32>);

/// Flags of [`SetIrqs`].
pub(crate) mod irq_set {
    /// No data follow the header.
    pub const DATA_NONE: u32 = 1 << 0;
    /// The data are an eventfd for each interrupt, or -1 for none.
    pub const DATA_EVENTFD: u32 = 1 << 2;
    /// Masks interrupts.
    pub const MASK: u32 = 1 << 3;
    /// Unmasks interrupts.
    pub const UNMASK: u32 = 1 << 4;
    /// Routes interrupts to eventfds. With a count of 0, switches all interrupts of the type off.
    pub const TRIGGER: u32 = 1 << 5;
}

impl SetIrqs {
    /// Returns a request about `count` interrupts of type `index`, without data.
    pub fn plain(index: u32, action: u32, count: u32) -> Self {
        Self(vec![IRQ_SET_HEADER, irq_set::DATA_NONE | action, index, 0, count])
    }

    /// Returns a request that routes interrupts of type `index`, from `start` on, to eventfds, or
    /// nowhere where the descriptor is -1.
    pub fn routes(index: u32, start: u32, files: impl ExactSizeIterator<Item = i32>) -> Self {
        let count = files.len() as u32;
        let flags = irq_set::DATA_EVENTFD | irq_set::TRIGGER;
        let mut words = vec![IRQ_SET_HEADER + 4 * count, flags, index, start, count];
        words.extend(files.map(i32::cast_unsigned));
        Self(words)
    }

    /// Makes the request.
    pub fn call(&self, device: impl AsFd) -> Result<(), Errno> {
        let file = device.as_fd().as_raw_fd();
        // SAFETY: the kernel reads as many bytes as the first word tells, which are all words; they
        // live until the call returns.
        let done =
            unsafe { libc::ioctl(file, libc::Ioctl::from(DEVICE_SET_IRQS), self.0.as_ptr()) };
        match check(done)? {
            0 => Ok(()),
            // The device has fewer vectors than were asked for; the result is how many.
            _ => Err(Errno::NOSPC),
        }
    }
}

fn check(result: libc::c_int) -> Result<libc::c_int, Errno> {
    if result >= 0 {
        return Ok(result);
    }
    let error = std::io::Error::last_os_error();
    Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes by `sizeof`, and by the offset of the first field that is left out.
    #[test]
    fn structures_have_the_sizes_of_the_kernel() {
        let sizes = [
            size_of_request::<GroupStatus>(),
            size_of_request::<DeviceInfo>(),
            size_of_request::<RegionInfo>(),
            size_of_request::<IrqInfo>(),
            size_of_request::<MapDma>(),
            size_of_request::<UnmapDma>(),
            size_of_request::<BindIommufd>(),
            size_of_request::<AttachTable>(),
            size_of_request::<IoasAlloc>(),
            size_of_request::<IoasMap>(),
            size_of_request::<IoasUnmap>(),
            size_of_request::<IoasMapFile>(),
        ];
        assert_eq!(sizes, [8, 16, 32, 16, 32, 24, 16, 12, 12, 40, 24, 40]);
    }

    #[test]
    fn a_call_tells_the_size_whatever_the_caller_has_put_there() {
        let mut request = GroupStatus { argsz: u32::MAX, flags: 0 };
        // A file that knows no such request.
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(call(&file, &mut request), Err(Errno::NOTTY));
        assert_eq!(request.argsz, 8);
    }

    #[test]
    fn requests_have_the_numbers_of_the_kernel() {
        assert_eq!((GET_API_VERSION, DEVICE_RESET), (0x3b64, 0x3b6f));
        assert_eq!((RegionInfo::NUMBER, AttachTable::NUMBER), (0x3b6c, 0x3b77));
        assert_eq!((IoasAlloc::NUMBER, IoasMapFile::NUMBER), (0x3b81, 0x3b8f));
    }

    #[test]
    fn routes_follow_the_header() {
        let routes = SetIrqs::routes(2, 1, [7, -1].into_iter());
        assert_eq!(routes.0, [28, 0x24, 2, 1, 2, 7, u32::MAX]);
        assert_eq!(SetIrqs::plain(0, irq_set::UNMASK, 1).0, [20, 0x11, 0, 0, 1]);
    }
}
