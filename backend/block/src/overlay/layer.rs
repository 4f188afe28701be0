//! What was written over the base: bytes, and which of them count.

use std::io;
use std::ops::Range;

use slipway_ram::{Fault, Span};

use super::bits::Bits;
use crate::memory::{Anonymous, page_size};
use crate::{DiskError, Geometry};

/// Memory of the disk's size, of which only written pages exist.
pub(super) struct Layer {
    memory: Anonymous,
    /// A bit per logical block: whether the layer's bytes count, or the base's.
    own: Bits,
    /// A bit per page: whether it exists. What does not exist reads as zeros.
    pages: Bits,
    used_pages: u64,
    most_pages: u64,
    block: u64,
}

impl Layer {
    /// A layer in which every block is the base's. `most` bytes at most are ever used for data.
    pub fn new(geometry: &Geometry, most: Option<u64>) -> io::Result<Self> {
        let size = usize::try_from(geometry.bytes()).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let page = page_size() as u64;
        Ok(Self {
            memory: Anonymous::new(size)?.small_pages(),
            own: Bits::new(geometry.blocks)?,
            pages: Bits::new(geometry.bytes().div_ceil(page))?,
            used_pages: 0,
            most_pages: most.map_or(u64::MAX, |bytes| bytes / page),
            block: u64::from(geometry.block_size),
        })
    }

    /// Bytes of memory that data takes at the moment.
    pub fn used(&self) -> u64 {
        self.used_pages * page_size() as u64
    }

    /// Whether block `lba` is the layer's, and the end of the run of blocks like it, up to `end`.
    pub fn run(&self, lba: u64, end: u64) -> (bool, u64) {
        (self.own.get(lba), self.own.run(lba, end))
    }

    /// Copies from byte `at` of the disk into the spans, which hold that much less of the layer.
    pub fn read(&self, mut at: u64, spans: &[Span]) -> Result<(), Fault> {
        for span in spans {
            span.write(0, &self.memory.bytes()[at as usize..at as usize + span.len()])?;
            at += span.len() as u64;
        }
        Ok(())
    }

    /// Takes the spans' bytes for the blocks `lba..end`. Without space nothing is changed; when
    /// guest memory vanishes the blocks hold a mix of old, new and zero bytes.
    pub fn write(&mut self, lba: u64, end: u64, spans: &[Span]) -> Result<(), DiskError> {
        let bytes = self.bytes(lba, end);
        let pages = self.pages_of(&bytes);
        let fresh = self.pages.zeros(pages.clone());
        if fresh > self.most_pages - self.used_pages {
            return Err(DiskError::NoSpace);
        }
        self.pages.set(pages, true);
        self.used_pages += fresh;
        self.own.set(lba..end, true);
        let mut at = bytes.start;
        for span in spans {
            span.read(0, &mut self.memory.bytes_mut()[at..at + span.len()])?;
            at += span.len();
        }
        Ok(())
    }

    /// Makes the blocks `lba..end` read as zeros, and gives their whole pages back.
    pub fn zero(&mut self, lba: u64, end: u64) {
        let bytes = self.bytes(lba, end);
        let page = page_size();
        let whole = bytes.start.div_ceil(page)..bytes.end / page;
        if whole.start >= whole.end {
            self.zero_part(bytes);
        } else {
            self.zero_part(bytes.start..whole.start * page);
            self.zero_part(whole.end * page..bytes.end);
            self.memory.zero(whole.start * page..whole.end * page);
            let whole = whole.start as u64..whole.end as u64;
            self.used_pages -= (whole.end - whole.start) - self.pages.zeros(whole.clone());
            self.pages.set(whole, false);
        }
        self.own.set(lba..end, true);
    }

    /// Zeroes parts of at most two pages. A page that does not exist is zeros already.
    fn zero_part(&mut self, bytes: Range<usize>) {
        let page = page_size();
        for index in self.pages_of(&bytes).filter(|_| !bytes.is_empty()) {
            let start = index as usize * page;
            let part = start.max(bytes.start)..(start + page).min(bytes.end);
            if self.pages.get(index) {
                self.memory.bytes_mut()[part].fill(0);
            }
        }
    }

    fn bytes(&self, lba: u64, end: u64) -> Range<usize> {
        // The memory has the disk's size, so what lies on the disk fits `usize`.
        (lba * self.block) as usize..(end * self.block) as usize
    }

    fn pages_of(&self, bytes: &Range<usize>) -> Range<u64> {
        let page = page_size();
        (bytes.start / page) as u64..bytes.end.div_ceil(page) as u64
    }

    #[cfg(test)]
    pub fn memory(&self) -> [&[u8]; 3] {
        [self.memory.bytes(), self.own.bytes(), self.pages.bytes()]
    }
}
