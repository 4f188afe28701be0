//! Subjects without a VM: a small user-space NVMe driver of ours.
//!
//! [`Session`] is the driver on a vfio-user socket, served by any program; the target is another
//! process and is never called directly. [`Bare`] is the same driver on a queue pair in shared
//! memory whose other end is a loop that only copies: no target is faster, so it is the floor that
//! others are compared with. [`Neighbours`] has two sessions on one target, to measure a quiet
//! client's latencies beside a noisy one's load. All of them run their load in the threads of
//! [`slipway_load::native::load`], as the program `slipway-load` does in a guest.

mod bare;
mod neighbour;
mod pinned;
mod session;

pub use bare::Bare;
pub use neighbour::{Neighbours, Pair};
pub(crate) use pinned::pinned;
pub use session::Session;
pub use slipway_load::native::{Cpus, cpu_ns, pin};
