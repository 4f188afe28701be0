//! Memory that is given late: recycled pages, each of which is zero when its user first sees it, or
//! new pages, each of which has a template's bytes then.
//!
//! A [`LateMemory`] is a file in memory whose pages may still hold the bytes of an earlier user. It
//! is cut into granules of [`GRANULE`] bytes, and a table has the state of each (see `states`).
//! Memory that begins as a [`Template`] ([`LateMemory::fork`]) is a file without pages, in granules
//! of [`Template::GRANULE`] bytes, since the few pages that a fork needs lie scattered. The three
//! parties that may meet a page first all go by the table:
//! - a device of this process: a region of late memory takes the granules of an access before the
//!   access. A span is taken when it is pinned, and needs no check later, since a clean granule
//!   stays clean;
//! - the user's process, which has the file mapped under userfaultfd(2): the server of its faults
//!   calls [`LateMemory::take`] before it lets a fault go on;
//! - a thread that works ahead of both: it zeroes ([`LateMemory::zero_ahead`]), or copies what a
//!   fork is known to need (the server of the faults, by [`LateMemory::take`]).
//!
//! A thread that finds a granule busy, because another one is writing its bytes, is told so
//! ([`Fault::Busy`](crate::Fault::Busy)) where it can come back: at
//! [`View::pin`](crate::View::pin), the way of data. A read never waits, and copies nothing: a
//! granule that nobody was given reads as zeros, or as the template. The small writes of a device
//! (words, ring entries, structures) wait for the other thread, which writes at most 64 KiB:
//! zeros without a system call, the template's bytes by one pwrite(2), which makes the pages as
//! well. Threads that zero ahead must therefore not do so at idle priority, at which they may wait
//! for a CPU. A pwrite(2) waits for holes that the user's process makes in the file, and that
//! process may have to wait for its share of a CPU meanwhile: the device's thread then sleeps, so
//! that its reactor goes on without it.
//!
//! The user of a fork may give pages that it does not need back to the kernel. For that no state
//! changes (see `states`).
//!
//! The table lies in a memfd, so that it can outlive this process together with the file. A granule
//! that was busy when its process ended is dirty, or shared ([`LateMemory::of_predecessor`]): a
//! user has no page of it before it is clean, so its bytes can be written again.
//!
//! Memory may have a home, a NUMA node on which the kernel makes its pages
//! ([`LateMemory::set_home`]). A file of base pages keeps its home, whoever touches a page first. A
//! file of huge pages does not, and each of its mappings has a home: this module sees to those of
//! this process, and the user to those of its own.

#[cfg(test)]
mod fork_tests;
mod forked;
mod granules;
mod recycle;
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
use states::TakeOutcome;

pub use granules::Granules;

use crate::gate::{GRANULE, Gate, GranuleSource, Late, NotYet, Table};
use crate::template::next_data;
use crate::{Lasting, Mapping, Permissions, Template, pages};

/// Pages of one file, recycled or new ones, and the state of each granule.
pub struct LateMemory {
    file: OwnedFd,
    /// This process's own mapping, through which granules are zeroed whatever a region permits.
    alias: Mapping,
    table: Lasting,
    granules: usize,
    /// The memory with whose bytes the user begins; zeros if there is none.
    template: Option<Arc<Template>>,
    /// Set when all granules are clean, or holes of the template.
    given: AtomicBool,
    /// Set when hardware was given a part of the memory.
    reached: AtomicBool,
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
        let granules = granules_of(&file, GRANULE)?;
        let table = Lasting::new("slipway-granules", granules)?;
        Self::with_table(file, table, granules, None)
    }

    /// Takes the file of memory all of which its user was given, by another process: a region of it
    /// needs nothing to be written.
    ///
    /// # Errors
    /// As for [`LateMemory::new`].
    pub fn given(file: OwnedFd) -> io::Result<Self> {
        let mut memory = Self::new(file)?;
        memory.states().iter().for_each(|state| state.store(states::CLEAN, Ordering::Relaxed));
        *memory.given.get_mut() = true;
        Ok(memory)
    }

    /// Takes the file and the table that a process which has ended left, and the template with
    /// whose bytes the memory begins, if it has one. Granules that it was writing are dirty, or
    /// shared with the template.
    ///
    /// # Errors
    /// As for [`LateMemory::new`] and [`LateMemory::fork`]; `InvalidData` if the table is none,
    /// belongs to another size, or to memory with a template where none is passed and the reverse.
    pub fn of_predecessor(
        file: OwnedFd,
        table: OwnedFd,
        template: Option<Arc<Template>>,
    ) -> io::Result<Self> {
        let invalid = |text| io::Error::new(io::ErrorKind::InvalidData, text);
        let (unit, before) = match &template {
            Some(_) => (Template::GRANULE, states::SHARED),
            None => (GRANULE, states::DIRTY),
        };
        let granules = granules_of(&file, unit)?;
        let table = Lasting::of(table)?;
        if table.len() != granules.next_multiple_of(rustix::param::page_size()) {
            return Err(invalid("a table of the pages of another file"));
        }
        if template.as_ref().is_some_and(|one| one.len() != granules * unit) {
            return Err(invalid("a template of another size"));
        }
        let of_template = [states::ABSENT, states::BUSY, states::CLEAN, states::SHARED];
        let known = |state| match template {
            Some(_) => of_template.contains(&state),
            None => (states::ABSENT..=states::CLEAN).contains(&state),
        };
        let memory = Self::with_table(file, table, granules, template.clone())?;
        let mut next = 0;
        // A state that nobody has written is a zero, an absent granule. A look at it would make a
        // page of the table, so that a fork with much room would take memory for that.
        while let Some(written) = next_data(memory.table()?, next, granules)? {
            for state in &memory.states()[written.clone()] {
                if !known(state.load(Ordering::Acquire)) {
                    return Err(invalid("an unknown state"));
                }
                let busy = states::BUSY;
                let _ = state.compare_exchange(busy, before, Ordering::AcqRel, Ordering::Relaxed);
            }
            next = written.end;
        }
        if memory.lacks_bytes() {
            return Err(invalid("the state of a hole for bytes of the template"));
        }
        Ok(memory)
    }

    fn with_table(
        file: OwnedFd,
        table: Lasting,
        granules: usize,
        template: Option<Arc<Template>>,
    ) -> io::Result<Self> {
        let unit = if template.is_some() { Template::GRANULE } else { GRANULE };
        let (len, both) = (granules * unit, Permissions::READ_WRITE);
        let alias = Mapping::file(file.as_fd(), 0, len, both, pages::own())?;
        let (given, reached) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { file, alias, table, granules, template, given, reached, home: None })
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

    /// Returns whether this process gave hardware a part of the memory since it was last recycled.
    pub fn had_hardware(&self) -> bool {
        self.reached.load(Ordering::Acquire)
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.granules * self.granule()
    }

    /// Returns the size in bytes of a granule, a power of two: [`GRANULE`] or
    /// [`Template::GRANULE`].
    #[inline]
    pub fn granule(&self) -> usize {
        if self.template.is_some() { Template::GRANULE } else { GRANULE }
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

    /// Returns the numbers of the granules that hold any of the bytes, which must be within the
    /// memory.
    fn touched(&self, offset: usize, len: usize) -> Range<usize> {
        let unit = self.granule();
        let end = (offset + len).div_ceil(unit).min(self.granules);
        (offset / unit).min(end)..end
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
    /// are dirty, and the template's bytes into those that are shared with it. Never waits for
    /// another thread's granule ([`NotYet::Busy`]). Copying a template's page may sleep.
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

    /// Gives the user of memory without a template the granules that have no page. Called before
    /// the user has the file: it has their pages from the kernel, without a fault, so that this
    /// process would never learn that they hold its bytes.
    pub fn give_holes(&self) {
        if self.template.is_none() {
            self.states().iter().for_each(states::give_hole);
        }
    }

    /// Takes all granules, like [`LateMemory::take`], except the template's holes, which are the
    /// user's already. After that, accesses through regions look at the table no more, and cost
    /// what accesses to other memory cost.
    ///
    /// # Errors
    /// As for [`LateMemory::take`].
    pub fn take_all(&self) -> Result<(), NotYet> {
        match &self.template {
            // Memory with room for more has large holes: the time does not grow with them.
            Some(template) => {
                template.data().iter().try_for_each(|data| self.take(data.start, data.len()))?;
            }
            None => self.take(0, self.len())?,
        }
        // Pairs with the acquire in `Late::is_given`.
        self.given.store(true, Ordering::Release);
        Ok(())
    }

    #[cold]
    fn take_slowly(&self, granules: Range<usize>) -> Result<(), NotYet> {
        // The run of granules that this thread has made busy and not filled yet. Others wait for
        // it, so it is short.
        let (mut run, most) = (granules.start..granules.start, GRANULE / self.granule());
        for granule in granules {
            match states::take(&self.states()[granule]) {
                TakeOutcome::Clean => {
                    self.fill(run, states::CLEAN)?;
                    run = granule + 1..granule + 1;
                }
                TakeOutcome::Mine if run.len() + 1 == most => {
                    self.fill(run.start..granule + 1, states::CLEAN)?;
                    run = granule + 1..granule + 1;
                }
                TakeOutcome::Mine => run.end = granule + 1,
                TakeOutcome::Busy => {
                    self.fill(run, states::CLEAN)?;
                    return Err(NotYet::Busy);
                }
            }
        }
        self.fill(run, states::CLEAN)
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
        self.fill(number..number + 1, states::UNTOUCHED).map(|()| true)
    }

    /// Writes the first bytes of granules that the caller made busy, which become `after`.
    fn fill(&self, run: Range<usize>, after: u8) -> Result<(), NotYet> {
        if run.is_empty() {
            return Ok(());
        }
        let bytes = run.start * self.granule()..run.end * self.granule();
        let (there, before) = match &self.template {
            Some(template) => (template.write_to(self.file(), bytes), states::SHARED),
            None => (self.alias.zero(bytes.start, bytes.len()), states::DIRTY),
        };
        let state = if there { after } else { before };
        self.states()[run].iter().for_each(|one| states::finish(one, state));
        if there { Ok(()) } else { Err(NotYet::Gone) }
    }

    /// Has the kernel make the pages of granule `number` if it has none. Does nothing in memory
    /// with a template.
    ///
    /// # Errors
    /// The errors of fallocate(2) and madvise(2): the host has no memory left.
    ///
    /// # Panics
    /// If there is no such granule.
    pub fn populate(&self, number: usize) -> io::Result<()> {
        let state = &self.states()[number];
        // A hole of a template may have a page with its user's bytes, which the table does not say.
        if self.template.is_none() && state.load(Ordering::Relaxed) == states::ABSENT {
            let (at, len) = (number * self.granule(), self.granule());
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
}

impl Gate for LateMemory {
    fn table(&self) -> Table<'_> {
        let (states, granule) = (self.states(), self.granule());
        Table { states, clean: states::CLEAN, granule, given: &self.given }
    }

    fn take(&self, offset: usize, len: usize) -> Result<(), NotYet> {
        LateMemory::take(self, offset, len)
    }

    fn unwritten(&self, offset: usize, len: usize) -> usize {
        let is_unwritten = |state: &&AtomicU8| {
            let state = state.load(Ordering::Relaxed);
            matches!(state, states::DIRTY | states::BUSY | states::SHARED)
        };
        let states = &self.states()[self.touched(offset, len)];
        states.iter().filter(is_unwritten).count() * self.granule()
    }

    fn note_hardware(&self) {
        self.reached.store(true, Ordering::Release);
    }

    fn find(&self, number: usize) -> GranuleSource {
        match self.states().get(number).map(|state| state.load(Ordering::Acquire)) {
            None | Some(states::CLEAN) => GranuleSource::Own,
            Some(states::ABSENT) if self.template.is_some() => GranuleSource::Own,
            Some(_) if self.template.is_some() => GranuleSource::Template,
            Some(_) => GranuleSource::Zeros,
        }
    }

    fn read_template(&self, offset: usize, into: &mut [u8]) -> bool {
        self.template.as_ref().is_some_and(|template| template.read(offset, into))
    }
}

/// Returns the number of granules of `unit` bytes of a file.
fn granules_of(file: &OwnedFd, unit: usize) -> io::Result<usize> {
    let size = usize::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
    if size == 0 || !size.is_multiple_of(unit) {
        let text = format!("{size} bytes: late memory has whole granules of {} KiB", unit >> 10);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(size / unit)
}
