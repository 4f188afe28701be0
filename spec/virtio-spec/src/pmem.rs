//! The persistent memory device (section 5.19): a range of guest-physical addresses that the guest
//! uses as memory, and one queue of requests to make its writes last.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::U64;

/// Device type (section 5).
pub const DEVICE_TYPE: u16 = 27;
/// The number of the one queue, req_vq (section 5.19.2).
pub const REQUEST_QUEUE: u16 = 0;

/// `struct virtio_pmem_config` (section 5.19.4).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Config {
    /// The guest-physical address of the first byte.
    pub start: U64,
    /// The number of bytes.
    pub size: U64,
}

/// Bytes of a request: its type (section 5.19.6).
pub const REQUEST: usize = 4;
/// The type of the request that flushes all earlier writes.
pub const FLUSH: u32 = 0;

/// Bytes of a response (section 5.19.7).
pub const RESPONSE: usize = 4;
/// The response to a request that was carried out.
pub const DONE: u32 = 0;
/// The response to a request that failed: -1.
pub const FAILED: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    #[test]
    fn the_layout_is_that_of_the_specification() {
        assert_eq!(size_of::<super::Config>(), 16);
    }
}
