//! Doorbell cells: the registers by which a guest tells a function that there is work.
//!
//! A device reads its doorbells from cells and does not know how they change: by a trapped register
//! write that the device itself stores, by a client's store to a page that the client maps, or by
//! such a store that an event announces.
//!
//! No dependencies.
#![allow(unsafe_code)] // cells may lie in a page shared with the client

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Memory that holds doorbell cells: heap, or a page shared with a client.
///
/// # Safety
/// The slice that `cells` returns must stay valid, at one address, as long as the value lives,
/// whatever another process does to the memory behind it. So a shared file must be sealed against
/// shrinking.
pub unsafe trait CellPage: Send + Sync {
    /// Returns the cells: one 32-bit word per 4 bytes of the page.
    fn cells(&self) -> &[AtomicU32];
}

// SAFETY: boxed memory of this process stays where it is.
unsafe impl CellPage for Box<[AtomicU32]> {
    fn cells(&self) -> &[AtomicU32] {
        self
    }
}

/// The doorbell cells of one function, in the order of its doorbell registers.
#[derive(Clone)]
pub struct Doorbells {
    page: Arc<dyn CellPage>,
    shared: bool,
    /// One past the last cell that the device looks at; 0 if the device has not said.
    watched: Arc<AtomicUsize>,
}

impl Doorbells {
    /// Makes `count` cells on the heap, for hosts that trap every write.
    pub fn trapped(count: usize) -> Self {
        let cells: Box<[AtomicU32]> = (0..count).map(|_| AtomicU32::new(0)).collect();
        Self { page: Arc::new(cells), shared: false, watched: Arc::default() }
    }

    /// Makes cells of memory that outlives the process, for hosts that trap every write.
    pub fn lasting(page: Arc<dyn CellPage>) -> Self {
        Self { page, shared: false, watched: Arc::default() }
    }

    /// Makes cells of memory that a client stores to, and then has the function notified
    /// (`slipway_pci::Function::notified`) of every change.
    pub fn rung(page: Arc<dyn CellPage>) -> Self {
        Self { page, shared: false, watched: Arc::default() }
    }

    /// Makes cells of memory that a client may store to.
    pub fn shared(page: Arc<dyn CellPage>) -> Self {
        Self { page, shared: true, watched: Arc::default() }
    }

    /// Returns whether a client may store to the cells without telling anybody, so that changes
    /// have to be looked for.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// Notes that the device looks at cell `index` from now on, until [`Doorbells::clear`]. A
    /// device that notes some of its cells must note all of them.
    pub fn watch(&self, index: usize) {
        self.watched.fetch_max(index + 1, Ordering::Relaxed);
    }

    /// Returns how many cells, from the first on, a host must look at that waits for a change.
    pub fn watched(&self) -> usize {
        match self.watched.load(Ordering::Relaxed) {
            0 => self.len(),
            watched => watched.min(self.len()),
        }
    }

    /// Returns the number of cells.
    pub fn len(&self) -> usize {
        self.page.cells().len()
    }

    /// Returns whether there is no cell.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the value that was last stored in cell `index`; 0 past the end. The load pairs with
    /// the ringing side's release store: what that side wrote before is visible.
    pub fn load(&self, index: usize) -> u32 {
        self.page.cells().get(index).map_or(0, |cell| u32::from_le(cell.load(Ordering::Acquire)))
    }

    /// Stores a trapped write; past the end it is dropped.
    pub fn store(&self, index: usize, value: u32) {
        if let Some(cell) = self.page.cells().get(index) {
            cell.store(value.to_le(), Ordering::Release);
        }
    }

    /// Zeroes every cell, as a reset does.
    pub fn clear(&self) {
        self.watched.store(0, Ordering::Relaxed);
        for cell in self.page.cells() {
            cell.store(0, Ordering::Release);
        }
    }
}
