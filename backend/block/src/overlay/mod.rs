//! Copy-on-write over a read-only base.
//!
//! The layer has the disk's size in address space and one bit per logical block, so a write never
//! needs to read the base, and making a layer costs a few system calls whatever the size. A read
//! that concerns both base and layer is cut into requests to the base and copies from the layer.
//! Written data lies in this process's memory, or in a file from which a successor goes on
//! (`store`).

mod bits;
mod layer;
mod points;
mod store;

use std::os::fd::{BorrowedFd, OwnedFd};

use slipway_ram::Span;

use crate::budget::Budget;
use crate::check::{admit, complete};
use crate::{Completion, Disk, DiskError, Geometry, OpenError, Operation, Request};
use layer::Layer;
use store::Store;

pub use store::{BaseIdentity, overlay_file};

#[cfg(test)]
pub(crate) use points::testing;

/// A volatile, writable disk over a base that it never writes to. Its data is lost with it, or with
/// the file that holds the data. A flush ends at once.
///
/// Memory grows by whole pages with what is written or discarded: the data, and a bit per block
/// (0.02 % of the range with 512-byte blocks). Discard and Write Zeroes give whole pages of data
/// back. A discarded block reads as zeros, not as the base's.
pub struct OverlayDisk<D> {
    base: D,
    layer: Layer,
    geometry: Geometry,
    /// Reads that wait for the base. The index of a read is the tag of its requests to the base.
    reads: Vec<Option<Read>>,
    free: Vec<usize>,
    /// A vector that is reused for requests to the base.
    batch: Vec<Request>,
    ended: Vec<Completion>,
    spare: Vec<Vec<Span>>,
}

/// A read of which the base fills a part.
struct Read {
    request: Request,
    /// The number of requests in flight at the base.
    left: usize,
    result: Result<(), DiskError>,
}

/// The largest number of span vectors kept for later requests to the base.
const SPARE: usize = 64;

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
    /// it was killed. `identity` is the base's. Nobody else may use the file.
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
            batch: Vec::new(),
            ended: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Counts the overlay's memory in `budget`: the data, the maps, and what a predecessor left. A
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

    /// Returns the bytes of memory that the overlay holds at present: data and maps.
    pub fn held(&self) -> u64 {
        self.layer.held()
    }

    fn start(&mut self, request: Request, completions: &mut Vec<Completion>) {
        let result = match admit(&self.geometry, &request) {
            Ok(_) => self.carry_out(&request),
            Err(error) => Err(error),
        };
        match result {
            Ok(Outcome::Done) => completions.push(complete(request, Ok(()))),
            Ok(Outcome::NeedsBase) => self.ask_base(request),
            Err(error) => completions.push(complete(request, Err(error))),
        }
    }

    /// Does the part of a request that does not need the base.
    fn carry_out(&mut self, request: &Request) -> Result<Outcome, DiskError> {
        let (lba, end) = (request.lba, request.lba.wrapping_add(u64::from(request.blocks)));
        match request.operation {
            Operation::Read => return self.read_own(request, lba, end),
            Operation::Write => self.layer.write(lba, end, &request.spans)?,
            Operation::WriteZeroes | Operation::Discard => self.layer.zero(lba, end),
            Operation::Flush => {}
        }
        Ok(Outcome::Done)
    }

    /// Fills the blocks that are in the layer.
    fn read_own(&mut self, request: &Request, lba: u64, end: u64) -> Result<Outcome, DiskError> {
        let mut outcome = Outcome::Done;
        let mut at = lba;
        let mut part = self.spare.pop().unwrap_or_default();
        let mut copied = Ok(());
        while at < end && copied.is_ok() {
            let (own, next) = self.layer.run(at, end);
            if own {
                self.cut(request, lba, at..next, &mut part);
                copied = self.layer.read(at * u64::from(self.geometry.block_size), &part);
                part.clear();
            } else {
                outcome = Outcome::NeedsBase;
            }
            at = next;
        }
        part.clear();
        self.spare.push(part);
        Ok(copied.map(|()| outcome)?)
    }

    /// Sends one request to the base for every run of blocks that is not in the layer.
    fn ask_base(&mut self, request: Request) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.reads.push(None);
            self.reads.len() - 1
        });
        let (first, end) = (request.lba, request.lba + u64::from(request.blocks));
        let (mut at, mut left) = (first, 0);
        while at < end {
            let (own, next) = self.layer.run(at, end);
            if !own {
                let mut spans = self.spare.pop().unwrap_or_default();
                self.cut(&request, first, at..next, &mut spans);
                left += 1;
                self.batch.push(Request {
                    tag: index as u64,
                    operation: Operation::Read,
                    lba: at,
                    blocks: (next - at) as u32,
                    spans,
                    durable: false,
                });
            }
            at = next;
        }
        self.reads[index] = Some(Read { request, left, result: Ok(()) });
    }

    /// Appends to `into` the parts of the request's spans that belong to `blocks`. The request
    /// begins at block `first`.
    fn cut(
        &self,
        request: &Request,
        first: u64,
        blocks: std::ops::Range<u64>,
        into: &mut Vec<Span>,
    ) {
        let block = u64::from(self.geometry.block_size);
        // Offsets in the request's data lie in memory, so they fit `usize`.
        let mut skip = ((blocks.start - first) * block) as usize;
        let mut left = ((blocks.end - blocks.start) * block) as usize;
        for span in &request.spans {
            if skip >= span.len() {
                skip -= span.len();
                continue;
            }
            let part = (span.len() - skip).min(left);
            into.push(span.slice(skip, part));
            (skip, left) = (0, left - part);
            if left == 0 {
                return;
            }
        }
    }

    /// Processes the base's completions, and ends the reads that wait for no more of them.
    fn collect(&mut self, completions: &mut Vec<Completion>) {
        for mut part in self.ended.drain(..) {
            part.spans.clear();
            if self.spare.len() < SPARE {
                self.spare.push(part.spans);
            }
            let index = part.tag as usize;
            let Some(slot) = self.reads.get_mut(index) else { continue };
            let Some(read) = slot else { continue };
            read.left -= 1;
            read.result = read.result.and(part.result);
            if read.left == 0 {
                self.free.push(index);
                completions.extend(slot.take().map(|read| complete(read.request, read.result)));
            }
        }
    }
}

enum Outcome {
    Done,
    NeedsBase,
}

impl<D: Disk> Disk for OverlayDisk<D> {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        for request in requests.drain(..) {
            self.start(request, completions);
        }
        if !self.batch.is_empty() {
            self.base.submit(&mut self.batch, &mut self.ended);
            self.collect(completions);
        }
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.base.poll(&mut self.ended);
        self.collect(completions);
    }

    fn release(&mut self) {
        self.base.release();
    }

    fn copies(&self, operation: Operation) -> bool {
        // Reads usually wait for the base.
        operation != Operation::Read
    }

    fn wake_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.base.wake_descriptor()
    }
}

#[cfg(test)]
impl<D> OverlayDisk<D> {
    pub(crate) fn memory(&self) -> [&[u8]; 3] {
        self.layer.memory()
    }
}
