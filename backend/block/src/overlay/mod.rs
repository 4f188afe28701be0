//! Copy-on-write over a read-only base.
//!
//! The layer has the disk's size in address space and one bit per logical block, so a write never
//! needs to read the base, and making a layer costs a few system calls whatever the size. A read
//! that concerns both base and layer is cut into requests to the base and copies from the layer
//! (`read`).
//! Written data lies in this process's memory, or in a file from which a successor goes on
//! (`store`), and of which any thread can copy it (`copy`).

mod bits;
mod copy;
mod layer;
mod points;
mod read;
mod store;

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};

use slipway_ram::Span;

use crate::budget::Budget;
use crate::check::{check_request, complete};
use crate::{
    BaseIdentity, Completion, Disk, DiskError, Geometry, OpenError, Operation, Request, Spent,
};
use layer::Layer;
use read::{Read, Room};
use store::Store;

pub use copy::OverlayContent;
pub use store::overlay_file;

#[cfg(test)]
pub(crate) use points::testing;

/// A volatile, writable disk over a base that is never written to. What was written is lost with
/// the disk or, if a file holds it ([`OverlayDisk::of`]), with the file. A flush ends at once.
///
/// Memory grows by whole pages with what is written or discarded: the data, a page table for each 2
/// MiB, and a bit per block (0.02 % of the range with 512-byte blocks). Discard and Write Zeroes
/// give whole pages of data back. A discarded block reads as zeros, not as the base's.
pub struct OverlayDisk<D> {
    base: D,
    layer: Layer,
    geometry: Geometry,
    /// Reads that wait for the base, or for room. The index of a read is the tag of its requests to
    /// the base.
    reads: Vec<Option<Read>>,
    free: Vec<usize>,
    /// The index of the read that stopped in its middle for want of room (`has_room`). It goes on
    /// before the next one begins.
    paused: Option<usize>,
    /// Reads that have not begun.
    waiting: VecDeque<Request>,
    /// The work that the caller allows in this turn.
    room: Room,
    /// The number of requests that the base has, those of `batch` included.
    at_base: usize,
    /// Requests that go to the base next.
    batch: Vec<Request>,
    ended: Vec<Completion>,
    spare: Vec<Vec<Span>>,
}

impl<D: Disk> OverlayDisk<D> {
    /// Creates an overlay over `base`, which must not change any more. `most` bounds the memory for
    /// data, in bytes (whole pages count): a write beyond it fails with [`DiskError::NoSpace`].
    ///
    /// # Errors
    /// [`OpenError::Memory`] if there is no address space for a layer of this size.
    pub fn new(base: D, most: Option<u64>) -> Result<Self, OpenError> {
        let store = Store::new(&base.geometry())?;
        Ok(Self::over(base, store, most))
    }

    /// Opens an overlay whose content lies in `file`, which [`overlay_file`] made in this process
    /// or in a predecessor of it. The overlay has the content that the predecessor left, wherever
    /// it was killed. `identity` is the base's. Nobody else may use the file, except for a copy
    /// ([`OverlayContent`]).
    ///
    /// # Errors
    /// [`OpenError::Kept`] if the file was not made by [`overlay_file`], is of another version, or
    /// belongs to another base; [`OpenError::Memory`].
    pub fn of(
        base: D,
        most: Option<u64>,
        file: &OwnedFd,
        identity: &BaseIdentity,
    ) -> Result<Self, OpenError> {
        let store = Store::of(&base.geometry(), identity, file)?;
        Ok(Self::over(base, store, most))
    }

    fn over(base: D, store: Store, most: Option<u64>) -> Self {
        let geometry = Geometry { read_only: false, ..base.geometry() };
        let layer = Layer::new(&geometry, store, most);
        Self {
            base,
            layer,
            geometry,
            reads: Vec::new(),
            free: Vec::new(),
            paused: None,
            waiting: VecDeque::new(),
            room: Room::UNBOUNDED,
            at_base: 0,
            batch: Vec::new(),
            ended: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Counts the overlay's memory in `budget`: data, page tables, maps, what a predecessor left. A
    /// write that needs new pages which the budget does not allow fails with
    /// [`DiskError::NoSpace`]. All is given back when the overlay is dropped; the kernel frees the
    /// memory of a large one a moment later, and that of a file with its last descriptor.
    #[must_use]
    pub fn counted_in(mut self, budget: &Budget) -> Self {
        self.layer.count_in(budget);
        self
    }

    /// Returns the bytes of memory that written data takes at present.
    pub fn used(&self) -> u64 {
        self.layer.used()
    }

    /// Returns the bytes of memory that the overlay holds at present: data, the kernel's page
    /// tables of it, and maps.
    pub fn held(&self) -> u64 {
        self.layer.held()
    }

    fn start(&mut self, request: Request, completions: &mut Vec<Completion>) {
        let result = match check_request(&self.geometry, &request) {
            Ok(_) if request.operation == Operation::Read => {
                return self.start_read(request, completions);
            }
            Ok(_) => self.change(&request),
            Err(error) => Err(error),
        };
        completions.push(complete(request, result));
    }

    /// Carries out a request that does not read.
    fn change(&mut self, request: &Request) -> Result<(), DiskError> {
        let (lba, end) = (request.lba, request.lba.wrapping_add(u64::from(request.blocks)));
        match request.operation {
            Operation::Write => self.layer.write(lba, end, &request.spans)?,
            Operation::WriteZeroes | Operation::Discard => self.layer.zero(lba, end),
            Operation::Read | Operation::Flush => {}
        }
        Ok(())
    }
}

impl<D: Disk> Disk for OverlayDisk<D> {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        for request in requests.drain(..) {
            self.start(request, completions);
        }
        self.work(completions);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.base.poll(&mut self.ended);
        self.collect(completions);
        if self.has_waiting() {
            self.work(completions);
        }
    }

    fn release(&mut self) {
        self.base.release();
    }

    fn copies(&self, operation: Operation) -> bool {
        // Reads usually wait for the base; what they copy is bounded by `allow`.
        operation != Operation::Read
    }

    fn bounds_reads(&self) -> bool {
        true
    }

    fn allow(&mut self, bytes: u64) {
        self.room.allow(bytes);
    }

    fn spent(&mut self) -> Spent {
        self.take_spent()
    }

    fn wake_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.base.wake_descriptor()
    }
}

#[cfg(test)]
impl<D> OverlayDisk<D> {
    pub(crate) fn tables(&self) -> u64 {
        self.layer.tables()
    }

    pub(crate) fn memory(&self) -> [&[u8]; 3] {
        self.layer.memory()
    }
}
