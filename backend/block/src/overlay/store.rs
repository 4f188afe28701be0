//! The memory of a layer, and the file that holds it if it must outlive its process.
//!
//! The file is a memfd of four parts, each of which begins at a page: a head that identifies the
//! file, the map of blocks, the map of pages, and the data. It takes memory only where something
//! was written. The maps are records of [`Bits`]: this process decides on its own copies.
//!
//! A process that is killed stops between two instructions, so it leaves a prefix of its stores
//! (see [`slipway_ram::Lasting`]). The order of stores makes every prefix a valid layer:
//! - *Write*: mark the pages as used; store the bytes; mark the blocks as the layer's. Until the
//!   last step the blocks are the base's, whatever lies in their place. So no block of the base is
//!   ever half-visible. A block that already was the layer's may be half old and half new until its
//!   command has ended; its device carries an unfinished command out again.
//! - *Write Zeroes, Discard*: store zeros and give pages back; mark these pages as unused; mark the
//!   blocks as the layer's. So a page that is marked as unused reads as zeros.
//! - Nothing is acknowledged before its last store.
//!
//! A successor trusts the maps, since any bits make a valid layer, and checks everything else:
//! size, seals, versions, the disk's shape, and that the base is the same one.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use slipway_ram::Lasting;

use super::bits::{Bits, Touched, bytes_of};
use crate::memory::{Anonymous, FIXED, memory_file, page_size, sealed_len};
use crate::{BaseIdentity, Geometry, OpenError};

/// The first word of the head: "SLIPOVER".
const MAGIC: u64 = u64::from_be_bytes(*b"SLIPOVER");
/// The version of the file's format.
const VERSION: u64 = 1;
/// The number of words in the head.
const HEAD: usize = 8;

/// The offsets of the parts, in bytes.
struct Layout {
    blocks: u64,
    pages: u64,
    data: u64,
    end: u64,
}

impl Layout {
    fn of(geometry: &Geometry) -> io::Result<Self> {
        let page = page_size() as u64;
        let after = |start: u64, bytes: u64| {
            let end = start.checked_add(bytes)?;
            end.checked_next_multiple_of(page)
        };
        let maps = [bytes_of(geometry.blocks)?, bytes_of(geometry.bytes().div_ceil(page))?];
        let [blocks, pages] = maps.map(|bytes| bytes as u64);
        let whole = || {
            let pages_at = after(page, blocks)?;
            let data = after(pages_at, pages)?;
            let end = after(data, geometry.bytes())?;
            let fits = i64::try_from(end).is_ok() && usize::try_from(end).is_ok();
            fits.then_some(Self { blocks: page, pages: pages_at, data, end })
        };
        whole().ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }
}

fn head(geometry: &Geometry, base: &BaseIdentity) -> [u64; HEAD] {
    let version = VERSION << 32 | page_size() as u64;
    let [one, two, three, four] = *base;
    [MAGIC, version, u64::from(geometry.block_size), geometry.blocks, one, two, three, four]
}

/// Creates a file for [`OverlayDisk::of`](crate::OverlayDisk::of): memory for an empty overlay that
/// outlives this process as long as a process holds the descriptor. `geometry` is the base's.
///
/// # Errors
/// [`OpenError::Memory`] if no descriptors are left, if the size exceeds any memory, or under
/// strict overcommit (`vm.overcommit_memory` = 2).
pub fn overlay_file(geometry: &Geometry, base: &BaseIdentity) -> Result<OwnedFd, OpenError> {
    let made = Layout::of(geometry).and_then(|layout| {
        let file = memory_file(layout.end, FIXED)?;
        let lasting = Lasting::beginning_of(file.try_clone()?, page_size())?;
        for (word, value) in lasting.words().iter().zip(head(geometry, base)) {
            word.store(value, Ordering::Release);
        }
        Ok(file)
    });
    made.map_err(|source| OpenError::Memory { bytes: geometry.bytes(), source })
}

/// The memory of a layer.
pub(super) struct Store {
    pub data: Anonymous,
    /// A bit per logical block: set if the block's bytes are the layer's, clear if the base's.
    pub blocks: Bits,
    /// A bit per page: set if the page is used. An unused page reads as zeros.
    pub pages: Bits,
    /// The number of used pages.
    pub used_pages: u64,
    /// The page tables of the data: a page of the kernel's memory for each 2 MiB in which a page
    /// was ever used. Giving pages back does not free it.
    pub tables: Touched,
    /// The number of pages of the file's head; 0 without a file.
    head_pages: u64,
}

impl Store {
    /// Creates a store without a file, for this process alone.
    pub fn new(geometry: &Geometry) -> Result<Self, OpenError> {
        let bytes = geometry.bytes();
        let made = || {
            let size = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
            let pages = bytes.div_ceil(page_size() as u64);
            Ok(Self {
                data: Anonymous::new(size)?.small_pages(),
                blocks: Bits::new(geometry.blocks)?,
                pages: Bits::new(pages)?,
                used_pages: 0,
                tables: Touched::new(pages.div_ceil(pages_per_table()))?,
                head_pages: 0,
            })
        };
        made().map_err(|source| OpenError::Memory { bytes, source })
    }

    /// Opens the store in `file`.
    pub fn of(geometry: &Geometry, base: &BaseIdentity, file: &OwnedFd) -> Result<Self, OpenError> {
        let bytes = geometry.bytes();
        let failed = |source| OpenError::Memory { bytes, source };
        let layout = Layout::of(geometry).map_err(failed)?;
        if sealed_len(file).map_err(failed)? != layout.end {
            return Err(OpenError::Kept("it is not as long as the disk asks for"));
        }
        let lasting = file.try_clone();
        let lasting = lasting.and_then(|file| Lasting::beginning_of(file, layout.data as usize));
        let lasting = lasting.map_err(failed)?;
        check(&lasting, &head(geometry, base))?;
        let short = || OpenError::Kept("its parts do not fit");
        let (_, maps) = lasting.split(layout.blocks as usize).ok_or_else(short)?;
        let (blocks, pages) =
            maps.split((layout.pages - layout.blocks) as usize).ok_or_else(short)?;
        let map = |len, record, start| {
            let bits = Bits::of(len, record, (file, start)).map_err(failed)?;
            bits.ok_or(OpenError::Kept("a map goes beyond the disk"))
        };
        let data = Anonymous::of(file, layout.data, bytes as usize).map_err(failed)?;
        let (blocks, _) = map(geometry.blocks, blocks, layout.blocks)?;
        let all_pages = bytes.div_ceil(page_size() as u64);
        let (pages, used_pages) = map(all_pages, pages, layout.pages)?;
        let tables = Touched::new(all_pages.div_ceil(pages_per_table())).map_err(failed)?;
        let mut store =
            Self { data: data.small_pages(), blocks, pages, used_pages, tables, head_pages: 1 };
        store.expect_tables();
        Ok(store)
    }

    /// Counts the page tables that reading what a predecessor left takes.
    fn expect_tables(&mut self) {
        // The pages of a word are in one table.
        for page in self.pages.words_with_ones() {
            self.tables.note(page / pages_per_table());
        }
    }

    /// Returns the number of pages of memory that are held beside the data. It only grows.
    pub fn map_pages(&self) -> u64 {
        self.blocks.held_pages() + self.pages.held_pages() + self.head_pages
    }
}

/// The maps of a layer in a file, read by system calls: the layer itself may be in use.
pub(super) struct Maps {
    /// See [`Store::blocks`].
    pub blocks: Bits,
    /// See [`Store::pages`].
    pub pages: Bits,
    /// The offset in the file of the layer's first byte.
    pub data: u64,
}

impl Maps {
    /// Reads the maps of the layer in `file`, which is of a disk of this shape.
    ///
    /// # Errors
    /// The errors of reading the file; `InvalidData` if a map goes beyond the disk.
    pub fn read(geometry: &Geometry, file: &OwnedFd) -> io::Result<Self> {
        let layout = Layout::of(geometry)?;
        let map = |len, start| -> io::Result<Bits> {
            let read = Bits::read(len, (file, start))?;
            read.map(|(bits, _)| bits).ok_or_else(|| io::ErrorKind::InvalidData.into())
        };
        let blocks = map(geometry.blocks, layout.blocks)?;
        let pages = map(geometry.bytes().div_ceil(page_size() as u64), layout.pages)?;
        Ok(Self { blocks, pages, data: layout.data })
    }
}

/// Returns the number of pages that the entries of a page table name.
pub(super) fn pages_per_table() -> u64 {
    (page_size() / size_of::<u64>()) as u64
}

/// Checks that the head is the expected one; the error names the first difference.
fn check(lasting: &Lasting, expected: &[u64; HEAD]) -> Result<(), OpenError> {
    let found = |at: usize| lasting.words()[at].load(Ordering::Acquire);
    for (at, expected) in expected.iter().enumerate() {
        if found(at) != *expected {
            return Err(OpenError::Kept(match at {
                0 => "it is no overlay",
                1 => "it is of another version",
                2 | 3 => "its disk had another shape",
                _ => "it was over another base, or the base has changed",
            }));
        }
    }
    Ok(())
}
