//! The gate before memory whose bytes may not be zero yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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

    /// Returns whether all granules were taken. They stay so as long as the gate exists.
    fn is_given(&self) -> bool;
}

/// The gate before a mapping.
pub(crate) struct Late {
    gate: Arc<dyn Gate>,
    /// The offset in the file of the mapping's first byte.
    offset: usize,
    /// Set once all of the memory was given. It stays so: memory is recycled only when no mapping
    /// is behind a gate any more. The flag lies here, beside the mapping's address, so that an
    /// access to such memory touches no cache line more than one to other memory.
    open: AtomicBool,
}

impl Late {
    /// Makes the gate before a mapping that begins at byte `offset` of the file.
    pub(crate) fn new(gate: Arc<dyn Gate>, offset: usize) -> Self {
        Self { gate, offset, open: AtomicBool::new(false) }
    }

    /// Returns whether no access needs to take anything.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        // Pairs with the release in `pass`: all zeros that were written are seen.
        self.open.load(Ordering::Acquire)
    }

    /// Takes the granules of a range of the mapping. Never waits.
    #[inline]
    pub(crate) fn take(&self, offset: usize, len: usize) -> Result<(), NotYet> {
        if self.is_open() { Ok(()) } else { self.pass(offset, len) }
    }

    #[inline(never)]
    fn pass(&self, offset: usize, len: usize) -> Result<(), NotYet> {
        self.gate.take(self.offset + offset, len)?;
        if self.gate.is_given() {
            self.open.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Does what [`Late::take`] does, and lets other threads finish what they are zeroing.
    #[inline]
    pub(crate) fn take_patiently(&self, offset: usize, len: usize) -> Result<(), NotYet> {
        if self.is_open() { Ok(()) } else { self.pass_patiently(offset, len) }
    }

    #[inline(never)]
    fn pass_patiently(&self, offset: usize, len: usize) -> Result<(), NotYet> {
        let mut tries = 0u32;
        loop {
            match self.pass(offset, len) {
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
