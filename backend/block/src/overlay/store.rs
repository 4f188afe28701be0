//! The file that a layer lies in when it shall outlive its process.
//!
//! A memfd: a head that says what it is, the map of blocks, the map of pages, the data, each from a
//! page's beginning on. It takes memory where something was written. The maps are records of
//! [`Bits`]: this process decides on its own copies.
//!
//! A process that is killed stops between two instructions, so what it leaves is a prefix of its
//! stores (see [`slipway_ram::Lasting`]). Every prefix is a valid layer, by the order of stores:
//! - *Write*: the pages count as used; the bytes; the blocks become the layer's. Until then they are
//!   the base's, whatever lies in their place. So no block is half-visible that was the base's, and
//!   one that was the layer's already may be half old and half new, as long as its command has not
//!   ended: its device carries that out again.
//! - *Write Zeroes, Discard*: zeros, with pages given back; these pages count as unused; the blocks
//!   become the layer's. So a page that counts as unused reads as zeros.
//! - Nothing is acknowledged before its last store.
//!
//! A successor believes the maps, since any bits are a valid layer, and checks all else: size, seals,
//! versions, the disk's shape, and that the base is the same one.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use slipway_ram::Lasting;

use super::bits::{Bits, bytes_of};
use crate::memory::{Anonymous, FIXED, memory_file, page_size, sealed_len};
use crate::{Geometry, OpenError};

/// What a base is told by: equal for the same unchanged base, of any meaning.
pub type BaseIdentity = [u64; 4];

/// First word: "SLIPOVER".
const MAGIC: u64 = u64::from_be_bytes(*b"SLIPOVER");
/// Version of everything that the file's bytes mean.
const VERSION: u64 = 1;
/// Words of the head that say something.
const HEAD: usize = 8;

/// Where the parts begin, in bytes.
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

/// A file for [`OverlayDisk::of`](crate::OverlayDisk::of): memory for an overlay in which nothing was
/// written, that outlives this process as long as somebody holds the descriptor. `geometry` is the
/// base's.
///
/// # Errors
/// [`OpenError::Memory`]: no descriptors left, a size that no memory has, strict overcommit
/// (`vm.overcommit_memory` = 2).
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

/// A layer's memory.
pub(super) struct Store {
    pub data: Anonymous,
    /// A bit per logical block: whether the layer's bytes count, or the base's.
    pub blocks: Bits,
    /// A bit per page: whether it is used. What is not reads as zeros.
    pub pages: Bits,
    /// How many of them are.
    pub used_pages: u64,
}

impl Store {
    /// Of this process alone.
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
            })
        };
        made().map_err(|source| OpenError::Memory { bytes, source })
    }

    /// In `file`.
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
        let (pages, used_pages) = map(bytes.div_ceil(page_size() as u64), pages, layout.pages)?;
        Ok(Self { data: data.small_pages(), blocks, pages, used_pages })
    }
}

/// Whether the head is the expected one, and what is wrong with it.
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
