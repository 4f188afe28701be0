//! A virtio memory balloon that is never inflated: a PCI function to which a guest reports pages
//! that it does not use, so that its host has them back.
//!
//! It follows section 5.5 of *Virtual I/O Device (VIRTIO) Version 1.2*; section numbers in this
//! crate are of that document. [`Balloon`] is the [`slipway_pci::Function`]; registers and queues
//! are `slipway_virtio`'s. The host gives it a function that gives back pages of the guest's
//! memory ([`Discard`]).
//!
//! A driver that reports a range leaves it alone until the device has used the report's buffers;
//! the range reads as zeros from then on, or as it was. So `VIRTIO_BALLOON_F_PAGE_POISON` is not
//! offered: the driver of a kernel that fills free pages with a value of its own, and expects to
//! find it there, does not report (`virtballoon_validate` of Linux).
//!
//! Only whole pieces of [`PIECE`] bytes are given back, since Linux reports blocks of this size and
//! larger ones, and at most [`PIECES`] of a report: the rest stays as it was. A poll serves one
//! report. The host polls on one thread only, which may wait for the kernel: register accesses give
//! back nothing. The driver numbers the queue of reports by the specification (4), or without the
//! queues of features that are not offered (2, Linux), so every queue from 2 on is one.
//!
//! The queues to inflate and deflate exist, as they must. The device asks for no page, and serves
//! neither queue.
//!
//! A hostile driver can harm only itself: an invalid ring, descriptor or chain, a report without a
//! byte or with a buffer that the device is to read, and a piece where the guest has no memory end
//! in DEVICE_NEEDS_RESET. Ranges that overlap are given back twice.
//!
//! Not implemented: inflation, statistics, free page hinting, page poison, indirect descriptors,
//! ACCESS_PLATFORM (addresses are the guest's physical ones), reset of a queue alone.
//!
//! Features: `driver` is a small real driver for tests; `fuzz` has the bodies of the fuzz targets.

mod device;
#[cfg(any(test, feature = "driver"))]
pub mod driver;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
#[cfg(test)]
mod tests;

pub use device::{Balloon, Discard, PIECE, PIECES, Parts, STATE_VERSION, VECTORS};
