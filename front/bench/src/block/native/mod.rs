//! Subjects without a VM: a small user-space NVMe driver of ours.
//!
//! [`Session`] is the driver on a vfio-user socket, served by any program; the target is another
//! process and is never called directly. [`Bare`] is the same driver on a queue pair in shared
//! memory whose other end is a loop that only copies: no target is faster, so it is the floor that
//! others are compared with. [`Neighbours`] has two sessions on one target, to measure a quiet
//! client's latencies beside a noisy one's load. All of them run their load in the threads of
//! `load`.
//!
//! [`load_function`] is the same driver and load on a PCI function of the machine that it runs in.
//! The program `slipway-load` does that in a guest, once [`take`] has taken the function from the
//! guest's kernel. Its memory is huge pages, addressed by their physical addresses.

mod bare;
mod bell;
mod controller;
mod cpus;
mod function;
mod huge;
mod load;
mod neighbour;
mod pci;
mod session;

pub use bare::Bare;
pub(crate) use cpus::pinned;
pub use cpus::{Cpus, cpu_ns, pin};
pub use function::load_function;
pub use neighbour::{Neighbours, Pair};
pub use pci::take;
pub use session::Session;
