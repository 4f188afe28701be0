//! Subjects without a VM: a small user-space NVMe driver of ours.
//!
//! [`Session`] is the driver on a vfio-user socket, whoever serves it; the target is another
//! process and is never called directly. [`Bare`] is the same driver on a queue pair in shared
//! memory whose other end is a loop that copies and does nothing else: no target is faster, so it
//! is the floor that others are held against. Both put their load on from the threads of `load`.

mod bare;
mod bell;
mod cpus;
mod load;
mod memory;
mod session;

pub use bare::Bare;
pub use cpus::{Cpus, pin};
pub use session::Session;
