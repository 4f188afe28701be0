//! A virtio memory device: a PCI function by which a guest is given memory, and gives it back,
//! while it runs.
//!
//! It follows section 5.15 of *Virtual I/O Device (VIRTIO) Version 1.2*; section numbers in this
//! crate are of that document. [`Mem`] is the [`slipway_pci::Function`]; registers and the queue
//! are `slipway_virtio`'s. The host says how much is to be plugged ([`Mem::request`]); the driver
//! chooses the blocks and asks for them; [`MemoryHost`] makes their memory accessible, or takes it
//! away.
//!
//! The driver has to accept `VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE`: the guest must not touch what is
//! not plugged, and what happens if it does is the host's to say. A block that is plugged again
//! holds zeros, or what the guest's devices wrote there meanwhile.
//!
//! Blocks can be plugged in the usable part of the region, which begins empty and grows in units
//! when more is asked for than ever before ([`MemoryHost::reveal`]): what the guest was never asked
//! to have, its devices do not reach either.
//!
//! The host calls `poll` after register writes and after eventfds of notifications
//! ([`slipway_virtio::layout::notification`]). A poll answers a bounded number of requests, or
//! gives back [`PIECE`] bytes: a large request takes many polls, and is answered when all bytes are
//! back.
//!
//! Requests are served by polls, and the host may poll on one thread only: register accesses give
//! back nothing. A reset of the device leaves the blocks as they are: a driver that begins finds
//! them, and can unplug all. The blocks of an unplug request that was under way are given back all
//! the same, before the next driver's requests are answered.
//!
//! A hostile driver can harm only itself: an invalid ring, descriptor, chain or address, a request
//! that is cut short, and one without room for its response end in DEVICE_NEEDS_RESET. A request
//! that the region cannot fulfil is answered with an error.
//!
//! Not implemented: a usable region that shrinks, suspending (`VIRTIO_MEM_F_PERSISTENT_SUSPEND` of
//! later versions), indirect descriptors, ACCESS_PLATFORM (addresses are the guest's physical
//! ones), reset of the queue alone.
//!
//! Features: `driver` is a small real driver for tests; `fuzz` has the bodies of the fuzz targets.
//!
//! Dependencies: `serde` for saved state, `zerocopy` for the configuration, requests and responses,
//! `thiserror` for errors.

mod blocks;
mod device;
#[cfg(any(test, feature = "driver"))]
pub mod driver;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod parts;
mod region;
mod state;
#[cfg(test)]
mod tests;

pub use device::{Mem, VECTORS};
pub use parts::{
    Geometry, MAX_BLOCKS, MIN_BLOCK, MemoryHost, PIECE, Parts, PartsError, Refused, RequestError,
};
pub use state::STATE_VERSION;
