//! The place of a queue's doorbell: a trapped register, a shared page, or the shadow page that the
//! host named with Doorbell Buffer Config (section 5.7). The queue need not know which.
//!
//! # Shadow doorbells (section 7.13)
//! The host stores a new value to the shadow page, then reads the queue's event index and writes
//! the doorbell register only if the value passed it. So the event index says which change the
//! controller wants to be notified of. The controller has two modes:
//! - *awake* it looks at the shadow page in every poll. Event indexes stay
//!   [behind](Cell::keep_behind) the value seen last, where the host does not pass them for at
//!   least half a queue: no register write, hence no exit of a guest;
//! - before it *rests* it [publishes](Cell::publish) the value seen last as the event index of
//!   every queue that it waits for, and looks once more.
//!
//! The head of a queue whose interrupt is on the pin is published in both modes: `home::pin`
//! says why.
//!
//! # No doorbell is lost
//! Host: store shadow S, full barrier, load event index. Controller: store event index E, full
//! barrier (`fence(SeqCst)` in `IoEngine::rest`), load shadow. Of two such stores
//! with a full barrier before the loads, at least one is seen by the other side's load. Either the
//! controller's last look finds S, and the controller does not rest; or the host finds E. The
//! controller had seen the value E when it published it, so the host's change that the look missed
//! began at E or before and ended past it: the host writes the register, and the write wakes the
//! controller. A change after that one finds the controller awake. `tests/sleep.rs` has loom go
//! through the interleavings.
//!
//! # Hosts that leave the admin queue out
//! The specification has every queue shadowed; Linux shadows I/O queues only and goes on writing
//! the admin queue's registers. The admin queue counts as shadowed as soon as its entry of the
//! shadow page changes, an I/O queue at once. From then on the register only wakes, since a write
//! of it may arrive after newer values of the shadow page. Until then the register's value counts.
//! No write is misread: a host that shadows a queue stores to the shadow page before the register,
//! so the code that handles the register write sees the change.

use super::outside::{Doorbells, Fault, Memory};

/// The doorbell of one queue.
#[derive(Clone)]
pub(crate) struct Cell {
    doorbells: Doorbells,
    index: usize,
    /// The register's value at the last look: an invalid value is reported once.
    seen: u32,
    shadow: Option<Shadow>,
}

/// A doorbell that the queue cannot go on with.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum BadDoorbell {
    /// The value is invalid.
    Value,
    /// The shadow page cannot be reached, which is as bad as unreachable queue memory.
    Memory,
}

impl From<Fault> for BadDoorbell {
    fn from(_: Fault) -> Self {
        Self::Memory
    }
}

/// The two pages of Doorbell Buffer Config: addresses in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShadowPages {
    /// The host writes doorbells here.
    pub doorbells: u64,
    /// The controller writes event indexes here.
    pub events: u64,
    /// With a journal, a number that no other pages of this controller had.
    pub number: u32,
}

/// One queue's entries in the two pages.
#[derive(Clone, Debug)]
struct Shadow {
    doorbell: u64,
    event: u64,
    /// The entry's value at the last look.
    seen: u32,
    /// `true` if the host has changed the entry since the queue was made or the pages were named.
    moved: bool,
    /// `true` if the shadow entry counts, so that the register only wakes.
    used: bool,
    /// The event index that was written last, if known.
    written: Option<u32>,
}

impl Cell {
    /// Makes the cell of a new queue, which starts at zero.
    pub fn new(doorbells: &Doorbells, index: usize) -> Self {
        doorbells.store(index, 0);
        Self::resumed(doorbells, index, 0)
    }

    /// Makes a cell whose register a predecessor saw last as `seen`.
    pub fn resumed(doorbells: &Doorbells, index: usize, seen: u32) -> Self {
        doorbells.watch(index);
        Self { doorbells: doorbells.clone(), index, seen, shadow: None }
    }

    /// Makes `value` the value seen last: another value in the cell counts as new.
    pub fn resume(&mut self, value: u32) {
        self.seen = value;
        if let Some(shadow) = self.shadow.as_mut().filter(|shadow| shadow.moved) {
            shadow.seen = value;
        }
    }

    /// Returns the value that the host stored last, or a value beyond any queue if the shadow page
    /// cannot be reached. The register counts until the host has changed the shadow entry.
    pub fn current(&self, memory: &Memory) -> u32 {
        match &self.shadow {
            Some(shadow) if shadow.moved => memory.load_u32(shadow.doorbell).unwrap_or(u32::MAX),
            _ => self.doorbells.load(self.index),
        }
    }

    /// Returns whether the register differs from its value at the last look.
    #[inline]
    pub fn is_rung(&self) -> bool {
        self.doorbells.load(self.index) != self.seen
    }

    /// Returns the register's value at the last look.
    pub fn seen(&self) -> u32 {
        self.seen
    }

    /// Returns the shadow entry's value at the last look, and whether the host has changed the
    /// entry. Returns `None` without a shadow.
    pub fn shadow_seen(&self) -> Option<(u32, bool)> {
        self.shadow.as_ref().map(|shadow| (shadow.seen, shadow.moved))
    }

    /// Returns whether the queue has a shadow entry that the host has not changed: its value may be
    /// older than the queue.
    pub fn is_still(&self) -> bool {
        self.shadow.as_ref().is_some_and(|shadow| !shadow.moved)
    }

    /// Looks at `pages` from now on. Their present values count as seen: the host stores new ones
    /// only after the command, or the creation of the queue, has completed.
    pub fn follow(&mut self, memory: &Memory, pages: ShadowPages) -> Result<(), Fault> {
        let seen = memory.load_u32(self.place(pages.doorbells))?;
        self.resume_shadow(pages, seen, false);
        Ok(())
    }

    /// Looks at `pages` from now on, in the state in which a predecessor left them.
    pub fn resume_shadow(&mut self, pages: ShadowPages, seen: u32, moved: bool) {
        let (doorbell, event) = (self.place(pages.doorbells), self.place(pages.events));
        // The head says why only the admin queue may be unshadowed.
        let used = moved || self.index >= 2;
        self.shadow = Some(Shadow { doorbell, event, seen, moved, used, written: None });
    }

    /// Returns the address of this doorbell's entry in the page at `base` (section 5.7: laid out as
    /// the registers are).
    fn place(&self, base: u64) -> u64 {
        base.wrapping_add(4 * self.index as u64)
    }

    /// Returns the doorbell's value if it differs from the value at the last look.
    pub fn changed(&mut self, memory: &Memory) -> Result<Option<u32>, Fault> {
        if let Some(shadow) = &mut self.shadow {
            let value = memory.load_u32(shadow.doorbell)?;
            if value != shadow.seen {
                (shadow.seen, shadow.moved, shadow.used) = (value, true, true);
                return Ok(Some(value));
            }
            if shadow.used {
                return Ok(None);
            }
        }
        let value = self.doorbells.load(self.index);
        let changed = value != self.seen;
        self.seen = value;
        Ok(changed.then_some(value))
    }

    /// Asks for a register write at the next change from `value`, the queue's index.
    pub fn publish(&mut self, memory: &Memory, value: u32) -> Result<(), Fault> {
        match &mut self.shadow {
            Some(shadow) => shadow.write(memory, value),
            None => Ok(()),
        }
    }

    /// Avoids register writes for a while: keeps the event index out of the half of the queue, of
    /// `size` entries, that follows the index `value`.
    pub fn keep_behind(&mut self, memory: &Memory, value: u32, size: u32) -> Result<(), Fault> {
        let Some(shadow) = &mut self.shadow else { return Ok(()) };
        let far = |written: u32| distance(value, written, size) > size / 2;
        if shadow.written.is_some_and(far) {
            return Ok(());
        }
        shadow.write(memory, if value == 0 { size - 1 } else { value - 1 })
    }
}

impl Shadow {
    fn write(&mut self, memory: &Memory, value: u32) -> Result<(), Fault> {
        if self.written != Some(value) {
            memory.store_u32(self.event, value)?;
            self.written = Some(value);
        }
        Ok(())
    }
}

/// Returns the number of steps from index `from` to index `to` in a ring of `size`.
pub(crate) fn distance(from: u32, to: u32, size: u32) -> u32 {
    if to >= from { to - from } else { size - from + to }
}
