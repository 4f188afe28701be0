//! The templates of a node: machines that were saved when their guests had booted, of which
//! sandboxes begin.
//!
//! A template is a directory with a [manifest], the state of the machine with its functions, and
//! the pages of its memory that its guest had touched. It has no image, no container and no network
//! address: the module `save` makes it of a pod without containers, before the host has given that
//! a name, the time, or random numbers. A *fork* is a sandbox whose machine begins with that state
//! (the module `fork`). Its guest finds its drivers in place; it gets its disks, its addresses and
//! its identity like one that has booted.

mod automatic;
pub(crate) mod manifest;
pub(crate) mod pages;
mod store;

pub(crate) use automatic::{AUTO, Automatic, PREFIX, check_chosen, is_automatic};
pub(crate) use manifest::{Boots, Interface, Manifest, Saved, Shape};
pub(crate) use store::{Template, Templates, Unfinished, apart, digest};
