//! A virtio file system device: a PCI function that hands a guest's FUSE requests to a file system
//! of its host.
//!
//! It follows section 5.11 of *Virtual I/O Device (VIRTIO) Version 1.2*; section numbers in this
//! crate are of that document. [`Fs`] is the [`slipway_pci::Function`]; registers and queues are
//! `slipway_virtio`'s. The host gives it a [`FileServer`], which does the work.
//!
//! # The host's loop
//! The host calls `poll` after register writes, after eventfds of notifications
//! ([`layout::notification`]), and when the file server has a reply. A poll takes a bounded number
//! of requests out of the queues, copies each into private memory, begins it, and writes the
//! replies that are ready. Requests are answered in any order: a slow one holds up no other.
//!
//! A hostile driver can harm only itself. Everything is read once, into a private copy; an invalid
//! ring, descriptor, chain, address or length ends in DEVICE_NEEDS_RESET. The requests that the
//! file server works on have at most [`MOST_BYTES`] bytes with their replies, and are at most
//! [`MOST_REQUESTS`], whatever the driver resets: further requests wait in their queue.
//!
//! Decisions where the specification leaves room:
//! - There is one request queue. Linux up to 6.10 uses one only.
//! - Requests of the high priority queue are begun first; the file server decides on the rest.
//! - After a reset, the replies to earlier requests are dropped, and the file server ends the
//!   session: the numbers of inodes and open files mean nothing any more.
//!
//! Not implemented: the DAX window (shared memory), notifications of the device, several request
//! queues, ACCESS_PLATFORM (addresses are the guest's physical ones), reset of single queues.
//!
//! A saved state is that of the transport. The session is the file server's, so a state is refused
//! by a device with another session, and if requests were under way.
//!
//! Features: `driver` is a small real driver for tests; `fuzz` has the bodies of the fuzz targets.
//!
//! Dependencies: `zerocopy` for structures from bytes, `serde` for saved state, `thiserror` for
//! [`PartsError`].

mod device;
#[cfg(any(test, feature = "driver"))]
pub mod driver;
mod flight;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod server;
mod state;
#[cfg(test)]
mod tests;

pub use device::{Fs, LONGEST_REPLY, LONGEST_REQUEST, Parts, PartsError, QUEUE_SIZE, VECTORS};
pub use flight::{MOST_BYTES, MOST_REQUESTS};
pub use server::{FileServer, Reply, Request, Ticket};
pub use slipway_virtio::layout;
pub use state::STATE_VERSION;
