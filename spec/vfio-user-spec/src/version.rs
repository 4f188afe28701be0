//! Section *VFIO_USER_VERSION*. The JSON text after the structure is described in the crate's head.

use crate::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The major version of the protocol; a reply has the proposed one or the connection ends.
pub const MAJOR: u16 = 0;
/// The newest minor version described here; a reply has at most the proposed one.
pub const MINOR: u16 = 1;

/// Descriptors per message that a peer takes when it does not say.
pub const DEFAULT_MAX_MSG_FDS: u64 = 1;
/// Largest `count` of data that a peer takes when it does not say, in bytes.
pub const DEFAULT_MAX_DATA_XFER_SIZE: u64 = 1 << 20;
/// DMA maps at a time when the peer does not say.
pub const DEFAULT_MAX_DMA_MAPS: u64 = 65535;
/// Page sizes of DMA maps when the peer does not say: 4 KiB only.
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
