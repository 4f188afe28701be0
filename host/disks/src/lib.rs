//! The disks of a node: opened by their descriptions, for one endpoint or under a name for many.
//!
//! The pieces:
//! - [`open()`] opens the disk of one endpoint, and once more for each lane of its controller.
//! - [`Disks`] is the table of [`NamedDisk`]s, which any number of endpoints share. It has the lock
//!   between attachments and changes of size.
//! - [`Lasts`] holds the resources for opening a disk that is to outlive the process. [`DiskPlace`]
//!   is the place where a keeper process has a named disk.
//! - [`device`] tells whether a path leads to the device that was meant.
//! - [`overlays`] bounds the memory of overlays, for each endpoint and for all.
//! - `file_options` says how the file of a disk is opened, and what it leaves of its file system.
//! - [`Source`] is the content of an overlay or a file, which is copied to a new file.
//! - [`Wakes`] gathers the descriptors of an endpoint's disks in one.
//! - [`uuid`] makes the UUIDs by which guests find their disks again.
//!
//! All of this runs on the control thread and on threads of its own. The disks themselves, which
//! move the bytes, are of `slipway-block`.
//!
//! Not here: the controllers that have the disks, limits of their I/O, and the choice of a keeper's
//! slots (`slipway-plane`).
//!
//! Dependencies: `prost` for stored descriptions, `rustix` for epoll and new files, `sha2` for
//! stable UUIDs, `thiserror` for [`Error`], `tracing` for the daemon's log.

mod copy;
pub mod device;
mod error;
mod file_options;
mod id;
mod named;
mod open;
pub mod overlays;
mod place;
mod wakes;

pub use copy::Source;
pub use error::Error;
pub use id::uuid;
pub use named::{Disks, NamedDisk};
pub use open::{Content, Opened, open};
pub use place::{DiskPlace, Lasts};
pub use wakes::{Wakes, watch_all};
