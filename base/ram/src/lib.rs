//! Guest memory: memory that another party can change, or take away, at any moment.
//!
//! Guest memory is never `&[u8]` or `&mut [u8]`. It is reached through [`Memory`], a cheap handle
//! with bounded copies and volatile access, or through a [`Span`], a pinned piece of it that a
//! disk may read into or write from. A reader copies what it decides on, once, and decides on the
//! copy.
//!
//! How the pieces meet:
//! - a host owns a [`DmaMap`] and adds and removes [`Region`]s as its client asks;
//! - a device holds [`Memory`], a view of that map, and knows nothing of where the bytes lie:
//!   in a file that the client passed ([`Region::of_peer`]), behind messages to the client
//!   ([`Region::remote`]), or on the heap of a unit test ([`Region::heap`]);
//! - a mapping lives as long as a region or a span refers to it, so that a request in flight never
//!   touches unmapped addresses; [`DmaMap::remove`] hands back a [`Removed`] that tells when the
//!   last span is gone. The addresses are unmapped later, on a thread that has nothing else to do
//!   ([`slipway_peer::Bin`]): gigabytes take seconds;
//! - [`Lasting`] is no guest's memory but our own, for what the next process needs to go on.
//!
//! A client that shrinks its file behind a mapping raises SIGBUS here. No copy lets it through: the
//! few instructions that touch guest memory are known to a handler of that signal, which makes
//! them end with [`Fault::Gone`] instead (`copy/x86_64.rs` has the argument). This takes no system
//! call and costs nothing where nothing is missing. The handler is process-wide, installed with the
//! first mapping, and hands every other SIGBUS on to the handler before it. On other machines than
//! x86-64 a mapping that may lose pages is copied through the kernel (`process_vm_readv(2)`).
//!
//! A mapping is *guarded* unless the file's owner cannot take a page away. Not guarded is a memfd
//! of ordinary pages that is sealed with `F_SEAL_SHRINK` and holds the whole range, on a host
//! without strict overcommit (`vm.overcommit_memory` = 2 may refuse a page at its first touch).
//! Guarded is all else: unsealed memfds; files of a tmpfs, which may be full; hugetlbfs, where a
//! punched hole gives a reserved page back. Other files are refused: a touch of one on a disk, or
//! of a FUSE server's, waits for whoever is behind it.
//!
//! What is left: broken memory of the host raises SIGBUS as it does for every process. Pages that a
//! device touches first are charged to the plane's memory cgroup, as many as the guest has memory;
//! a cgroup that is full kills, it does not fault. A client that punches a hole into its file makes
//! a touch wait until the hole is punched, about a second for gigabytes (`slipway-reactor` goes on
//! without a task that sleeps in one).
//!
//! Not here: an IOMMU model, dirty-page tracking, lazily zeroed memory (the gate for it is
//! `Memory`, when it comes).
//!
//! Dependencies: `slipway-peer` to unmap elsewhere, `rustix` for mmap and seals, `libc` for
//! `sigaction` and `process_vm_readv`, `arc-swap` so that a lookup takes no lock while another
//! thread changes the map, `thiserror` for [`Fault`].
#![allow(unsafe_code)] // mmap, a signal handler, copies of memory shared with processes

mod backing;
mod copy;
mod fetch;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod lasting;
mod map;
mod mapping;
mod pages;
mod span;
mod window;

#[cfg(test)]
mod tests;

pub use fetch::{fetch, fetch_to_write};
pub use lasting::{Lasting, Snapshots};
pub use map::{DmaMap, MAX_REGIONS, MapError, Memory, Region, Removed, View};
pub use mapping::{Mapping, Remote};
pub use pages::unmap;
pub use span::Span;
pub use window::Window;

/// What a party may do with a region, or wants to do with a piece of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A device reads guest memory.
    Read,
    /// A device writes guest memory.
    Write,
}

/// Which accesses a region allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// Devices may read.
    pub read: bool,
    /// Devices may write.
    pub write: bool,
}

impl Permissions {
    /// Devices may read and write.
    pub const READ_WRITE: Self = Self { read: true, write: true };
    /// Devices may only read.
    pub const READ_ONLY: Self = Self { read: true, write: false };

    /// Whether `access` is among what is allowed.
    pub fn allow(self, access: Access) -> bool {
        match access {
            Access::Read => self.read,
            Access::Write => self.write,
        }
    }
}

/// Why an access to guest memory failed. Always the fault of the party that owns the memory or
/// that chose the address, never of Slipway; a device turns it into its own error status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// No region holds all of the addresses.
    #[error("address {iova:#x}+{len:#x} is not mapped for DMA")]
    Unmapped {
        /// First address, in the client's I/O virtual address space.
        iova: u64,
        /// Bytes.
        len: u64,
    },
    /// The region does not allow this access.
    #[error("address {iova:#x} does not allow this access")]
    Denied {
        /// First address refused.
        iova: u64,
    },
    /// The memory was there and is gone: the client truncated its file.
    #[error("memory behind address {iova:#x} was taken away by its owner")]
    Gone {
        /// First address of the access.
        iova: u64,
    },
    /// A message-only client did not answer in time, or refused.
    #[error("the client did not serve the message-only memory at {iova:#x}")]
    Remote {
        /// First address of the access.
        iova: u64,
    },
}
