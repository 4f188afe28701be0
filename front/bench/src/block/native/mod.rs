//! Subjects without a VM: a small user-space NVMe driver of ours.
//!
//! [`Session`] is the driver on a vfio-user socket, whoever serves it; the target is another
//! process and is never called directly. [`Bare`] is the same driver on a queue pair in shared
//! memory whose other end is a loop that copies and does nothing else: no target is faster, so it
//! is the floor that others are held against. [`Neighbours`] has two sessions on one target: what a
//! quiet client's latencies are beside a noisy one's load. They put their load on from the threads of `load`.
//!
//! [`load_function`] is the same driver and load on a PCI function of the machine that it runs in: it
//! is what the program `slipway-load` does in a guest, once [`take`] took the function from the
//! guest's kernel. Its memory are huge pages, named by their physical addresses.

mod bare;
mod bell;
mod controller;
mod cpus;
mod function;
mod huge;
mod load;
mod memory;
mod neighbour;
mod pci;
mod session;

pub use bare::Bare;
pub use cpus::{Cpus, pin};
pub use function::load_function;
pub use neighbour::{Neighbours, Pair};
pub use pci::take;
pub use session::Session;
