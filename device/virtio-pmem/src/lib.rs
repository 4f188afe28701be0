//! A virtio persistent memory device: a PCI function that tells a guest where a range of memory is,
//! which the host has put into the guest's address space.
//!
//! It follows section 5.19 of *Virtual I/O Device (VIRTIO) Version 1.2*; section numbers in this
//! crate are of that document. [`Pmem`] is the [`slipway_pci::Function`]; registers and the queue
//! are `slipway_virtio`'s. The memory itself is the host's business and never touched here.
//!
//! The memory is only read, so a flush has nothing to do: every one is answered at once, as done.
//! The host calls `poll` after register writes and after eventfds of notifications
//! ([`slipway_virtio::layout::notification`]). A poll answers a bounded number of requests.
//!
//! A hostile driver can harm only itself: an invalid ring, descriptor, chain or address, a request
//! without room for its response, and one without its type end in DEVICE_NEEDS_RESET. A request of
//! an unknown type fails.
//!
//! Not implemented: memory that is written, a shared memory region in place of the configuration
//! (`VIRTIO_PMEM_F_SHMEM_REGION` of later versions), indirect descriptors, ACCESS_PLATFORM
//! (addresses are the guest's physical ones), reset of the queue alone.
//!
//! Features: `driver` is a small real driver for tests; `fuzz` has the bodies of the fuzz targets.
//!
//! Dependency: `serde` for saved state.

mod device;
#[cfg(any(test, feature = "driver"))]
pub mod driver;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
#[cfg(test)]
mod tests;

pub use device::{Parts, Pmem, STATE_VERSION, VECTORS};
pub use slipway_virtio::layout;
