//! The daemon's sandboxes, with VMMs and guests that the tests play. One program has all of these
//! tests: each would be linked with the whole daemon. Those of `hostile_port` measure the time of
//! the process's threads, and have a process of their own.
#![allow(clippy::unwrap_used)]

mod cpus;
mod creation;
#[path = "../harness/mod.rs"]
mod harness;
mod hostile_guest;
mod leaving;
mod memory;
mod pod_limits;
mod pod_memory;
mod recovery;
mod slow_disk;
mod snapshots;
mod stop;
