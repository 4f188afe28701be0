//! The DMA map of one client and the devices' view of it.
//!
//! - [`DmaMap`] is the owner's side: it replaces the table of regions (`region`) by a new one.
//! - [`Memory`] is a device's side, with copies and pins. Each access takes the present table.
//! - [`View`] is a [`Memory`] that keeps the table from one lookup to the next.
//! - An access is cut into one `RegionRange` for each region that it meets (`pieces`), and the
//!   ranges know how to reach their bytes.
//!
//! A change of the map waits for no reader: readers of the old table reach removed memory until
//! they let go of it ([`Removed::is_idle`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use arc_swap::ArcSwap;

use crate::gate::NotYet;
use crate::region::{Backing, Region, Removed};
use crate::{Access, Fault, Mapping, Span};

/// Maximum number of regions of one client: QEMU needs a few dozen; the cap bounds the memory that
/// a hostile client can make this process hold.
pub const MAX_REGIONS: usize = 4096;

/// Reason for which a region was not added or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// The region is empty, or goes past the end of the 64-bit address space. (Ending with its last
    /// byte is fine.)
    #[error("the region is empty or wraps the address space")]
    BadRange,
    /// The region overlaps one that is mapped.
    #[error("the region overlaps one that is mapped")]
    Overlap,
    /// No region has exactly this address and length.
    #[error("no region is mapped at exactly this range")]
    NotMapped,
    /// [`MAX_REGIONS`] are mapped already.
    #[error("the client mapped too many regions")]
    TooMany,
}

/// Regions by ascending address. They are few and change rarely, so a sorted vector is searched
/// fastest.
#[derive(Clone, Default)]
struct Table(Vec<(u64, Region)>);

impl Table {
    /// Returns the number of regions that begin at or below `iova`.
    fn up_to(&self, iova: u64) -> usize {
        self.0.partition_point(|(start, _)| *start <= iova)
    }

    /// Returns the last region that begins at or below `iova`.
    fn below(&self, iova: u64) -> Option<&(u64, Region)> {
        self.0.get(self.up_to(iova).checked_sub(1)?)
    }
}

/// The owner's side of a client's address space, where regions are added and removed.
#[derive(Default)]
pub struct DmaMap {
    shared: Arc<Shared>,
}

/// State shared by the owner and the views.
#[derive(Default)]
struct Shared {
    table: ArcSwap<Table>,
    /// Number of changes of `table`; incremented after each one.
    version: AtomicU64,
}

impl Shared {
    /// Publishes a table to all views, and returns the one before.
    fn store(&self, table: Table) -> Arc<Table> {
        let old = self.table.swap(Arc::new(table));
        // Pairs with the acquire in `version`: a reader of the new count sees the new table.
        self.version.fetch_add(1, Ordering::Release);
        old
    }

    /// Returns the number of changes that were published.
    fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }
}

impl DmaMap {
    /// Returns an empty map.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a view for devices; there may be any number of views, on any thread.
    pub fn memory(&self) -> Memory {
        Memory { shared: Arc::clone(&self.shared) }
    }

    /// Adds `region` at `iova`.
    ///
    /// # Errors
    /// [`MapError`]; the map is unchanged then.
    pub fn add(&mut self, iova: u64, region: Region) -> Result<(), MapError> {
        // Compares last bytes, since the end of a region at the top of the address space is 2^64.
        let last = region.len.checked_sub(1).and_then(|length| iova.checked_add(length));
        let last = last.ok_or(MapError::BadRange)?;
        let old = self.shared.table.load();
        if old.0.len() >= MAX_REGIONS {
            return Err(MapError::TooMany);
        }
        let before = old.below(last);
        if before.is_some_and(|(start, old)| start + (old.len - 1) >= iova) {
            return Err(MapError::Overlap);
        }
        let mut table = Table::clone(&old);
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

    /// Removes all regions and returns them.
    pub fn clear(&mut self) -> Vec<Removed> {
        let old = self.shared.store(Table::default());
        old.0.iter().map(|(_, region)| Removed(region.clone())).collect()
    }

    /// Returns the region that holds `iova`, and its address. Returns `None` if there is none.
    pub fn region_at(&self, iova: u64) -> Option<(u64, Region)> {
        let table = self.shared.table.load();
        let (start, region) = table.below(iova)?;
        (iova - start < region.len).then(|| (*start, region.clone()))
    }

    /// Returns all regions with their addresses, in ascending order.
    pub fn regions(&self) -> Vec<(u64, Region)> {
        self.shared.table.load().0.clone()
    }
}

/// A device's view of a client's memory. Cheap to clone; lookups take no lock.
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
    /// Returns `len` zeroed bytes of heap at address 0, for tests.
    pub fn heap(len: usize) -> Self {
        let table = Table(vec![(0, Region::heap(len))]);
        Self {
            shared: Arc::new(Shared { table: ArcSwap::from_pointee(table), ..Shared::default() }),
        }
    }

    /// Copies guest memory at `iova` into `into`. The range may cross regions.
    ///
    /// # Errors
    /// [`Fault`]; the contents of `into` are then unspecified.
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
    /// [`Fault`]; the bytes before the fault may have been written.
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

    /// Stores the little-endian 32-bit word at `iova`, with release ordering, in one access: a
    /// reader that sees the word sees all earlier writes.
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

    /// Stores 16 bytes, little-endian, at `iova` so that a reader that sees the last four sees all
    /// of them: an entry of a ring with its valid bit in the last word.
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

    /// Pins `len` bytes at `iova` and appends them to `spans`, joined with the last span where they
    /// follow it. Message-only memory has no spans: the caller bounces through [`Span::heap`] and
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

    /// Returns whether any byte of the range, up to the first unmapped one, is message-only.
    pub fn is_remote(&self, iova: u64, len: usize) -> bool {
        let mut remote = false;
        let _ = self.pieces(iova, len, |piece| {
            remote |= piece.region.is_remote();
            Ok(())
        });
        remote
    }

    /// Visits the range's parts in each region, in order, if they permit the access. Stops at the
    /// first error.
    fn walk(
        &self,
        iova: u64,
        len: usize,
        access: Access,
        mut visit: impl FnMut(RegionRange<'_>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        self.pieces(iova, len, |piece| visit(piece.allowing(access)?))
    }

    /// Visits the range's parts in each region, in order. Stops at the first error.
    fn pieces(
        &self,
        iova: u64,
        left: usize,
        visit: impl FnMut(RegionRange<'_>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        pieces(&self.shared.table.load(), iova, left, visit)
    }

    /// Returns the number of changes of the map. Spans pinned at this version match the map as long
    /// as the number stays the same.
    pub fn version(&self) -> u64 {
        self.shared.version()
    }
}

/// A device's view that caches the map's table between lookups, so that a lookup costs next to
/// nothing.
///
/// A view sees a change of the map at its next lookup. Until then it keeps removed regions alive,
/// as a span does: a device releases it ([`View::release`]) when it is quiesced.
pub struct View {
    memory: Memory,
    version: u64,
    table: Option<Arc<Table>>,
}

impl View {
    /// Returns a view of `memory` that caches nothing yet.
    pub fn new(memory: Memory) -> Self {
        Self { memory, version: 0, table: None }
    }

    /// Pins the `ranges` (address, bytes) and makes `spans` consist of exactly them, in order,
    /// joined where one follows the other. Existing spans are reused, so pass those of an earlier
    /// request: where the mapping is the same, no reference count changes.
    ///
    /// # Errors
    /// As for [`Memory::pin`]; [`Fault::Busy`] where [`Memory::pin`] would wait. The contents of
    /// `spans` are then unspecified.
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

    /// Prefetches the cache line at `iova`, which an access of this kind is about to touch. Ignored
    /// if nothing is cached, or no memory of this process is there.
    #[inline]
    pub fn prefetch(&self, iova: u64, access: Access) {
        let found = self.table.as_deref().map(|table| find(table, iova, 1));
        let Some(Ok(RegionRange { region, offset, .. })) = found else { return };
        let Backing::Mapped(mapping) = &region.backing else { return };
        match access {
            Access::Read => mapping.prefetch(offset),
            Access::Write => mapping.prefetch_to_write(offset),
        }
    }

    /// Drops the cached table.
    pub fn release(&mut self) {
        self.table = None;
    }
}

/// Visits the range's parts in each region, in order. Stops at the first error.
fn pieces(
    table: &Table,
    mut iova: u64,
    mut left: usize,
    mut visit: impl FnMut(RegionRange<'_>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    while left > 0 {
        let piece = find(table, iova, left)?;
        let len = piece.len;
        visit(piece)?;
        left -= len;
        match iova.checked_add(len as u64) {
            Some(next) => iova = next,
            // The piece ended with the last byte of the address space; nothing follows it.
            None if left == 0 => return Ok(()),
            None => return Err(Fault::Unmapped { iova, len: left as u64 }),
        }
    }
    Ok(())
}

/// Appends the piece to `spans`, joined with the last span where it follows that.
fn append(piece: &RegionRange<'_>, spans: &mut Vec<Span>) -> Result<(), Fault> {
    let span = piece.span()?;
    if !spans.last_mut().is_some_and(|last| last.join(&span)) {
        spans.push(span);
    }
    Ok(())
}

/// A range within one region.
struct RegionRange<'a> {
    region: &'a Region,
    iova: u64,
    offset: usize,
    len: usize,
}

/// Returns the part of `iova..iova + len` that lies in the region of `iova`.
fn find(table: &Table, iova: u64, len: usize) -> Result<RegionRange<'_>, Fault> {
    let unmapped = Fault::Unmapped { iova, len: len as u64 };
    let (start, region) = table.below(iova).ok_or(unmapped)?;
    let offset = iova - start;
    if offset >= region.len {
        return Err(unmapped);
    }
    let len = len.min(usize::try_from(region.len - offset).unwrap_or(usize::MAX));
    let offset = usize::try_from(offset).map_err(|_| unmapped)?;
    Ok(RegionRange { region, iova, offset, len })
}

impl RegionRange<'_> {
    /// Returns this part, or an error if its region does not permit the access.
    fn allowing(self, access: Access) -> Result<Self, Fault> {
        if self.region.permissions.allow(access) {
            return Ok(self);
        }
        Err(Fault::Denied { iova: self.iova })
    }

    fn read(&self, into: &mut [u8]) -> Result<(), Fault> {
        match &self.region.backing {
            Backing::Mapped(mapping) if mapping.look(self.offset, into) => Ok(()),
            Backing::Mapped(_) => Err(Fault::Gone { iova: self.iova }),
            Backing::Remote(remote) => remote.read(self.iova, into),
        }
    }

    fn write(&self, from: &[u8]) -> Result<(), Fault> {
        match &self.region.backing {
            Backing::Mapped(mapping)
                if mapping.take_patiently(self.offset, from.len())
                    && mapping.write(self.offset, from) =>
            {
                Ok(())
            }
            Backing::Mapped(_) => Err(Fault::Gone { iova: self.iova }),
            Backing::Remote(remote) => remote.write(self.iova, from),
        }
    }

    /// Returns the mapping if all of the `len` bytes lie in it and may be accessed.
    fn whole(&self, len: usize) -> Option<&Mapping> {
        match &self.region.backing {
            Backing::Mapped(mapping)
                if self.len == len && mapping.take_patiently(self.offset, len) =>
            {
                Some(mapping)
            }
            _ => None,
        }
    }

    /// Joins the piece with the last of the first `used` spans, or stores it as the next one.
    #[inline]
    fn pin(&self, spans: &mut Vec<Span>, used: &mut usize) -> Result<(), Fault> {
        let Backing::Mapped(mapping) = &self.region.backing else {
            return Err(Fault::Remote { iova: self.iova });
        };
        let (offset, len, iova) = (self.offset, self.len, self.iova);
        mapping.take(offset, len).map_err(|not_yet| match not_yet {
            NotYet::Busy => Fault::Busy { iova },
            NotYet::Gone => Fault::Gone { iova },
        })?;
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
            Backing::Mapped(mapping) if mapping.take_patiently(self.offset, self.len) => {
                Ok(Span::new(Arc::clone(mapping), self.offset, self.len, self.iova))
            }
            Backing::Mapped(_) => Err(Fault::Gone { iova: self.iova }),
            Backing::Remote(_) => Err(Fault::Remote { iova: self.iova }),
        }
    }
}
