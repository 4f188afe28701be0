//! The gate before memory whose bytes may not be zero yet.

use std::sync::Arc;

/// The size in bytes of the parts that are zeroed as a whole. A power of two, and a divisor of the
/// size of a huge page.
pub const GRANULE: usize = 64 << 10;

/// A reason for which bytes of late memory cannot be used now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotYet {
    /// Another thread is writing the zeros of a granule; try again.
    Busy,
    /// A page cannot be had: no huge page is free.
    Gone,
}

/// The state of the granules of a file.
pub(crate) trait Gate: Send + Sync {
    /// Takes all granules of `offset..offset + len` of the file for their user: writes zeros into
    /// those that have other bytes. Never waits.
    fn take(&self, offset: usize, len: usize) -> Result<(), NotYet>;

    /// Returns whether granule `number` was taken: it has what its user wrote, or zeros.
    fn is_taken(&self, number: usize) -> bool;
}

/// The gate before a mapping.
pub(crate) struct Late {
    pub(crate) gate: Arc<dyn Gate>,
    /// The offset in the file of the mapping's first byte.
    pub(crate) offset: usize,
}

impl Late {
    /// Takes the granules of a range of the mapping. Never waits.
    pub(crate) fn take(&self, offset: usize, len: usize) -> Result<(), NotYet> {
        self.gate.take(self.offset + offset, len)
    }

    /// Does what [`Late::take`] does, and lets other threads finish what they are zeroing.
    pub(crate) fn take_patiently(&self, offset: usize, len: usize) -> Result<(), NotYet> {
        let mut tries = 0u32;
        loop {
            match self.take(offset, len) {
                Err(NotYet::Busy) if tries < 1000 => std::hint::spin_loop(),
                Err(NotYet::Busy) => std::thread::yield_now(),
                other => return other,
            }
            tries = tries.saturating_add(1);
        }
    }

    /// Splits a range of the mapping at the granules. Calls `visit` with each part, its offset from
    /// the start of the range, and whether it was taken, until `visit` returns `false`. Returns
    /// whether it never did.
    pub(crate) fn parts(
        &self,
        offset: usize,
        len: usize,
        mut visit: impl FnMut(std::ops::Range<usize>, bool) -> bool,
    ) -> bool {
        let (start, mut done) = (self.offset + offset, 0);
        while done < len {
            let granule = (start + done) / GRANULE;
            let part = ((granule + 1) * GRANULE - (start + done)).min(len - done);
            if !visit(done..done + part, self.gate.is_taken(granule)) {
                return false;
            }
            done += part;
        }
        true
    }
}
