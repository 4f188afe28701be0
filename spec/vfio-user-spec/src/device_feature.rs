//! Section *VFIO_USER_DEVICE_FEATURE*, as far as it is about migration, whether a device runs, and
//! the pages that it writes to; sections *VFIO_USER_MIG_DATA_READ* and *VFIO_USER_MIG_DATA_WRITE*.

use crate::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Values of [`DeviceFeature::flags`] (`VFIO_DEVICE_FEATURE_*` of `<linux/vfio.h>`).
pub mod feature {
    /// The bits that hold the feature's number.
    pub const NUMBER: u32 = 0xffff;
    /// The feature is read.
    pub const GET: u32 = 1 << 16;
    /// The feature is set.
    pub const SET: u32 = 1 << 17;
    /// The server says whether it has the feature.
    pub const PROBE: u32 = 1 << 18;
    /// The number of the feature that [`super::Migration`] belongs to: the states that a device
    /// has for migration.
    pub const MIGRATION: u32 = 1;
    /// The number of the feature that [`super::DeviceState`] belongs to: the device's state.
    pub const DEVICE_STATE: u32 = 2;
    /// The number of the feature that [`super::LogControl`] belongs to: the device begins to note
    /// the pages that it writes to.
    pub const LOG_START: u32 = 6;
    /// The number of the feature by which the device stops noting pages. It has no data.
    pub const LOG_STOP: u32 = 7;
    /// The number of the feature that [`super::LogReport`] belongs to: the pages that the device
    /// has written to since they were last reported.
    pub const LOG_REPORT: u32 = 8;
}

/// Values of [`Migration::flags`] (`VFIO_MIGRATION_*` of `<linux/vfio.h>`).
pub mod migration {
    /// The device has the states STOP, STOP_COPY and RESUMING.
    pub const STOP_COPY: u64 = 1;
    /// The device has the state RUNNING_P2P.
    pub const P2P: u64 = 1 << 1;
    /// The device has the state PRE_COPY.
    pub const PRE_COPY: u64 = 1 << 2;
}

/// Values of [`DeviceState::state`] (`enum vfio_device_mig_state` of `<linux/vfio.h>`).
pub mod device_state {
    /// The device has failed, and a reset brings it back to RUNNING.
    pub const ERROR: u32 = 0;
    /// The device does not run, and keeps its state.
    pub const STOP: u32 = 1;
    /// The device runs.
    pub const RUNNING: u32 = 2;
    /// The device does not run, and its state can be read.
    pub const STOP_COPY: u32 = 3;
    /// The device does not run, and takes another state.
    pub const RESUMING: u32 = 4;
}

/// The start of request and reply of `VFIO_USER_DEVICE_FEATURE`; the feature's data follow.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DeviceFeature {
    /// Request: the largest reply payload that the client takes. Reply: bytes of the payload.
    pub argsz: U32,
    /// The feature's number and the operation, see [`feature`].
    pub flags: U32,
}

impl DeviceFeature {
    /// Returns the start of a request with these flags, of a client that takes `room` bytes of the
    /// feature's data.
    pub fn request(flags: u32, room: usize) -> Self {
        let whole = size_of::<Self>() + room;
        Self { argsz: U32::new(whole as u32), flags: U32::new(flags) }
    }
}

/// The data of feature [`feature::MIGRATION`], of a reply only.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Migration {
    /// See [`migration`].
    pub flags: U64,
}

/// The data of feature [`feature::DEVICE_STATE`].
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DeviceState {
    /// The state, see [`device_state`].
    pub state: U32,
    /// Unused over a socket.
    pub data_fd: U32,
}

/// The start of the data of feature [`feature::LOG_START`], of a request only. Ranges follow, as
/// many as it says.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LogControl {
    /// Bytes of a page that the client suggests.
    pub page_size: U64,
    /// The number of ranges. 0: all of the memory that the client has mapped.
    pub num_ranges: U32,
    /// Unused.
    pub reserved: U32,
}

/// The start of the data of feature [`feature::LOG_REPORT`]. In the reply, a bit for each page of
/// the range follows, in little-endian words of 64 bits, the first page's the lowest of the first
/// word.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LogReport {
    /// The first I/O virtual address of the range.
    pub iova: U64,
    /// The bytes of the range.
    pub length: U64,
    /// Bytes of a page.
    pub page_size: U64,
}

/// The start of request and reply of `VFIO_USER_MIG_DATA_READ`, and of the request of
/// `VFIO_USER_MIG_DATA_WRITE`. Bytes of a device's state follow in the reply of the former and the
/// request of the latter.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MigrationData {
    /// Request: the largest reply payload that the client takes. Reply: bytes of the payload.
    pub argsz: U32,
    /// Bytes of state: those to read, those that follow. A reply with fewer than were asked for
    /// has the last ones.
    pub size: U32,
}

impl MigrationData {
    /// Returns the request to read or write `len` bytes.
    pub fn request(len: usize) -> Self {
        let whole = size_of::<Self>() + len;
        Self { argsz: U32::new(whole as u32), size: U32::new(len as u32) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_specified_ones() {
        assert_eq!(size_of::<DeviceFeature>(), 8);
        assert_eq!(size_of::<Migration>(), 8);
        assert_eq!(size_of::<DeviceState>(), 8);
        assert_eq!(size_of::<MigrationData>(), 8);
        assert_eq!((size_of::<LogControl>(), size_of::<LogReport>()), (16, 24));
    }
}
