//! Memory becomes ready for another user.
//!
//! The faults of recycled memory are those of pages that the file has: where it has none, the
//! kernel makes a page, and this process does not learn that its user wrote to it. So no granule is
//! dirty that lacks a page, else it would be zeroed after its user wrote there.

use std::io;
use std::ops::Range;

use rustix::fs::FallocateFlags;

use super::{LateMemory, states};
use crate::gate::GRANULE;
use crate::template::next_data;

impl LateMemory {
    /// Makes the memory ready for another user, after the last one and everything that it began are
    /// gone: what the last user was given is dirty, or absent if it has no page. The exclusive
    /// borrow tells that no region and no thread of this process uses the memory; that no other
    /// process does is the caller's part.
    ///
    /// # Errors
    /// The errors of lseek(2), fallocate(2) and madvise(2): the host has no memory left. The memory
    /// must not be used again then.
    ///
    /// # Panics
    /// If the memory began as a template: a programmer's error. Such memory is not recycled.
    pub fn recycle(&mut self) -> io::Result<()> {
        assert!(self.template.is_none(), "memory of a fork is not recycled");
        *self.given.get_mut() = false;
        *self.reached.get_mut() = false;
        self.states().iter().for_each(states::recycle);
        if self.alias.is_huge() {
            return self.complete_huge();
        }
        let (mut at, len) = (0, self.len());
        while let Some(data) = next_data(self.file(), at, len)? {
            let first = data.start / GRANULE * GRANULE;
            self.forget(at..first);
            at = data.end.next_multiple_of(GRANULE);
            self.complete(data, first..at)?;
        }
        self.forget(at..len);
        Ok(())
    }

    /// Makes those pages of the granules `whole` that lie before and behind `data`.
    fn complete(&self, data: Range<usize>, whole: Range<usize>) -> io::Result<()> {
        for hole in [whole.start..data.start, data.end..whole.end] {
            if !hole.is_empty() {
                let (at, len) = (hole.start as u64, hole.len() as u64);
                rustix::fs::fallocate(&self.file, FallocateFlags::empty(), at, len)?;
            }
        }
        Ok(())
    }

    /// Makes all pages that a file of huge pages lacks. It does not tell which these are: lseek(2)
    /// takes all of such a file for data.
    fn complete_huge(&self) -> io::Result<()> {
        // Blocks of 512 bytes (stat(2)).
        let held = rustix::fs::fstat(&self.file)?.st_blocks.unsigned_abs() * 512;
        if held < self.len() as u64 {
            self.alias.populate(0, self.len())?;
        }
        Ok(())
    }

    /// Notes that the file has no bytes there, which are whole granules. Untouched ones may have
    /// pages all the same, which were made and are no data until somebody touches them.
    fn forget(&self, bytes: Range<usize>) {
        let unit = self.granule();
        self.states()[bytes.start / unit..bytes.end / unit].iter().for_each(states::forget);
    }
}
