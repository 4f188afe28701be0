//! Disks: the storage behind an NVMe namespace.
//!
//! One small trait, [`Disk`], batched and poll-driven. The front end (a device) owns the buffers,
//! which are pinned pieces of guest memory. It lends them with each [`Request`] and gets them back
//! with the [`Completion`]. Nothing here knows about PCI, a device's queues, or guests.
//!
//! - [`NullDisk`] does nothing, to measure everything else;
//! - [`RamDisk`] is volatile memory;
//! - [`FileDisk`] is a file or a block device, by io_uring;
//! - [`PassthroughDisk`] is an NVMe namespace, by commands through io_uring; [`open_file`] chooses
//!   between the two;
//! - [`SharedDisk`] is the common part of several disks, each of which is on a thread of its own;
//! - [`LazyDisk`] is an image whose file is still being filled by another process, which it asks
//!   for blocks that reads wait for;
//! - [`OverlayDisk`] is copy-on-write over any disk, volatile; a [`Budget`] bounds the memory that
//!   several of them hold;
//! - [`RamDisk::of`], [`SharedDisk::ram`] and [`OverlayDisk::of`] keep their content in memfds: a
//!   process that is killed at any instruction leaves a disk that its successor goes on with;
//! - [`OverlayContent`] copies what such an overlay has to a file, on any thread, and
//!   [`FileContent`] what a regular file has that is open as a disk;
//! - [`FaultDisk`], [`DelayDisk`] and [`TraceDisk`] wrap a disk: faults by rule, later completions,
//!   counters.
//!
//! Not here: rate limits (a device has them), snapshots, image formats other than raw, and a
//! fallback for hosts that forbid io_uring.
//!
//! Dependencies: `io-uring` for [`FileDisk`] and [`PassthroughDisk`]; `rustix` and `libc` for
//! mappings, files and the constants of both; `slipway-nvme-spec` and `zerocopy` for a drive's
//! identify data; `slipway-lazy-spec` and `slipway-peer` for [`LazyDisk`]'s messages and its
//! connection; `slipway-space` for the free space of file systems; `thiserror` for the errors.
#![allow(unsafe_code)] // io_uring submissions and anonymous mappings

mod aligned;
mod budget;
mod check;
mod choice;
mod decorate;
mod disk;
mod error;
mod file;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod lazy;
mod memory;
#[cfg(any(test, feature = "fuzz"))]
mod model;
mod null;
mod overlay;
mod passthrough;
mod ram;
mod shared;
mod uring;
mod users;
mod vectors;

pub use budget::{Budget, Refusal};
pub use choice::open_file;
pub use decorate::{DelayDisk, DiskStats, FaultDisk, FaultRule, Figures, TraceDisk};
pub use disk::{
    BaseIdentity, Completion, Disk, DiskError, Geometry, Operation, Request, Spent, Transferred,
};
pub use error::OpenError;
pub use file::{FileContent, FileDisk, FileOptions, Reserve, create_sparse};
pub use lazy::LazyDisk;
pub use null::NullDisk;
pub use overlay::{OverlayContent, OverlayDisk, overlay_file};
pub use passthrough::PassthroughDisk;
pub use ram::{RamDisk, ram_file};
pub use shared::SharedDisk;

#[cfg(test)]
mod tests;
