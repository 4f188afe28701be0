//! NUMA nodes: groups of CPUs, each with memory that is near to them.
//!
//! A [`Topology`] has the nodes of the host where memory of a sandbox may have its home: those that
//! have both memory and CPUs. It is read once, by the process that decides (the pool of memory, and
//! the launcher of VMMs). On a host with one such node it is empty, and nobody asks the kernel for
//! anything.
//!
//! [`prefer`] tells the kernel where to make the pages of a mapping. The kernel takes another
//! node's pages when that node has none left, so that a full node ends no process. [`bound_to`] is
//! for the time that huge pages are reserved.
//!
//! [`numbers`] reads the kernel's lists of CPUs and nodes.
//!
//! Not here: moving pages that are there already; nodes that have memory and no CPUs, such as those
//! of slower memory behind CXL.
//!
//! Dependencies: `rustix` for sets of CPUs, `libc` for the number of mbind(2).

mod list;
mod memory;
mod topology;

pub use list::numbers;
pub use memory::{bound_to, prefer};
pub use topology::{NumaNode, Topology};
