//! The DMA map of one client and the device's view of it.
//!
//! Over 500 lines: the table of mappings, with the rules by which it changes under its readers.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use arc_swap::ArcSwap;
use slipway_peer::Bin;

use crate::{Access, Fault, Mapping, Permissions, Remote, Span, pages};

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
    /// Memory of a file of this process's own: as [`Region::of_peer`] with a bin that all such
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

    /// Memory of a file that a client passed: `len` bytes at `offset`, neither of them necessarily
    /// a multiple of a page. Once nobody refers to it, it is unmapped through the client's `bin`.
    ///
    /// # Errors
    /// As for [`Mapping::file`]: all of them are the client's fault but a lack of memory.
    pub fn of_peer(
        file: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        permissions: Permissions,
        bin: &Bin,
    ) -> std::io::Result<Self> {
        let size = usize::try_from(len).map_err(|_| std::io::ErrorKind::InvalidInput)?;
        let mapping = Mapping::file(file, offset, size, permissions, bin)?;
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

/// Regions by address, ascending. There are few and they change rarely, so a sorted vector is found
/// through fastest.
#[derive(Clone, Default)]
struct Table(Vec<(u64, Region)>);

impl Table {
    /// How many regions begin at or below `iova`.
    fn up_to(&self, iova: u64) -> usize {
        self.0.partition_point(|(start, _)| *start <= iova)
    }

    /// The region that begins nearest below `iova`, or there.
    fn below(&self, iova: u64) -> Option<&(u64, Region)> {
        self.0.get(self.up_to(iova).checked_sub(1)?)
    }
}

/// The owner's side of a client's address space: regions come and go here.
#[derive(Default)]
pub struct DmaMap {
    shared: Arc<Shared>,
}

/// What owner and views share.
#[derive(Default)]
struct Shared {
    table: ArcSwap<Table>,
    /// Counts the changes of `table`; goes up after each.
    version: AtomicU64,
}

impl Shared {
    fn store(&self, table: Table) -> Arc<Table> {
        let old = self.table.swap(Arc::new(table));
        // Pairs with the acquire in `version`: who sees the count sees the table.
        self.version.fetch_add(1, Ordering::Release);
        old
    }

    fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }
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
        Memory { shared: Arc::clone(&self.shared) }
    }

    /// Adds `region` at `iova`.
    ///
    /// # Errors
    /// [`MapError`]; nothing has changed then.
    pub fn add(&mut self, iova: u64, region: Region) -> Result<(), MapError> {
        // By its last byte, since the end of a region at the top of the address space is 2^64.
        let last = region.len.checked_sub(1).and_then(|length| iova.checked_add(length));
        let last = last.ok_or(MapError::BadRange)?;
        let mut table = Table::clone(&self.shared.table.load());
        if table.0.len() >= MAX_REGIONS {
            return Err(MapError::TooMany);
        }
        let before = table.below(last);
        if before.is_some_and(|(start, old)| start + (old.len - 1) >= iova) {
            return Err(MapError::Overlap);
        }
        table.0.insert(table.up_to(iova), (iova, region));
        self.shared.store(table);
        Ok(())
    }

    /// Removes the region with exactly this address and length. New accesses fault from now on.
    ///
    /// # Errors
    /// [`MapError::NotMapped`].
    pub fn remove(&mut self, iova: u64, len: u64) -> Result<Removed, MapError> {
        let mut table = Table::clone(&self.shared.table.load());
        let at = table.up_to(iova).checked_sub(1).ok_or(MapError::NotMapped)?;
        if table.0[at].0 != iova || table.0[at].1.len != len {
            return Err(MapError::NotMapped);
        }
        let (_, region) = table.0.remove(at);
        self.shared.store(table);
        Ok(Removed(region))
    }

    /// Removes everything.
    pub fn clear(&mut self) -> Vec<Removed> {
        let old = self.shared.store(Table::default());
        old.0.iter().map(|(_, region)| Removed(region.clone())).collect()
    }

    /// Every region: address, region.
    pub fn regions(&self) -> Vec<(u64, Region)> {
        self.shared.table.load().0.clone()
    }
}

/// A device's view of a client's memory. Cheap to clone; takes no lock.
#[derive(Clone)]
pub struct Memory {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({} regions)", self.shared.table.load().0.len())
    }
}

impl Memory {
    /// `len` bytes of heap at address 0, for tests.
    pub fn heap(len: usize) -> Self {
        let table = Table(vec![(0, Region::heap(len))]);
        Self {
            shared: Arc::new(Shared { table: ArcSwap::from_pointee(table), ..Shared::default() }),
        }
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
        let table = self.shared.table.load();
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
        let table = self.shared.table.load();
        let piece = find(&table, iova, 4)?.allowing(Access::Write)?;
        if let Some(mapping) = piece.whole(4) {
            let there = mapping.store_u32(piece.offset, value);
            return if there { Ok(()) } else { Err(Fault::Gone { iova }) };
        }
        fence(Ordering::Release);
        self.write(iova, &value.to_le_bytes())
    }

    /// Stores 16 bytes, little-endian, at `iova` so that whoever sees the last four sees all of
    /// them: an entry of a ring with its valid bit in the last word.
    ///
    /// # Errors
    /// [`Fault`].
    pub fn publish(&self, iova: u64, bits: u128) -> Result<(), Fault> {
        let table = self.shared.table.load();
        let piece = find(&table, iova, 16)?.allowing(Access::Write)?;
        if let Some(mapping) = piece.whole(16) {
            let there = mapping.publish(piece.offset, bits);
            return if there { Ok(()) } else { Err(Fault::Gone { iova }) };
        }
        self.write(iova, &bits.to_le_bytes()[..12])?;
        self.store_u32(iova.wrapping_add(12), (bits >> 96) as u32)
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
        self.walk(iova, len, access, |piece| append(&piece, spans))
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
        iova: u64,
        left: usize,
        visit: impl FnMut(Piece<'_>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        pieces(&self.shared.table.load(), iova, left, visit)
    }

    /// Counts the changes of the map. What was pinned is what is mapped as long as it stays.
    pub fn version(&self) -> u64 {
        self.shared.version()
    }
}

/// A device's view that keeps the map's table between lookups, so that one costs next to nothing.
///
/// It sees a change of the map at its next lookup. Until then it keeps what was removed alive, as a
/// span does: a device lets go ([`View::release`]) when it is quiesced.
pub struct View {
    memory: Memory,
    version: u64,
    table: Option<Arc<Table>>,
}

impl View {
    /// A view of `memory` that keeps nothing yet.
    pub fn new(memory: Memory) -> Self {
        Self { memory, version: 0, table: None }
    }

    /// Pins the ranges (address, bytes) that `ranges` gives and makes `spans` consist of exactly
    /// them, in order, joined where one follows the other. Spans that are there already are used
    /// again, so pass those of an earlier request: where they are of the same mapping, no count of
    /// references changes.
    ///
    /// # Errors
    /// As for [`Memory::pin`]; `spans` then holds nothing meaningful.
    pub fn pin(
        &mut self,
        ranges: impl Iterator<Item = (u64, usize)>,
        access: Access,
        spans: &mut Vec<Span>,
    ) -> Result<(), Fault> {
        let version = self.memory.version();
        if version != self.version {
            self.release();
            self.version = version;
        }
        let table = self.table.get_or_insert_with(|| self.memory.shared.table.load_full());
        let mut used = 0;
        for (iova, len) in ranges {
            pieces(table, iova, len, |piece| piece.allowing(access)?.pin(spans, &mut used))?;
        }
        spans.truncate(used);
        Ok(())
    }

    /// Lets go of the map's table.
    pub fn release(&mut self) {
        self.table = None;
    }
}

/// Visits the parts of the range region by region. Stops at the first error.
fn pieces(
    table: &Table,
    mut iova: u64,
    mut left: usize,
    mut visit: impl FnMut(Piece<'_>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    while left > 0 {
        let piece = find(table, iova, left)?;
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

/// Appends the piece, joined with the last span where it follows that.
fn append(piece: &Piece<'_>, spans: &mut Vec<Span>) -> Result<(), Fault> {
    let span = piece.span()?;
    if !spans.last_mut().is_some_and(|last| last.join(&span)) {
        spans.push(span);
    }
    Ok(())
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
    let (start, region) = table.below(iova).ok_or(unmapped)?;
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

    /// Joins the piece with the last of the first `used` spans, or makes it the next of them.
    #[inline]
    fn pin(&self, spans: &mut Vec<Span>, used: &mut usize) -> Result<(), Fault> {
        let Backing::Mapped(mapping) = &self.region.backing else {
            return Err(Fault::Remote { iova: self.iova });
        };
        let (offset, len, iova) = (self.offset, self.len, self.iova);
        let last = used.checked_sub(1).and_then(|last| spans.get_mut(last));
        if last.is_some_and(|last| last.extend(mapping, offset, len, iova)) {
            return Ok(());
        }
        match spans.get_mut(*used) {
            Some(span) => span.renew(mapping, offset, len, iova),
            None => spans.push(Span::new(Arc::clone(mapping), offset, len, iova)),
        }
        *used += 1;
        Ok(())
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
