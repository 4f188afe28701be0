//! The vfio-user protocol's messages, byte for byte.
//!
//! vfio-user carries the Linux VFIO interface (`<linux/vfio.h>`) over a Unix stream socket: a
//! client (a VMM) drives a device that another process, the server, emulates. Citations are
//! section names of the *vfio-user Protocol Specification* (as in QEMU's
//! `docs/interop/vfio-user.rst` and, for commands and flags, libvfio-user's `vfio-user.h`).
//!
//! Every message is a [`Header`], then for most commands one of the fixed structures here, then
//! data whose length the structure gives. All integers are little-endian and unaligned, so any byte
//! slice of the right length can be viewed as any of the structures without a copy. Nothing here
//! checks a value; that is the reader's duty. Codes that a peer chooses stay integers
//! ([`Header::command`]); [`Command::from_code`] converts with a check.
//!
//! # Version data
//! A [`Version`] structure is followed by an optional NUL-terminated JSON text. Every member of the
//! text is optional; unknown names are ignored:
//! ```json
//! {"capabilities": {
//!     "max_msg_fds": 1,              // descriptors the sender takes per message
//!     "max_data_xfer_size": 1048576, // largest `count` the sender takes
//!     "max_dma_maps": 65535,         // DMA maps valid at a time
//!     "pgsizes": 4096,               // page sizes for DMA maps, or'ed together
//!     "write_multiple": true,        // VFIO_USER_REGION_WRITE_MULTI is understood
//!     "twin_socket": {"supported": true, "fd_index": 0},
//!     "migration": {"pgsize": 4096, "max_bitmap_size": 268435456}
//! }}
//! ```
//! (The values shown are the specification's defaults where it has one.) The server's reply holds
//! only members that the client proposed. The host parses the text, not this crate: `Capabilities`
//! of `host/vfio-user-wire` has the members in use, and beside the specification's the three
//! extensions `slipway_resume`, `slipway_one_connection` and `slipway_posted_writes`.
//!
//! Dependencies: `zerocopy` for checked views of bytes, `bitflags` for flag words.
#![no_std]

extern crate alloc;

mod access;
mod device;
mod device_feature;
mod dma;
mod header;
mod interrupt;
mod version;

pub use access::{DmaAccess, RegionAccess, WriteMulti, WriteMultiEntry};
pub use device::{
    CapabilityHeader, DeviceFlags, DeviceInfo, RegionFlags, RegionInfo, RegionIoFds,
    SUB_REGION_LEN, SparseArea, SparseHeader, SubRegion, SubRegionFlags, capability, io_fd, region,
};
pub use device_feature::{
    DeviceFeature, DeviceState, LogControl, LogReport, Migration, MigrationData, device_state,
    feature, migration,
};
pub use dma::{DmaMap, DmaMapFlags, DmaUnmap, DmaUnmapFlags};
pub use header::{Command, HEADER_LEN, Header, flag};
pub use interrupt::{IrqInfo, IrqInfoFlags, IrqSet, IrqSetFlags, irq};
pub use version::{
    DEFAULT_MAX_DATA_XFER_SIZE, DEFAULT_MAX_DMA_MAPS, DEFAULT_MAX_MSG_FDS, DEFAULT_PAGE_SIZES,
    MAJOR, MINOR, Version,
};

/// Little-endian, unaligned integers, re-exported for code that fills the structures.
pub use zerocopy::little_endian::{U16, U32, U64};
