//! Templates: machines that were saved when their guests had booted, of which sandboxes begin.
//!
//! A template is a directory with a [manifest](manifest), the state of the machine with its
//! functions, and the pages of its memory that its guest had touched. It has no image, no container
//! and no network address: [`make`] saves the machine of a pod without containers, before the host
//! has given it a name, the time, or random numbers. A *fork* is a sandbox whose machine begins
//! with that state. Its guest finds its drivers in place; it gets its disks, its addresses and its
//! identity like one that has booted.
//!
//! What a fork has in common with others of its template: the kernel's random base addresses and
//! keys of its hash tables, the boot id, and the serial number that the NVMe driver has read. Its
//! random numbers are its own, since the agent has the kernel's generator begin anew with a seed of
//! the host's before anything of a container runs.

pub(crate) mod fork;
mod make;
mod manifest;
mod pages;
mod store;

pub(crate) use make::make;
pub(crate) use manifest::{Interface, Manifest, Shape};
pub(crate) use store::{Template, Templates};
