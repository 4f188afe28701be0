//! The blocks written over the base: their bytes, and maps of which blocks are written. Stores have
//! the order that `store` requires, even without a file.

use std::ops::Range;

use slipway_ram::{Fault, Span};

use super::points::point;
use super::store::{Store, pages_per_table};
use crate::budget::{Budget, Charge};
use crate::memory::page_size;
use crate::{DiskError, Geometry};

/// The content of an unused page.
static ZEROS: [u8; 4096] = [0; 4096];

/// Memory of the disk's size, in which only written pages are allocated.
pub(super) struct Layer {
    store: Store,
    most_pages: u64,
    /// Bytes of a logical block.
    block: u64,
    page: usize,
    /// The memory that is held: used pages, page tables and maps. Declared after the store, so that
    /// memory is given to the kernel first.
    charge: Charge,
    /// The number of pages of maps that are charged.
    charged_maps: u64,
}

impl Layer {
    /// Creates a layer with the content of `store`. Its data takes at most `most` bytes, in whole
    /// pages.
    pub fn new(geometry: &Geometry, store: Store, most: Option<u64>) -> Self {
        let page = page_size();
        let most_pages = most.map_or(u64::MAX, |bytes| bytes / page as u64);
        let mut charge = Charge::new(Budget::new(u64::MAX));
        charge.force((store.used_pages + store.tables.count()) * page as u64);
        let block = u64::from(geometry.block_size);
        let mut layer = Self { store, most_pages, block, page, charge, charged_maps: 0 };
        layer.charge_maps();
        layer
    }

    /// Counts the memory of the layer in `budget`, from now on and what it holds already.
    pub fn count_in(&mut self, budget: &Budget) {
        self.charge.move_to(budget.clone());
    }

    /// Returns the bytes of memory that are held at present: data, page tables and maps.
    pub fn held(&self) -> u64 {
        self.charge.bytes()
    }

    /// Counts pages of maps that were written since the last call. These are not refused: they are
    /// small beside the data that they are for, and a discard needs them to give data back.
    fn charge_maps(&mut self) {
        let pages = self.store.map_pages();
        if pages > self.charged_maps {
            self.charge.force((pages - self.charged_maps) * self.page as u64);
            self.charged_maps = pages;
        }
    }

    /// Returns the bytes of memory that data takes at present.
    pub fn used(&self) -> u64 {
        self.store.used_pages * self.page as u64
    }

    /// Returns whether block `lba` is in the layer, and the end of the run of such blocks, up to
    /// `end`.
    pub fn run(&self, lba: u64, end: u64) -> (bool, u64) {
        (self.store.blocks.get(lba), self.store.blocks.run(lba, end))
    }

    /// Copies from byte `at` of the disk into all spans.
    pub fn read(&self, at: u64, spans: &[Span]) -> Result<(), Fault> {
        let mut at = at as usize;
        for span in spans {
            self.read_span(at, span)?;
            at += span.len();
        }
        Ok(())
    }

    /// Copies from byte `start` of the disk. Writes zeros for unused pages, since reading one may
    /// allocate it.
    fn read_span(&self, start: usize, span: &Span) -> Result<(), Fault> {
        let end = start + span.len();
        let mut at = start;
        while at < end {
            let pages = self.pages_of(&(at..end));
            let used = self.store.pages.get(pages.start);
            let run = self.store.pages.run(pages.start, pages.end) as usize;
            let next = end.min(run * self.page);
            if used {
                span.write(at - start, &self.store.data.bytes()[at..next])?;
            } else {
                zero_span(span, at - start..next - start)?;
            }
            at = next;
        }
        Ok(())
    }

    /// Writes the spans' bytes to the blocks `lba..end`. Nothing changes if there is no space. If
    /// guest memory vanishes, blocks that were in the layer hold a mix of old and new bytes, and
    /// the others are unchanged.
    pub fn write(&mut self, lba: u64, end: u64, spans: &[Span]) -> Result<(), DiskError> {
        let bytes = self.bytes(lba, end);
        let pages = self.pages_of(&bytes);
        let fresh = self.store.pages.zeros(pages.clone());
        if fresh > self.most_pages.saturating_sub(self.store.used_pages) {
            return Err(DiskError::NoSpace);
        }
        if fresh > 0 && !self.take(fresh, &pages) {
            return Err(DiskError::NoSpace);
        }
        self.store.pages.set(pages, true);
        self.store.used_pages += fresh;
        let filled = self.fill(bytes.start, spans);
        if filled.is_ok() {
            self.store.blocks.set(lba..end, true);
        }
        self.charge_maps();
        Ok(filled?)
    }

    /// Counts `fresh` pages of data in `pages`, and the page tables that they need. Returns
    /// `false`, and counts nothing, if a bound does not allow them.
    fn take(&mut self, fresh: u64, pages: &Range<u64>) -> bool {
        let tables = pages.start / pages_per_table()..pages.end.div_ceil(pages_per_table());
        let new = tables.clone().filter(|table| !self.store.tables.has(*table)).count() as u64;
        let taken = self.charge.take((fresh + new) * self.page as u64);
        if taken {
            tables.for_each(|table| self.store.tables.note(table));
        }
        taken
    }

    /// Copies from all spans to byte `at` of the disk.
    fn fill(&mut self, mut at: usize, spans: &[Span]) -> Result<(), Fault> {
        for span in spans {
            point();
            span.read(0, &mut self.store.data.bytes_mut()[at..at + span.len()])?;
            at += span.len();
        }
        Ok(())
    }

    /// Makes the blocks `lba..end` read as zeros, and gives their whole pages back.
    pub fn zero(&mut self, lba: u64, end: u64) {
        let bytes = self.bytes(lba, end);
        let page = self.page;
        let whole = bytes.start.div_ceil(page)..bytes.end / page;
        if whole.start >= whole.end {
            self.zero_part(bytes);
        } else {
            self.zero_part(bytes.start..whole.start * page);
            self.zero_part(whole.end * page..bytes.end);
            self.give_back(whole);
        }
        self.store.blocks.set(lba..end, true);
        self.charge_maps();
    }

    /// Gives these pages back, which then read as zeros. Pages that the kernel does not take stay
    /// used, and are zeroed.
    fn give_back(&mut self, whole: Range<usize>) {
        let bytes = whole.start * self.page..whole.end * self.page;
        point();
        if !self.store.data.give_back(bytes.clone()) {
            return self.zero_part(bytes);
        }
        let whole = whole.start as u64..whole.end as u64;
        let used = (whole.end - whole.start) - self.store.pages.zeros(whole.clone());
        self.store.used_pages -= used;
        self.store.pages.set(whole, false);
        self.charge.give_back(used * self.page as u64);
    }

    /// Zeroes bytes of used pages. Unused pages are zeros already.
    fn zero_part(&mut self, bytes: Range<usize>) {
        let page = self.page;
        for index in self.pages_of(&bytes).filter(|_| !bytes.is_empty()) {
            let start = index as usize * page;
            let part = start.max(bytes.start)..(start + page).min(bytes.end);
            if self.store.pages.get(index) {
                point();
                self.store.data.bytes_mut()[part].fill(0);
            }
        }
    }

    fn bytes(&self, lba: u64, end: u64) -> Range<usize> {
        // The memory has the disk's size, so an offset on the disk fits `usize`.
        (lba * self.block) as usize..(end * self.block) as usize
    }

    fn pages_of(&self, bytes: &Range<usize>) -> Range<u64> {
        (bytes.start / self.page) as u64..bytes.end.div_ceil(self.page) as u64
    }

    /// Returns the bytes of memory that page tables of the data take.
    #[cfg(test)]
    pub fn tables(&self) -> u64 {
        self.store.tables.count() * self.page as u64
    }

    #[cfg(test)]
    pub fn memory(&self) -> [&[u8]; 3] {
        [self.store.data.bytes(), self.store.blocks.bytes(), self.store.pages.bytes()]
    }
}

fn zero_span(span: &Span, range: Range<usize>) -> Result<(), Fault> {
    for at in range.clone().step_by(ZEROS.len()) {
        span.write(at, &ZEROS[..ZEROS.len().min(range.end - at)])?;
    }
    Ok(())
}
