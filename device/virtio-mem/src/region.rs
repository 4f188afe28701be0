//! The region: its blocks, the size that the device asks for, and the decisions on requests.

use std::ops::Range;

use slipway_virtio_spec::mem::{Config, Request, request, response, state};

use crate::blocks::Blocks;
use crate::{Geometry, MemoryHost, PIECE, Refused, RequestError};

/// The decision on a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The request is answered: the type of the response, and the state of the range.
    Answer(u16, u16),
    /// The blocks are given back piece by piece, and then the request is answered.
    GiveBack(GiveBack),
}

/// A request whose blocks are given back. The guest has no access to any of them; those of which a
/// piece is left count as plugged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GiveBack {
    /// The bytes of the request, as offsets in the region.
    bytes: Range<u64>,
    /// The first byte that was not given back yet.
    next: u64,
    /// `true` for Unplug, whose blocks were all plugged: they all count as plugged again if the
    /// request fails. `false` for Unplug All.
    whole: bool,
}

/// Returns an answer without a state.
fn answer(kind: u16) -> Decision {
    Decision::Answer(kind, 0)
}

/// A region and the host of its memory.
pub(crate) struct Region {
    pub(crate) geometry: Geometry,
    pub(crate) blocks: Blocks,
    /// The bytes that the device asks the driver to have plugged.
    pub(crate) requested: u64,
    /// The bytes of the region, from its start, in which blocks can be plugged.
    pub(crate) usable: u64,
    host: Box<dyn MemoryHost>,
}

impl Region {
    /// Makes a region without plugged blocks. The geometry is sound.
    pub fn new(geometry: Geometry, host: Box<dyn MemoryHost>) -> Self {
        let blocks = Blocks::new((geometry.bytes / geometry.block) as usize);
        Self { geometry, blocks, requested: 0, usable: 0, host }
    }

    /// Returns the bytes of the plugged blocks.
    pub fn plugged(&self) -> u64 {
        self.blocks.plugged() as u64 * self.geometry.block
    }

    /// Sets the bytes that the driver is asked to have plugged. The usable part grows to the next
    /// whole `unit` if it is smaller than that, and never shrinks. Returns whether the number has
    /// changed.
    ///
    /// # Errors
    /// [`RequestError`]; the number is then as before.
    pub fn request(&mut self, bytes: u64) -> Result<bool, RequestError> {
        let Geometry { bytes: most, block, unit, .. } = self.geometry;
        if bytes > most {
            return Err(RequestError::TooLarge(most));
        }
        if !bytes.is_multiple_of(block) {
            return Err(RequestError::PartOfABlock(block));
        }
        let usable = bytes.div_ceil(unit).saturating_mul(unit).min(most);
        self.reveal(usable).map_err(|Refused| RequestError::Unreachable)?;
        Ok(std::mem::replace(&mut self.requested, bytes) != bytes)
    }

    /// Makes the region usable up to byte `end`, if it is not yet.
    fn reveal(&mut self, end: u64) -> Result<(), Refused> {
        if end > self.usable {
            self.host.reveal(end)?;
            self.usable = end;
        }
        Ok(())
    }

    pub fn config(&self) -> Config {
        let Geometry { address, bytes, block, node, .. } = self.geometry;
        Config {
            block_size: block.into(),
            node_id: node.into(),
            padding: [0; 6],
            addr: address.into(),
            region_size: bytes.into(),
            usable_region_size: self.usable.into(),
            plugged_size: self.plugged().into(),
            requested_size: self.requested.into(),
        }
    }

    /// Returns the blocks that a request names. Returns `None` if the usable part of the region
    /// does not have them all, or there are none (section 5.15.6.1).
    fn range(&self, request: &Request) -> Option<Range<usize>> {
        let offset = request.addr.get().checked_sub(self.geometry.address)?;
        let first = usize::try_from(offset / self.geometry.block).ok()?;
        let end = first.checked_add(usize::from(request.blocks.get()))?;
        let sound = offset.is_multiple_of(self.geometry.block) && first < end;
        (sound && end as u64 <= self.usable / self.geometry.block).then_some(first..end)
    }

    /// Returns the bytes of blocks, as offsets in the region.
    fn bytes_of(&self, blocks: &Range<usize>) -> Range<u64> {
        blocks.start as u64 * self.geometry.block..blocks.end as u64 * self.geometry.block
    }

    /// Decides on a request (section 5.15.6).
    pub fn decide(&mut self, request: &Request) -> Decision {
        let kind = request.kind.get();
        if kind == request::UNPLUG_ALL {
            return self.unplug(0..self.blocks.count(), false);
        }
        let Some(range) = self.range(request) else { return answer(response::ERROR) };
        let plugged = self.blocks.plugged_in(&range);
        match kind {
            request::PLUG if plugged == 0 => answer(self.plug(&range)),
            request::UNPLUG if plugged == range.len() => self.unplug(range, true),
            request::STATE => {
                let found = match plugged {
                    0 => state::UNPLUGGED,
                    all if all == range.len() => state::PLUGGED,
                    _ => state::MIXED,
                };
                Decision::Answer(response::ACK, found)
            }
            _ => answer(response::ERROR),
        }
    }

    /// Has the host take the guest's access to blocks away, and begins to give them back. `whole`
    /// is that of [`GiveBack`].
    fn unplug(&mut self, blocks: Range<usize>, whole: bool) -> Decision {
        let bytes = self.bytes_of(&blocks);
        if self.host.unplug(bytes.clone()).is_err() {
            return answer(response::BUSY);
        }
        Decision::GiveBack(GiveBack { next: bytes.start, bytes, whole })
    }

    /// Plugs unplugged blocks. Returns the type of the response.
    fn plug(&mut self, range: &Range<usize>) -> u16 {
        let bytes = self.bytes_of(range);
        if self.plugged() + (bytes.end - bytes.start) > self.requested {
            return response::NACK;
        }
        if self.host.plug(bytes).is_err() {
            return response::BUSY;
        }
        self.blocks.set(range, true);
        response::ACK
    }

    /// Gives back the next piece of a request. Returns the type of the response if it is over.
    pub fn give_back(&mut self, work: &mut GiveBack) -> Option<u16> {
        let piece = work.next..work.next + PIECE;
        if self.host.discard(piece.clone()).is_err() {
            return Some(self.give_up(work));
        }
        work.next = piece.end;
        if work.next.is_multiple_of(self.geometry.block) {
            let block = (piece.start / self.geometry.block) as usize;
            self.blocks.set(&(block..block + 1), false);
        }
        (work.next >= work.bytes.end).then_some(response::ACK)
    }

    /// Ends a request that is not over. The guest has access again to the request's blocks that
    /// still count as plugged; after Unplug these are all of its blocks. Bytes that were given back
    /// are zeros. Returns the type of the response.
    pub fn give_up(&mut self, work: &GiveBack) -> u16 {
        let block = self.geometry.block;
        let range = (work.bytes.start / block) as usize..(work.bytes.end / block) as usize;
        if work.whole {
            self.blocks.set(&range, true);
        }
        for run in self.blocks.runs() {
            let run = run.start.max(range.start)..run.end.min(range.end);
            // If even that is refused, the blocks are unplugged, as the driver can find out.
            if run.start < run.end && self.host.plug(self.bytes_of(&run)).is_err() {
                self.blocks.set(&run, false);
            }
        }
        response::BUSY
    }

    /// Restores a saved state in a region without plugged blocks. Each of `runs` is the number of
    /// the first plugged block and that of the block behind the last one; runs ascend, with an
    /// unplugged block between any two. Returns `false` if the state is invalid, or the host
    /// refuses it.
    pub fn restore(&mut self, runs: &[[usize; 2]], requested: u64, usable: u64) -> bool {
        let Geometry { bytes, block, .. } = self.geometry;
        if usable > bytes || !usable.is_multiple_of(block) || self.reveal(usable).is_err() {
            return false;
        }
        let mut next = 0;
        for &[start, end] in runs {
            if start < next || end <= start || end as u64 > usable / block {
                return false;
            }
            if self.host.plug(self.bytes_of(&(start..end))).is_err() {
                return false;
            }
            self.blocks.set(&(start..end), true);
            // Two runs without a block between them would have been saved as one.
            next = end + 1;
        }
        self.request(requested).is_ok()
    }
}
