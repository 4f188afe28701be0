//! Disks: what an NVMe namespace is connected to.
//!
//! One small trait, [`Disk`], batched and poll-driven. The front end (a device) owns buffers,
//! pinned pieces of guest memory, and lends them with each [`Request`]; it gets them back with the
//! [`Completion`]. Nothing here knows about PCI, queues of a device, or guests.
//!
//! - [`NullDisk`] does nothing, to measure everything else;
//! - [`RamDisk`] is volatile memory;
//! - [`FileDisk`] is a file or a block device, by io_uring;
//! - [`PassthroughDisk`] is an NVMe namespace, by commands through io_uring; [`open_file`] chooses
//!   between the two;
//! - [`SharedDisk`] is what several disks have in common, each of them on a thread of its own;
//! - [`OverlayDisk`] is copy-on-write over any of them, volatile;
//! - [`RamDisk::of`], [`SharedDisk::ram`] and [`OverlayDisk::of`] lie in files that are memory: a process
//!   that is killed at any instruction leaves a disk from which the next one goes on;
//! - [`FaultDisk`], [`DelayDisk`] and [`TraceDisk`] wrap a disk: faults by rule, later
//!   completions, counters.
//!
//! Not here: rate limits (a device has them), snapshots, image formats other than raw, and a fallback for hosts that
//! forbid io_uring.
//!
//! Dependencies: `io-uring` for [`FileDisk`] and [`PassthroughDisk`], `rustix` and `libc` for mappings,
//! files and the constants of both, `slipway-nvme-spec` and `zerocopy` for what a drive says of itself,
//! `thiserror` for the errors.
#![allow(unsafe_code)] // io_uring submissions and anonymous mappings

mod aligned;
mod check;
mod decorate;
mod disk;
mod error;
mod file;
#[cfg(feature = "fuzz")]
pub mod fuzz;
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

pub use decorate::{DelayDisk, DiskStats, FaultDisk, FaultRule, Figures, TraceDisk};
pub use disk::{Completion, Disk, DiskError, Geometry, Operation, Request};
pub use error::OpenError;
pub use file::{FileDisk, FileOptions, create_sparse, open_file};
pub use null::NullDisk;
pub use overlay::{BaseIdentity, OverlayDisk, overlay_file};
pub use passthrough::PassthroughDisk;
pub use ram::{RamDisk, ram_file};
pub use shared::SharedDisk;

#[cfg(test)]
mod tests;
