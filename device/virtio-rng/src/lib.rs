//! A virtio entropy device: a PCI function that fills a guest's buffers with random bytes.
//!
//! It follows section 5.4 of *Virtual I/O Device (VIRTIO) Version 1.2*; section numbers in this
//! crate are of that document. [`Rng`] is the [`slipway_pci::Function`]; registers and the queue
//! are `slipway_virtio`'s. The host gives it a source of random bytes.
//!
//! The host calls `poll` after register writes and after eventfds of notifications
//! ([`slipway_virtio::layout::notification`]). A poll fills a bounded number of buffers, with at
//! most [`LONGEST`] bytes each; drivers ask again for what is missing.
//!
//! A hostile driver can harm only itself: an invalid ring, descriptor, chain or address, a buffer
//! that the device is to read, and one without bytes end in DEVICE_NEEDS_RESET.
//!
//! Not implemented: indirect descriptors, ACCESS_PLATFORM (addresses are the guest's physical
//! ones), reset of the queue alone.
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

pub use device::{LONGEST, Parts, Rng, STATE_VERSION, Source, VECTORS};
