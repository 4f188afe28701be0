//! The memory device (section 5.15): a region of guest-physical addresses, in blocks that the
//! driver plugs and unplugs at the device's request, and one queue for these requests.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{U16, U64};

/// Device type (section 5).
pub const DEVICE_TYPE: u16 = 24;
/// The number of the one queue, guest-request (section 5.15.2).
pub const REQUEST_QUEUE: u16 = 0;

bitflags::bitflags! {
    /// Feature bits (section 5.15.3).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Features: u64 {
        /// VIRTIO_MEM_F_ACPI_PXM: the configuration has a node, a proximity domain of ACPI.
        const ACPI_PXM = 1 << 0;
        /// VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE: the driver must not access unplugged memory.
        const UNPLUGGED_INACCESSIBLE = 1 << 1;
    }
}

/// `struct virtio_mem_config` (section 5.15.4). Sizes are in bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Config {
    /// The size of a block, a power of two. All other sizes and addresses are multiples of it.
    pub block_size: U64,
    /// The node, valid with [`Features::ACPI_PXM`].
    pub node_id: U16,
    /// Zero.
    pub padding: [u8; 6],
    /// The guest-physical address of the region.
    pub addr: U64,
    /// The size of the region.
    pub region_size: U64,
    /// The part of the region, from its start, in which blocks can be plugged.
    pub usable_region_size: U64,
    /// The size of all plugged blocks.
    pub plugged_size: U64,
    /// The size that the device asks the driver to have plugged.
    pub requested_size: U64,
}

/// Types of requests (section 5.15.6).
pub mod request {
    /// VIRTIO_MEM_REQ_PLUG.
    pub const PLUG: u16 = 0;
    /// VIRTIO_MEM_REQ_UNPLUG.
    pub const UNPLUG: u16 = 1;
    /// VIRTIO_MEM_REQ_UNPLUG_ALL.
    pub const UNPLUG_ALL: u16 = 2;
    /// VIRTIO_MEM_REQ_STATE.
    pub const STATE: u16 = 3;
}

/// `struct virtio_mem_req` (section 5.15.6).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Request {
    /// One of [`request`].
    pub kind: U16,
    /// Zero.
    pub padding: [U16; 3],
    /// The guest-physical address of the first block; unused by [`request::UNPLUG_ALL`].
    pub addr: U64,
    /// The number of blocks; unused by [`request::UNPLUG_ALL`].
    pub blocks: U16,
    /// Zero.
    pub more_padding: [U16; 3],
}

/// Types of responses (section 5.15.6).
pub mod response {
    /// VIRTIO_MEM_RESP_ACK: done.
    pub const ACK: u16 = 0;
    /// VIRTIO_MEM_RESP_NACK: more would be plugged than the device asks for.
    pub const NACK: u16 = 1;
    /// VIRTIO_MEM_RESP_BUSY: the device cannot do it now.
    pub const BUSY: u16 = 2;
    /// VIRTIO_MEM_RESP_ERROR: the request is not valid.
    pub const ERROR: u16 = 3;
}

/// States of a range of blocks, in the response to [`request::STATE`].
pub mod state {
    /// VIRTIO_MEM_STATE_PLUGGED: all blocks are plugged.
    pub const PLUGGED: u16 = 0;
    /// VIRTIO_MEM_STATE_UNPLUGGED: no block is plugged.
    pub const UNPLUGGED: u16 = 1;
    /// VIRTIO_MEM_STATE_MIXED: some blocks are plugged.
    pub const MIXED: u16 = 2;
}

/// `struct virtio_mem_resp` (section 5.15.6).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Response {
    /// One of [`response`].
    pub kind: U16,
    /// Zero.
    pub padding: [U16; 3],
    /// One of [`state`], after [`request::STATE`].
    pub state: U16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_that_of_the_specification() {
        assert_eq!(size_of::<Config>(), 56);
        assert_eq!(core::mem::offset_of!(Config, plugged_size), 40);
        assert_eq!(size_of::<Request>(), 24);
        assert_eq!(size_of::<Response>(), 10);
    }
}
