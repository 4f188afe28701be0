//! Memory that is given late: recycled pages, each of which is zero when its user first sees it.
//!
//! A [`LateMemory`] is a file in memory whose pages may still hold the bytes of an earlier user. It
//! is cut into granules of [`GRANULE`] bytes, and a table has the state of each (see `states`). The
//! three parties that may meet a page first all go by the table:
//! - a device of this process: a region of late memory takes the granules of an access before the
//!   access. A span is taken when it is pinned, and needs no check later, since a clean granule
//!   stays clean;
//! - the user's process, which has the file mapped under userfaultfd(2): the server of its faults
//!   calls [`LateMemory::take`] before it lets a fault go on;
//! - a thread that zeroes ahead of both, [`LateMemory::zero_ahead`].
//!
//! A thread that finds a granule busy, because another one is writing its zeros, is told so
//! ([`Fault::Busy`](crate::Fault::Busy)) where it can come back: at
//! [`View::pin`](crate::View::pin), the way of data. A read never waits: a granule that nobody was
//! given reads as zeros. The small writes of a device (words, ring entries, structures) wait for
//! the other thread, which writes 64 KiB and makes no system call meanwhile. Threads that zero
//! ahead must therefore not do so at idle priority, at which they may wait for a CPU.
//!
//! The table lies in a memfd, so that it can outlive this process together with the file. A granule
//! that was busy when its process ended is dirty ([`LateMemory::of_predecessor`]).
//!
//! Memory may have a home, a NUMA node on which the kernel makes its pages
//! ([`LateMemory::set_home`]). A file of base pages keeps its home, whoever touches a page first. A
//! file of huge pages does not, and each of its mappings has a home: this module sees to those of
//! this process, and the user to those of its own.

mod states;
#[cfg(test)]
mod tests;

/// The atomics that `states` uses. Its loom test puts loom's here.
mod outside {
    pub use std::sync::atomic::{AtomicU8, Ordering};
}

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use outside::{AtomicU8, Ordering};
use rustix::fs::FallocateFlags;
use slipway_numa::NumaNode;
use slipway_peer::Bin;
use states::Taken;

use crate::gate::{GRANULE, Gate, Late, NotYet};
use crate::{Lasting, Mapping, Permissions, pages};

/// The bytes that fill a granule: a page of them, which stays in the processor's first cache.
static ZEROS: [u8; 4096] = [0; 4096];

/// The number of granules in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Granules {
    /// Granules without a page.
    pub absent: usize,
    /// Granules with an earlier user's bytes.
    pub dirty: usize,
    /// Granules that are being zeroed.
    pub busy: usize,
    /// Granules of zeros that nobody was given.
    pub untouched: usize,
    /// Granules that the present user was given.
    pub clean: usize,
}

impl std::iter::Sum for Granules {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            absent: sum.absent + one.absent,
            dirty: sum.dirty + one.dirty,
            busy: sum.busy + one.busy,
            untouched: sum.untouched + one.untouched,
            clean: sum.clean + one.clean,
        })
    }
}

/// Recycled pages of one file, and the state of each granule.
pub struct LateMemory {
    file: OwnedFd,
    /// This process's own mapping, through which granules are zeroed whatever a region permits.
    alias: Mapping,
    table: Lasting,
    granules: usize,
    /// Set when all granules are clean.
    given: AtomicBool,
    /// The NUMA node of the pages, if there is one.
    home: Option<NumaNode>,
}

impl std::fmt::Debug for LateMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LateMemory({} granules)", self.granules)
    }
}

impl LateMemory {
    /// Takes a new file, whose size is a multiple of [`GRANULE`] and which nobody else maps yet. A
    /// file without pages is all zeros, and so is the memory.
    ///
    /// # Errors
    /// `InvalidInput` for another size; those of [`Mapping::file`] and of making a memfd.
    pub fn new(file: OwnedFd) -> io::Result<Self> {
        let granules = granules_of(&file)?;
        let table = Lasting::new("slipway-granules", granules)?;
        Self::with_table(file, table, granules)
    }

    /// Takes the file and the table that a process which has ended left. Granules that it was
    /// zeroing are dirty.
    ///
    /// # Errors
    /// As for [`LateMemory::new`]; `InvalidData` if the table is none or belongs to another size.
    pub fn of_predecessor(file: OwnedFd, table: OwnedFd) -> io::Result<Self> {
        let granules = granules_of(&file)?;
        let table = Lasting::of(table)?;
        if table.len() != granules.next_multiple_of(rustix::param::page_size()) {
            let text = "a table of the pages of another file";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let memory = Self::with_table(file, table, granules)?;
        for state in memory.states() {
            if !(states::ABSENT..=states::CLEAN).contains(&state.load(Ordering::Acquire)) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "an unknown state"));
            }
            let (busy, dirty) = (states::BUSY, states::DIRTY);
            let _ = state.compare_exchange(busy, dirty, Ordering::AcqRel, Ordering::Relaxed);
        }
        Ok(memory)
    }

    fn with_table(file: OwnedFd, table: Lasting, granules: usize) -> io::Result<Self> {
        let (len, both) = (granules * GRANULE, Permissions::READ_WRITE);
        let alias = Mapping::file(file.as_fd(), 0, len, both, pages::own())?;
        Ok(Self { file, alias, table, granules, given: AtomicBool::new(false), home: None })
    }

    /// Has the kernel make the pages of the memory on `home` from now on, as long as that node has
    /// any left ([`slipway_numa::prefer`]). Pages that are there stay where they are.
    ///
    /// # Errors
    /// As for [`slipway_numa::prefer`]; the memory then has the home that it had.
    pub fn set_home(&mut self, home: NumaNode) -> io::Result<()> {
        self.alias.prefer(home)?;
        self.home = Some(home);
        Ok(())
    }

    /// Returns the NUMA node on which the kernel makes the pages of the memory, or `None` if it is
    /// that of the thread that touches a page first.
    pub fn home(&self) -> Option<NumaNode> {
        self.home
    }

    /// Returns the file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the file of the table, to be kept for a successor.
    ///
    /// # Errors
    /// `Unsupported`; does not happen to a table that was made by this module.
    pub fn table(&self) -> io::Result<BorrowedFd<'_>> {
        self.table.file().ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.granules * GRANULE
    }

    /// Returns whether the size is 0, which it never is.
    pub fn is_empty(&self) -> bool {
        self.granules == 0
    }

    /// Returns the number of granules.
    pub fn granules(&self) -> usize {
        self.granules
    }

    fn states(&self) -> &[AtomicU8] {
        let words = self.table.words();
        // SAFETY: the words are bytes of shared memory that is valid as long as `self.table`, which
        // has at least a byte for each granule; nothing else uses them as words.
        unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<AtomicU8>(), self.granules) }
    }

    /// Counts the granules by their states. Others may change them meanwhile.
    pub fn count(&self) -> Granules {
        let mut count = Granules::default();
        for state in self.states() {
            *match state.load(Ordering::Relaxed) {
                states::ABSENT => &mut count.absent,
                states::BUSY => &mut count.busy,
                states::UNTOUCHED => &mut count.untouched,
                states::CLEAN => &mut count.clean,
                _ => &mut count.dirty,
            } += 1;
        }
        count
    }

    /// Returns the numbers of the granules that hold any of the bytes, which must be within the
    /// memory.
    fn touched(&self, offset: usize, len: usize) -> Range<usize> {
        let end = (offset + len).div_ceil(GRANULE).min(self.granules);
        (offset / GRANULE).min(end)..end
    }

    /// Maps `len` bytes at `offset` as a region of a client's memory.
    ///
    /// # Errors
    /// As for [`Mapping::file`]; `InvalidInput` for bytes beyond the memory.
    pub(crate) fn map(
        self: &Arc<Self>,
        (offset, len): (u64, usize),
        permissions: Permissions,
        bin: &Bin,
    ) -> io::Result<Mapping> {
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        if start.checked_add(len).is_none_or(|end| end > self.len()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mapping = Mapping::file(self.file(), offset, len, permissions, bin)?;
        if let Some(home) = self.home.filter(|_| mapping.is_huge()) {
            // The alias was allowed the same. If this mapping is not, its pages are farther away.
            let _ = mapping.prefer(home);
        }
        Ok(mapping.behind(Late::new(self.clone(), start)))
    }

    /// Takes all granules of `offset..offset + len` for their user: writes zeros into those that
    /// are dirty. Never waits.
    ///
    /// # Errors
    /// [`NotYet`]; some of the granules may have been taken.
    ///
    /// # Panics
    /// If the end of the range overflows.
    #[inline]
    pub fn take(&self, offset: usize, len: usize) -> Result<(), NotYet> {
        let granules = self.touched(offset, len);
        let states = &self.states()[granules.clone()];
        if states.iter().all(states::is_clean) {
            return Ok(());
        }
        self.take_slowly(granules)
    }

    /// Takes all granules, like [`LateMemory::take`]. After that, accesses through regions look at
    /// the table no more, and cost what accesses to other memory cost.
    ///
    /// # Errors
    /// As for [`LateMemory::take`].
    pub fn take_all(&self) -> Result<(), NotYet> {
        self.take(0, self.len())?;
        // Pairs with the acquire in `is_given`.
        self.given.store(true, Ordering::Release);
        Ok(())
    }

    #[cold]
    fn take_slowly(&self, granules: Range<usize>) -> Result<(), NotYet> {
        for granule in granules {
            let state = &self.states()[granule];
            match states::take(state) {
                Taken::Clean => {}
                Taken::Mine => self.zero(granule, states::CLEAN)?,
                Taken::Busy => return Err(NotYet::Busy),
            }
        }
        Ok(())
    }

    /// Zeroes granule `number` if it is dirty and nobody else is at it. Returns whether it did.
    ///
    /// # Errors
    /// [`NotYet::Gone`].
    ///
    /// # Panics
    /// If there is no such granule.
    pub fn zero_ahead(&self, number: usize) -> Result<bool, NotYet> {
        if !states::begin_ahead(&self.states()[number]) {
            return Ok(false);
        }
        self.zero(number, states::UNTOUCHED).map(|()| true)
    }

    /// Writes the zeros of a granule that the caller made busy, which becomes `after`.
    fn zero(&self, granule: usize, after: u8) -> Result<(), NotYet> {
        let start = granule * GRANULE;
        let mut pages = (start..start + GRANULE).step_by(ZEROS.len());
        let there = pages.all(|page| self.alias.write(page, &ZEROS));
        let state = if there { after } else { states::DIRTY };
        states::finish(&self.states()[granule], state);
        if there { Ok(()) } else { Err(NotYet::Gone) }
    }

    /// Has the kernel make the pages of granule `number` if it has none.
    ///
    /// # Errors
    /// The errors of fallocate(2) and madvise(2): the host has no memory left.
    ///
    /// # Panics
    /// If there is no such granule.
    pub fn populate(&self, number: usize) -> io::Result<()> {
        let state = &self.states()[number];
        if state.load(Ordering::Relaxed) == states::ABSENT {
            let (at, len) = (number * GRANULE, GRANULE);
            if self.home.is_some() && self.alias.is_huge() {
                // fallocate(2) knows no home of huge pages, which the alias has.
                self.alias.populate(at, len)?;
            } else {
                let flags = FallocateFlags::empty();
                rustix::fs::fallocate(&self.file, flags, at as u64, len as u64)?;
            }
            states::populated(state);
        }
        Ok(())
    }

    /// Makes the memory ready for another user, after the last one and everything that it began are
    /// gone: what the last user was given is dirty. The exclusive borrow tells that no region and
    /// no thread of this process uses the memory; that no other process does is the caller's part.
    pub fn recycle(&mut self) {
        *self.given.get_mut() = false;
        self.states().iter().for_each(states::recycle);
    }
}

impl Gate for LateMemory {
    fn take(&self, offset: usize, len: usize) -> Result<(), NotYet> {
        LateMemory::take(self, offset, len)
    }

    fn is_taken(&self, number: usize) -> bool {
        self.states().get(number).is_none_or(states::is_clean)
    }

    fn is_given(&self) -> bool {
        self.given.load(Ordering::Acquire)
    }
}

/// Returns the number of granules of a file.
fn granules_of(file: &OwnedFd) -> io::Result<usize> {
    let size = usize::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
    if size == 0 || !size.is_multiple_of(GRANULE) {
        let text = format!("{size} bytes: late memory has whole granules of 64 KiB");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(size / GRANULE)
}
