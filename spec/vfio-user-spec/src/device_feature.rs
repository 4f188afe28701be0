//! Section *VFIO_USER_DEVICE_FEATURE*, as far as it is about whether a device runs.

use crate::U32;
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
    /// The number of the feature that [`super::DeviceState`] belongs to: the device's state.
    pub const DEVICE_STATE: u32 = 2;
}

/// Values of [`DeviceState::state`] (`enum vfio_device_mig_state` of `<linux/vfio.h>`).
pub mod device_state {
    /// The device does not run, and keeps its state.
    pub const STOP: u32 = 1;
    /// The device runs.
    pub const RUNNING: u32 = 2;
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

/// The data of feature [`feature::DEVICE_STATE`].
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DeviceState {
    /// The state, see [`device_state`].
    pub state: U32,
    /// Unused over a socket.
    pub data_fd: U32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_specified_ones() {
        assert_eq!(size_of::<DeviceFeature>(), 8);
        assert_eq!(size_of::<DeviceState>(), 8);
    }
}
