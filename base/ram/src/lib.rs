//! Guest memory: memory that another party can change, or take away, at any moment.
//!
//! Guest memory is never `&[u8]` or `&mut [u8]`. It is accessed through [`Memory`], a cheap handle
//! with bounded copies and volatile access, or through a [`Span`], a pinned piece that a disk may
//! read into or write from. A reader copies the bytes that it bases a decision on once, and decides
//! on the copy.
//!
//! How the pieces meet:
//! - a host owns a [`DmaMap`] and adds and removes [`Region`]s at its client's request;
//! - a device holds [`Memory`], a view of that map, and does not know where the bytes lie: in a
//!   file that the client passed ([`Region::of_peer`]), behind messages to the client
//!   ([`Region::remote`]), or on the heap of a unit test ([`Region::heap`]);
//! - a mapping lives as long as a region or a span refers to it, so that a request in flight never
//!   touches unmapped addresses; [`DmaMap::remove`] returns a [`Removed`], which tells when the
//!   last span is dropped. The addresses are unmapped later, on a disposal thread
//!   ([`slipway_peer::Bin`]): gigabytes take seconds;
//! - a file that nobody can change, and that clients only read, is mapped once for all of them
//!   ([`LateFiles::region`]);
//! - [`RegisterWindow`] is no memory but registers of a device, which its server has in a file;
//! - [`Lasting`] is no guest's memory but this process's own, for the state that the next process
//!   needs to go on.
//!
//! Memory may be recycled and not zeroed yet, or be that of a fork and still in its [`Template`]
//! ([`LateMemory`]): each access through [`Memory`] or a new span takes its granules first, so that
//! a device finds zeros, or the template's bytes, where nobody has written. Other memory pays one
//! branch for it. Late memory pays a load for each granule of the access (64 KiB, or 4 KiB with a
//! template), and one load for the whole access once all of it was given
//! ([`LateMemory::take_all`]).
//!
//! A client that shrinks its file behind a mapping makes an access raise SIGBUS. No copy is ended
//! by it: a handler of that signal knows the few instructions that touch guest memory, and makes
//! the copy end with [`Fault::Gone`] instead (`copy/x86_64.rs` has the argument). This takes no
//! system call and costs nothing while all pages are present. The handler is process-wide,
//! installed with the first mapping, and forwards every other SIGBUS to the previous handler. On
//! other machines than x86-64 a mapping that may lose pages is copied through the kernel
//! (`process_vm_readv(2)`).
//!
//! A mapping is *guarded* unless the file's owner cannot take a page away. Not guarded is a memfd
//! of ordinary pages that is sealed with `F_SEAL_SHRINK` and holds the whole range, on a host
//! without strict overcommit (`vm.overcommit_memory` = 2 may refuse a page at its first touch).
//! Guarded are all others: unsealed memfds; files of a tmpfs, which may be full; hugetlbfs, where a
//! punched hole gives a reserved page back. Other files are refused: a touch of a file on a disk,
//! or of a FUSE server, waits for the disk or the server.
//!
//! Limits: broken memory of the host raises SIGBUS as it does for every process. Pages that a
//! device touches first are charged to the plane's memory cgroup, as many as the guest has memory;
//! a full cgroup kills, it does not fault. A client that punches a hole into its file makes a touch
//! wait until the hole is punched, about a second for gigabytes (`slipway-reactor` goes on without
//! a task that sleeps in one).
//!
//! The pages that this process writes to can be noted ([`Region::log_writes`]), for a client that
//! copies the memory of a guest that runs. It costs other memory a load and a branch at each write.
//!
//! Not here: an IOMMU model.
//!
//! Dependencies: `slipway-peer` to unmap on disposal threads, `rustix` for mmap and seals, `libc`
//! for `sigaction` and `process_vm_readv`, `arc-swap` so that a lookup takes no lock while another
//! thread changes the map, `thiserror` for the errors.
#![allow(unsafe_code)] // mmap, a signal handler, copies of memory shared with processes

mod aligned;
mod backing;
mod copy;
mod cursor;
mod fetch;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod gate;
mod lasting;
mod late;
mod late_files;
#[cfg(any(test, feature = "fuzz"))]
mod late_model;
mod map;
mod mapping;
mod pages;
mod region;
mod registers;
mod sealed_files;
mod span;
mod template;
mod window;
mod write_log;

#[cfg(test)]
mod tests;

pub use backing::overcommit_is_strict;
pub use cursor::SpanCursor;
pub use fetch::{fetch, fetch_to_write};
pub use gate::{GRANULE, NotYet};
pub use lasting::{Lasting, Snapshots};
pub use late::{Granules, LateMemory};
pub use late_files::LateFiles;
pub use map::{DmaMap, MAX_REGIONS, MapError, Memory, View};
pub use mapping::{Mapping, MessageMemory};
pub use pages::unmap;
pub use region::{Given, Region, Removed};
pub use registers::RegisterWindow;
pub use span::Span;
pub use template::{Template, next_data};
pub use window::Window;
pub use write_log::{PAGE, bits};

/// A kind of access to guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A device reads guest memory.
    Read,
    /// A device writes guest memory.
    Write,
}

/// The accesses that a region allows.
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

    /// Returns whether `access` is allowed.
    pub fn allow(self, access: Access) -> bool {
        match access {
            Access::Read => self.read,
            Access::Write => self.write,
        }
    }
}

/// Reason for which an access to guest memory failed. Except for [`Fault::Busy`], always the fault
/// of the party that owns the memory or that chose the address, never of Slipway; a device turns it
/// into its own error status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// No region holds the address, or the range wraps around the address space.
    #[error("address {iova:#x}+{len:#x} is not mapped for DMA")]
    Unmapped {
        /// First address that is not mapped, in the client's I/O virtual address space.
        iova: u64,
        /// Bytes of the access from there on.
        len: u64,
    },
    /// The region does not allow this access.
    #[error("address {iova:#x} does not allow this access")]
    Denied {
        /// First address refused.
        iova: u64,
    },
    /// The memory is gone: the client truncated its file, or no page is left (a full tmpfs, an
    /// empty pool of huge pages).
    #[error("memory behind address {iova:#x} was taken away by its owner")]
    Gone {
        /// First address of the access within its region.
        iova: u64,
    },
    /// Another thread is writing the first bytes of late memory. Nobody is at fault: try again
    /// soon.
    #[error("the memory at {iova:#x} is being prepared")]
    Busy {
        /// First address of the access within its region.
        iova: u64,
    },
    /// A message-only client did not answer in time, or refused; or message-only memory was to be
    /// pinned.
    #[error("the client did not serve the message-only memory at {iova:#x}")]
    Remote {
        /// First address of the access within its region.
        iova: u64,
    },
}
