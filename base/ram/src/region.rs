//! Regions: contiguous ranges of a client's memory, wherever their bytes lie.
//!
//! A region has no address. A [`DmaMap`](crate::DmaMap) gives it one (`map`), and its bytes are
//! reached there.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use slipway_peer::Bin;

use crate::late::LateMemory;
use crate::{Mapping, MessageMemory, Permissions, pages};

/// Memory that hardware reaches without this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Given {
    /// Its address in this process, where it stays as long as a clone of its region.
    pub address: u64,
    /// The number of its bytes that were not yet those with which their user begins. They were
    /// written when the memory was given, before the hardware had it.
    pub written: u64,
}

/// A contiguous range of a client's I/O virtual address space.
#[derive(Clone)]
pub struct Region {
    pub(crate) len: u64,
    pub(crate) permissions: Permissions,
    pub(crate) backing: Backing,
}

/// The place of a region's bytes.
#[derive(Clone)]
pub(crate) enum Backing {
    /// Memory that is mapped into this process.
    Mapped(Arc<Mapping>),
    /// Memory that is accessed by messages to its owner.
    Remote(Arc<dyn MessageMemory>),
}

impl Region {
    /// Maps memory of this process's own file, like [`Region::of_peer`] with a bin that all such
    /// regions share.
    ///
    /// # Errors
    /// As for [`Mapping::file`].
    pub fn mapped(
        file: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        permissions: Permissions,
    ) -> std::io::Result<Self> {
        Self::of_peer(file, offset, len, permissions, pages::own())
    }

    /// Maps `len` bytes at `offset` of a file that a client passed. Neither number needs to be a
    /// multiple of the page size. After the last reference is dropped, the memory is unmapped
    /// through the client's `bin`.
    ///
    /// # Errors
    /// As for [`Mapping::file`]: all are the client's fault except a lack of memory.
    pub fn of_peer(
        file: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        permissions: Permissions,
        bin: &Bin,
    ) -> std::io::Result<Self> {
        let size = usize::try_from(len).map_err(|_| std::io::ErrorKind::InvalidInput)?;
        let mapping = Mapping::file(file, offset, size, permissions, bin)?;
        Ok(Self::of(mapping, len, permissions))
    }

    pub(crate) fn of(mapping: Mapping, len: u64, permissions: Permissions) -> Self {
        Self { len, permissions, backing: Backing::Mapped(Arc::new(mapping)) }
    }

    /// Maps `len` bytes at `offset` of late memory, like [`Region::of_peer`]. A device that
    /// accesses bytes which nobody was given finds zeros.
    ///
    /// # Errors
    /// As for [`Mapping::file`]; `InvalidInput` for bytes beyond the memory.
    pub fn late(
        memory: &Arc<LateMemory>,
        offset: u64,
        len: u64,
        permissions: Permissions,
        bin: &Bin,
    ) -> std::io::Result<Self> {
        let size = usize::try_from(len).map_err(|_| std::io::ErrorKind::InvalidInput)?;
        let mapping = memory.map((offset, size), permissions, bin)?;
        Ok(Self::of(mapping, len, permissions))
    }

    /// Returns memory that is accessed by messages to the client.
    pub fn remote(remote: Arc<dyn MessageMemory>, len: u64, permissions: Permissions) -> Self {
        Self { len, permissions, backing: Backing::Remote(remote) }
    }

    /// Returns zeroed heap memory that devices may read and write, for tests.
    pub fn heap(len: usize) -> Self {
        Self {
            len: len as u64,
            permissions: Permissions::READ_WRITE,
            backing: Backing::Mapped(Arc::new(Mapping::heap(len))),
        }
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the size is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether the region is accessed by messages only.
    pub fn is_remote(&self) -> bool {
        matches!(self.backing, Backing::Remote(_))
    }

    /// Begins to note the pages of [`PAGE`](crate::PAGE) bytes that this process writes to through
    /// this region and its clones, and forgets what was noted before.
    ///
    /// A write that another thread has begun may be missed. So no write may be in flight: a device
    /// is quiesced, or its threads pass a barrier before the first page is read.
    ///
    /// Returns `false` for message-only memory, of which nothing is noted.
    pub fn log_writes(&self) -> bool {
        let Backing::Mapped(mapping) = &self.backing else { return false };
        mapping.log().begin(mapping.len());
        true
    }

    /// Stops noting writes.
    pub fn end_log(&self) {
        if let Backing::Mapped(mapping) = &self.backing {
            mapping.log().end();
        }
    }

    /// Takes what was noted of `pages`, counted from the region's start: adds a bit for each page
    /// that was written to since it was last taken to `into`, the first page's the lowest of the
    /// first word. The first page's number is a multiple of 64, and so is the end, unless it is the
    /// region's. No system call that writes to the memory may be in flight: its pages were
    /// noted when it began. Threads may store meanwhile: they note a page behind its bytes.
    ///
    /// Returns `false` if writes are not noted, the region has no such pages, or `into` has not
    /// just as many words as they need; nothing is taken then.
    pub fn take_written(&self, pages: Range<usize>, into: &mut [u64]) -> bool {
        match &self.backing {
            Backing::Mapped(mapping) => mapping.log().take(pages, into),
            Backing::Remote(_) => false,
        }
    }

    /// Gives the whole region to hardware, which reaches it without this process and cannot wait
    /// for a page. So all late memory ([`LateMemory`]) of the region that was not zeroed ahead
    /// first gets the bytes with which its user begins, which may last for seconds.
    ///
    /// Returns `None` for message-only memory, and if the host has no page left.
    pub fn give_to_hardware(&self) -> Option<Given> {
        let Backing::Mapped(mapping) = &self.backing else { return None };
        let len = mapping.len();
        let written = mapping.give_to_hardware(0, len)? as u64;
        Some(Given { address: mapping.address(0, len).addr() as u64, written })
    }

    /// Returns whether the owner may take the memory away (see [`Mapping::is_guarded`]).
    pub fn is_guarded(&self) -> bool {
        matches!(&self.backing, Backing::Mapped(mapping) if mapping.is_guarded())
    }
}

/// A removed region. Spans of requests in flight may still refer to its mapping.
pub struct Removed(pub(crate) Region);

impl Removed {
    /// Returns whether nothing refers to the memory any more: no span of a request in flight, no
    /// [`View`](crate::View)'s table and no clone of the region. Message-only memory has no spans
    /// and is always idle.
    pub fn is_idle(&self) -> bool {
        match &self.0.backing {
            Backing::Mapped(mapping) => {
                let idle = Arc::strong_count(mapping) == 1;
                // `strong_count` has no ordering. The fence pairs with the release in the drop of
                // the last span on another thread: all accesses through that span are over.
                fence(Ordering::Acquire);
                idle
            }
            Backing::Remote(_) => true,
        }
    }
}
