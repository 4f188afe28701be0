//! The templates of a node: machines that were saved when their guests had booted, of which
//! sandboxes begin.
//!
//! A template is a directory with a [manifest], the state of the machine with its functions, and
//! the pages of its memory that its guest had touched. A snapshot is one with a container, and so
//! with the content of its disks (the module `snapshot`). A template has no container, no network
//! address: the module `save` makes it of a pod without containers, before the host has given that
//! a name, the time, or random numbers. A *fork* is a sandbox whose machine begins with that state
//! (the module `fork`). Its guest finds its drivers in place; it gets its disks, its addresses and
//! its identity like one that has booted. The pages that forks touch soon are the template's
//! [`working_set`].

mod automatic;
mod files;
#[cfg(feature = "fuzz")]
pub(crate) mod fuzz;
mod image_starts;
mod images;
pub(crate) mod manifest;
mod memories;
pub(crate) mod pages;
mod sizes;
mod store;
mod threads;
pub(crate) mod working_set;

pub use automatic::check_chosen;
pub(crate) use automatic::{AUTO, Automatic, Choice, PREFIX, is_automatic};
pub(crate) use files::{MACHINE, MANIFEST, MEMORY, Template, read_manifest};
pub(crate) use image_starts::{Frequency, Threshold};
pub(crate) use images::images_of_snapshots;
pub(crate) use manifest::{
    Boots, DiskFile, Interface, MOST_MANIFEST, Manifest, Saved, Shape, Snapshot,
};
pub(crate) use pages::digest;
pub(crate) use store::{Templates, UNFINISHED, Unfinished, create_file};
pub(crate) use threads::apart;
