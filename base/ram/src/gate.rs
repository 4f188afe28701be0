//! The gate before recycled memory, and before memory of a fork. A granule of recycled memory may
//! still hold an earlier user's bytes; a granule of a fork may lack the template's. Each access
//! passes this gate, which first writes the bytes that the present user is to find: zeros, or the
//! template's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

/// The size in bytes of a granule of recycled memory, which is zeroed as a whole. A power of two,
/// and a divisor of the size of a huge page.
pub const GRANULE: usize = 64 << 10;

/// The number of attempts to take a busy granule before the thread yields its CPU between two
/// attempts. They last about as long as another thread needs to write a granule's zeros.
const SPINS: u32 = 1000;
/// The number of attempts before the thread sleeps between two attempts.
const YIELDS: u32 = SPINS + 1000;
/// The time of a sleep between two attempts to take a busy granule.
const NAP: Duration = Duration::from_micros(100);

/// The reason why bytes of late memory cannot be used now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotYet {
    /// Another thread is writing the first bytes of a granule; try again.
    Busy,
    /// A page cannot be had: no huge page is free, or the host has no memory left.
    Gone,
}

/// The place from which a reader gets a granule's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GranuleSource {
    /// The memory's file: the granule was taken.
    Own,
    /// No file: the granule was not taken, and reads as zeros.
    Zeros,
    /// The template: the granule was not taken, and reads as the template.
    Template,
}

/// The table of a gate. Its address does not change while the gate exists.
pub(crate) struct Table<'a> {
    /// The state of each granule.
    pub states: &'a [AtomicU8],
    /// The final state of a granule: it was taken, and holds its user's bytes.
    pub clean: u8,
    /// The size of a granule in bytes, a power of two.
    pub granule: usize,
    /// Set once all granules were taken, and never cleared.
    pub given: &'a AtomicBool,
}

/// The owner of the states of a file's granules.
pub(crate) trait Gate: Send + Sync {
    /// Returns the table. Each access reads its granules' states there, without a call of the gate.
    fn table(&self) -> Table<'_>;

    /// Takes all granules of `offset..offset + len` of the file: writes zeros or the template's
    /// bytes into each granule that was not taken before. Never waits for another thread's granule
    /// ([`NotYet::Busy`]). Copying a template's page may sleep.
    fn take(&self, offset: usize, len: usize) -> Result<(), NotYet>;

    /// Returns the number of bytes that [`Gate::take`] of the same range has still to write.
    fn unwritten(&self, offset: usize, len: usize) -> usize;

    /// Notes that hardware gets access to a part of the memory.
    fn note_hardware(&self);

    /// Returns the place of the bytes of granule `number` at this moment.
    fn find(&self, number: usize) -> GranuleSource;

    /// Copies bytes of the template from `offset` of the file on. Returns `false` if there are
    /// none.
    fn read_template(&self, offset: usize, into: &mut [u8]) -> bool;
}

/// A mapping's view of the gate of its file.
pub(crate) struct Late {
    gate: Arc<dyn Gate>,
    /// The gate's [`Table`], with the granule's size as a power of two. It is copied here so that
    /// an access to granules that were taken reads their states without a virtual call of `gate`.
    states: *const [AtomicU8],
    given: *const AtomicBool,
    clean: u8,
    shift: u32,
    /// The offset in the file of the mapping's first byte.
    offset: usize,
    /// Set once all granules were taken, and never cleared: memory is recycled only when no mapping
    /// is behind a gate any more. The flag lies here, beside the mapping's address, so that an
    /// access to such memory touches as few cache lines as one to other memory.
    open: AtomicBool,
}

// SAFETY: the pointers are to atomics of `gate`, which is Send and Sync and lives as long.
unsafe impl Send for Late {}
// SAFETY: as above.
unsafe impl Sync for Late {}

impl Late {
    /// Makes the gate before a mapping that begins at byte `offset` of the file.
    pub(crate) fn new(gate: Arc<dyn Gate>, offset: usize) -> Self {
        let Table { states, clean, granule, given } = gate.table();
        let (states, given): (*const _, *const _) = (states, given);
        let (shift, open) = (granule.ilog2(), AtomicBool::new(false));
        Self { gate, states, given, clean, shift, offset, open }
    }

    /// Returns whether no access needs to take anything.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        // Pairs with the release in `pass`: all bytes that were written are seen.
        self.open.load(Ordering::Acquire)
    }

    /// Returns whether all granules of the file were taken. `pass` then sets `open`.
    #[inline]
    fn is_given(&self) -> bool {
        // SAFETY: `gate`, which lives as long as this value, has the flag at this place.
        unsafe { &*self.given }.load(Ordering::Acquire)
    }

    /// Returns whether a range of the mapping can be accessed without a call of `pass`.
    #[inline]
    fn is_ready(&self, offset: usize, len: usize) -> bool {
        let start = self.offset + offset;
        let granules = start >> self.shift..(start + len).div_ceil(1 << self.shift);
        // SAFETY: as for the flag.
        let states = unsafe { &*self.states }.get(granules);
        // Pairs with the release of the thread that wrote a granule's bytes.
        let is_clean = |state: &AtomicU8| state.load(Ordering::Acquire) == self.clean;
        states.is_some_and(|states| states.iter().all(is_clean)) && !self.is_given()
    }

    /// Takes the granules of a range of the mapping. Never waits for another thread's granule
    /// ([`NotYet::Busy`]). Copying a template's page may sleep.
    #[inline]
    pub(crate) fn take(&self, offset: usize, len: usize) -> Result<(), NotYet> {
        if self.is_open() || self.is_ready(offset, len) {
            return Ok(());
        }
        self.pass(offset, len)
    }

    #[inline(never)]
    fn pass(&self, offset: usize, len: usize) -> Result<(), NotYet> {
        self.gate.take(self.offset + offset, len)?;
        if self.is_given() {
            self.open.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Does what [`Late::take`] does, and waits for other threads that are writing granules of the
    /// range: it spins, then yields, then sleeps. It has to sleep, since the other thread may be
    /// copying a page of a fork and wait for a hole that the fork's process makes in the file.
    /// A reactor goes on without a task that sleeps, but not without one that only yields.
    #[inline]
    pub(crate) fn take_patiently(&self, offset: usize, len: usize) -> Result<(), NotYet> {
        if self.is_open() || self.is_ready(offset, len) {
            return Ok(());
        }
        self.pass_patiently(offset, len)
    }

    #[inline(never)]
    fn pass_patiently(&self, offset: usize, len: usize) -> Result<(), NotYet> {
        let mut tries = 0u32;
        loop {
            match self.pass(offset, len) {
                Err(NotYet::Busy) if tries < SPINS => std::hint::spin_loop(),
                Err(NotYet::Busy) if tries < YIELDS => std::thread::yield_now(),
                Err(NotYet::Busy) => std::thread::sleep(NAP),
                other => return other,
            }
            tries = tries.saturating_add(1);
        }
    }

    /// Takes the granules of a range of the mapping for hardware, like [`Late::take_patiently`].
    /// Returns the number of bytes that were not written before.
    pub(crate) fn give_to_hardware(&self, offset: usize, len: usize) -> Result<usize, NotYet> {
        self.gate.note_hardware();
        let unwritten = self.gate.unwritten(self.offset + offset, len);
        self.take_patiently(offset, len).map(|()| unwritten)
    }

    /// Reads a range of the mapping granule by granule, and takes none. `own` reads the parts that
    /// were taken; it gets a part's offset from the start of the range. Other parts read as zeros,
    /// or as the template. Returns `false` if `own` does, or if the template's bytes are gone.
    pub(crate) fn look(
        &self,
        offset: usize,
        into: &mut [u8],
        own: impl Fn(usize, &mut [u8]) -> bool,
    ) -> bool {
        let (start, mut done) = (self.offset + offset, 0);
        let granule = 1 << self.shift;
        while done < into.len() {
            let at = start + done;
            let end = into.len().min(done + granule - at % granule);
            let part = &mut into[done..end];
            let there = match self.gate.find(at / granule) {
                GranuleSource::Own => own(done, part),
                GranuleSource::Template => self.gate.read_template(at, part),
                GranuleSource::Zeros => {
                    part.fill(0);
                    true
                }
            };
            if !there {
                return false;
            }
            done = end;
        }
        true
    }
}
