//! The DMA map of one client and the device's view of it.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use arc_swap::ArcSwap;

use crate::{Access, Fault, Mapping, Permissions, Remote, Span};

/// Most regions that one client may map: QEMU needs a few dozen; the cap bounds what a hostile
/// client makes us hold.
pub const MAX_REGIONS: usize = 4096;

/// A stretch of a client's I/O virtual address space.
#[derive(Clone)]
pub struct Region {
    len: u64,
    permissions: Permissions,
    backing: Backing,
}

#[derive(Clone)]
enum Backing {
    Mapped(Arc<Mapping>),
    Remote(Arc<dyn Remote>),
}

impl Region {
    /// Memory of a file that the client passed: `len` bytes at `offset`, neither of them
    /// necessarily a multiple of a page.
    ///
    /// # Errors
    /// As for [`Mapping::file`]: all of them are the client's fault but a lack of memory.
    pub fn mapped(
        file: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        permissions: Permissions,
    ) -> std::io::Result<Self> {
        let size = usize::try_from(len).map_err(|_| std::io::ErrorKind::InvalidInput)?;
        let mapping = Mapping::file(file, offset, size, permissions)?;
        Ok(Self { len, permissions, backing: Backing::Mapped(Arc::new(mapping)) })
    }

    /// Memory that is reached by messages.
    pub fn remote(remote: Arc<dyn Remote>, len: u64, permissions: Permissions) -> Self {
        Self { len, permissions, backing: Backing::Remote(remote) }
    }

    /// Zeroed heap memory that any device may read and write: for tests.
    pub fn heap(len: usize) -> Self {
        Self {
            len: len as u64,
            permissions: Permissions::READ_WRITE,
            backing: Backing::Mapped(Arc::new(Mapping::heap(len))),
        }
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it is reached by messages only.
    pub fn is_remote(&self) -> bool {
        matches!(self.backing, Backing::Remote(_))
    }

    /// Whether its owner may take it away (see [`Mapping::is_guarded`]).
    pub fn is_guarded(&self) -> bool {
        matches!(&self.backing, Backing::Mapped(mapping) if mapping.is_guarded())
    }
}

/// Why a region was not added or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// Zero bytes, or past the end of the 64-bit address space. (Ending with its last byte is
    /// fine.)
    #[error("the region is empty or wraps the address space")]
    BadRange,
    /// Overlaps a region that is there.
    #[error("the region overlaps one that is mapped")]
    Overlap,
    /// No region has exactly this address and length.
    #[error("no region is mapped at exactly this range")]
    NotMapped,
    /// [`MAX_REGIONS`] are there already.
    #[error("the client mapped too many regions")]
    TooMany,
}

type Table = BTreeMap<u64, Region>;

/// The owner's side of a client's address space: regions come and go here.
#[derive(Default)]
pub struct DmaMap {
    table: Arc<ArcSwap<Table>>,
}

/// A removed region. Spans of requests in flight may still refer to its mapping.
pub struct Removed(Region);

impl Removed {
    /// Whether no request in flight refers to the memory any more. A clone of the region counts
    /// as one. Message-only memory has no spans and is always idle.
    pub fn is_idle(&self) -> bool {
        match &self.0.backing {
            Backing::Mapped(mapping) => {
                let idle = Arc::strong_count(mapping) == 1;
                // The count is read without ordering. Pairs with the release in the drop of the
                // last span on another thread: what was done through it is over.
                fence(Ordering::Acquire);
                idle
            }
            Backing::Remote(_) => true,
        }
    }
}

impl DmaMap {
    /// An empty map.
    pub fn new() -> Self {
        Self::default()
    }

    /// The view for devices; any number of them, on any thread.
    pub fn memory(&self) -> Memory {
        Memory { table: Arc::clone(&self.table) }
    }

    /// Adds `region` at `iova`.
    ///
    /// # Errors
    /// [`MapError`]; nothing has changed then.
    pub fn add(&mut self, iova: u64, region: Region) -> Result<(), MapError> {
        // By its last byte, since the end of a region at the top of the address space is 2^64.
        let last = region.len.checked_sub(1).and_then(|length| iova.checked_add(length));
        let last = last.ok_or(MapError::BadRange)?;
        let mut table = Table::clone(&self.table.load());
        if table.len() >= MAX_REGIONS {
            return Err(MapError::TooMany);
        }
        let before = table.range(..=last).next_back();
        if before.is_some_and(|(start, old)| start + (old.len - 1) >= iova) {
            return Err(MapError::Overlap);
        }
        table.insert(iova, region);
        self.table.store(Arc::new(table));
        Ok(())
    }

    /// Removes the region with exactly this address and length. New accesses fault from now on.
    ///
    /// # Errors
    /// [`MapError::NotMapped`].
    pub fn remove(&mut self, iova: u64, len: u64) -> Result<Removed, MapError> {
        let mut table = Table::clone(&self.table.load());
        match table.get(&iova) {
            Some(region) if region.len == len => {}
            _ => return Err(MapError::NotMapped),
        }
        let region = table.remove(&iova).ok_or(MapError::NotMapped)?;
        self.table.store(Arc::new(table));
        Ok(Removed(region))
    }

    /// Removes everything.
    pub fn clear(&mut self) -> Vec<Removed> {
        let old = self.table.swap(Arc::default());
        old.values().cloned().map(Removed).collect()
    }

    /// Every region: address, region.
    pub fn regions(&self) -> Vec<(u64, Region)> {
        self.table.load().iter().map(|(iova, region)| (*iova, region.clone())).collect()
    }
}

/// A device's view of a client's memory. Cheap to clone; takes no lock.
#[derive(Clone)]
pub struct Memory {
    table: Arc<ArcSwap<Table>>,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({} regions)", self.table.load().len())
    }
}

impl Memory {
    /// `len` bytes of heap at address 0, for tests.
    pub fn heap(len: usize) -> Self {
        let table = Table::from([(0, Region::heap(len))]);
        Self { table: Arc::new(ArcSwap::from_pointee(table)) }
    }

    /// Copies guest memory at `iova` into `into`. The range may cross regions.
    ///
    /// # Errors
    /// [`Fault`]; `into` then holds nothing meaningful.
    pub fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), Fault> {
        let mut done = 0;
        self.walk(iova, into.len(), Access::Read, |piece| {
            let part = &mut into[done..done + piece.len];
            done += piece.len;
            piece.read(part)
        })
    }

    /// Copies `from` to guest memory at `iova`. The range may cross regions.
    ///
    /// # Errors
    /// [`Fault`]; part of the range may have been written when a client's memory vanished.
    pub fn write(&self, iova: u64, from: &[u8]) -> Result<(), Fault> {
        let mut done = 0;
        self.walk(iova, from.len(), Access::Write, |piece| {
            let part = &from[done..done + piece.len];
            done += piece.len;
            piece.write(part)
        })
    }

    /// Loads the little-endian 32-bit word at `iova`, with acquire ordering, in one access.
    ///
    /// # Errors
    /// [`Fault`]. A word that crosses regions or is message-only is copied instead.
    pub fn load_u32(&self, iova: u64) -> Result<u32, Fault> {
        let table = self.table.load();
        let piece = find(&table, iova, 4)?.allowing(Access::Read)?;
        if let Some(mapping) = piece.whole(4) {
            return mapping.load_u32(piece.offset).ok_or(Fault::Gone { iova });
        }
        let mut bytes = [0; 4];
        self.read(iova, &mut bytes)?;
        fence(Ordering::Acquire);
        Ok(u32::from_le_bytes(bytes))
    }

    /// Stores the little-endian 32-bit word at `iova`, with release ordering, in one access:
    /// whoever sees it sees all that was written before.
    ///
    /// # Errors
    /// [`Fault`]. A word that crosses regions or is message-only is copied instead.
    pub fn store_u32(&self, iova: u64, value: u32) -> Result<(), Fault> {
        let table = self.table.load();
        let piece = find(&table, iova, 4)?.allowing(Access::Write)?;
        if let Some(mapping) = piece.whole(4) {
            let there = mapping.store_u32(piece.offset, value);
            return if there { Ok(()) } else { Err(Fault::Gone { iova }) };
        }
        fence(Ordering::Release);
        self.write(iova, &value.to_le_bytes())
    }

    /// Stores 16 bytes at `iova` so that whoever sees the last four sees all of them: an entry of a
    /// ring with its valid bit in the last word.
    ///
    /// # Errors
    /// [`Fault`].
    pub fn publish(&self, iova: u64, bytes: &[u8; 16]) -> Result<(), Fault> {
        let table = self.table.load();
        let piece = find(&table, iova, 16)?.allowing(Access::Write)?;
        if let Some(mapping) = piece.whole(16) {
            let there = mapping.publish(piece.offset, bytes);
            return if there { Ok(()) } else { Err(Fault::Gone { iova }) };
        }
        let (body, last) = bytes.split_at(12);
        self.write(iova, body)?;
        let last = last.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
        self.store_u32(iova.wrapping_add(12), last)
    }

    /// Pins `len` bytes at `iova` and appends them to `spans`, joined with the last one where they
    /// follow it. Message-only memory has no spans: its caller bounces through [`Span::heap`] and
    /// [`Memory::read`] / [`Memory::write`].
    ///
    /// # Errors
    /// [`Fault`]; [`Fault::Remote`] for message-only memory. `spans` may have grown by then.
    pub fn pin(
        &self,
        iova: u64,
        len: usize,
        access: Access,
        spans: &mut Vec<Span>,
    ) -> Result<(), Fault> {
        self.walk(iova, len, access, |piece| {
            let span = piece.span()?;
            if !spans.last_mut().is_some_and(|last| last.join(&span)) {
                spans.push(span);
            }
            Ok(())
        })
    }

    /// Whether any byte of the range is message-only, up to the first that is not mapped.
    pub fn is_remote(&self, iova: u64, len: usize) -> bool {
        let mut remote = false;
        let _ = self.pieces(iova, len, |piece| {
            remote |= piece.region.is_remote();
            Ok(())
        });
        remote
    }

    fn walk(
        &self,
        iova: u64,
        len: usize,
        access: Access,
        mut visit: impl FnMut(Piece<'_>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        self.pieces(iova, len, |piece| visit(piece.allowing(access)?))
    }

    /// Visits the parts of the range region by region. Stops at the first error.
    fn pieces(
        &self,
        mut iova: u64,
        mut left: usize,
        mut visit: impl FnMut(Piece<'_>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let table = self.table.load();
        while left > 0 {
            let piece = find(&table, iova, left)?;
            let len = piece.len;
            visit(piece)?;
            left -= len;
            match iova.checked_add(len as u64) {
                Some(next) => iova = next,
                // That was the last byte of the address space; nothing follows it.
                None if left == 0 => return Ok(()),
                None => return Err(Fault::Unmapped { iova, len: left as u64 }),
            }
        }
        Ok(())
    }
}

/// A range within one region.
struct Piece<'a> {
    region: &'a Region,
    iova: u64,
    offset: usize,
    len: usize,
}

/// As much of `iova..iova + len` as its region holds.
fn find(table: &Table, iova: u64, len: usize) -> Result<Piece<'_>, Fault> {
    let unmapped = Fault::Unmapped { iova, len: len as u64 };
    let (start, region) = table.range(..=iova).next_back().ok_or(unmapped)?;
    let offset = iova - start;
    if offset >= region.len {
        return Err(unmapped);
    }
    let len = len.min(usize::try_from(region.len - offset).unwrap_or(usize::MAX));
    let offset = usize::try_from(offset).map_err(|_| unmapped)?;
    Ok(Piece { region, iova, offset, len })
}

impl Piece<'_> {
    fn allowing(self, access: Access) -> Result<Self, Fault> {
        if self.region.permissions.allow(access) {
            return Ok(self);
        }
        Err(Fault::Denied { iova: self.iova })
    }

    fn read(&self, into: &mut [u8]) -> Result<(), Fault> {
        match &self.region.backing {
            Backing::Mapped(mapping) if mapping.read(self.offset, into) => Ok(()),
            Backing::Mapped(_) => Err(Fault::Gone { iova: self.iova }),
            Backing::Remote(remote) => remote.read(self.iova, into),
        }
    }

    fn write(&self, from: &[u8]) -> Result<(), Fault> {
        match &self.region.backing {
            Backing::Mapped(mapping) if mapping.write(self.offset, from) => Ok(()),
            Backing::Mapped(_) => Err(Fault::Gone { iova: self.iova }),
            Backing::Remote(remote) => remote.write(self.iova, from),
        }
    }

    /// The mapping, when all of the `len` bytes lie in it.
    fn whole(&self, len: usize) -> Option<&Mapping> {
        match &self.region.backing {
            Backing::Mapped(mapping) if self.len == len => Some(mapping),
            _ => None,
        }
    }

    fn span(&self) -> Result<Span, Fault> {
        match &self.region.backing {
            Backing::Mapped(mapping) => {
                Ok(Span::new(Arc::clone(mapping), self.offset, self.len, self.iova))
            }
            Backing::Remote(_) => Err(Fault::Remote { iova: self.iova }),
        }
    }
}
