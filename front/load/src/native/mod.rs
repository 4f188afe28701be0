//! Loads on an NVMe controller by a small user-space driver of ours.
//!
//! [`controller`] brings a controller up and prepares its queues, by any access to its registers;
//! [`load`] has the threads that keep commands in flight; [`bell`] has the ways in which these ring
//! doorbells.
//!
//! [`load_function`] does all of it on a PCI function of the machine that it runs in. The program
//! `slipway-load` does that in a guest, once [`take`] has taken the function from the guest's
//! kernel. Its memory is huge pages, addressed by their physical addresses.

pub mod bell;
pub mod controller;
mod cpus;
mod function;
mod huge;
pub mod load;
mod pci;

pub use cpus::{Cpus, cpu_ns, pin};
pub use function::load_function;
pub use pci::take;
