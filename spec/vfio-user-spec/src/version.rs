//! Section *VFIO_USER_VERSION*. The crate's documentation describes the JSON text after the
//! structure.

use crate::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The major version of the protocol. A reply repeats the proposed one, or the connection ends.
pub const MAJOR: u16 = 0;
/// The newest minor version described here. A reply has at most the proposed one.
pub const MINOR: u16 = 1;

/// Most descriptors per message for a peer that gives no `max_msg_fds`.
pub const DEFAULT_MAX_MSG_FDS: u64 = 1;
/// Largest `count` of data, in bytes, for a peer that gives no `max_data_xfer_size`.
pub const DEFAULT_MAX_DATA_XFER_SIZE: u64 = 1 << 20;
/// Most DMA maps at a time for a peer that gives no `max_dma_maps`.
pub const DEFAULT_MAX_DMA_MAPS: u64 = 65535;
/// Page sizes of DMA maps for a peer that gives no `pgsizes`: 4 KiB only.
pub const DEFAULT_PAGE_SIZES: u64 = 4096;

/// Section *VFIO_USER_VERSION*, request and reply; version data may follow.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Version {
    /// Major version.
    pub major: U16,
    /// Minor version.
    pub minor: U16,
}
