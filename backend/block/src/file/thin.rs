//! Sparse files that leave a part of their file system to others.
//!
//! Before a write of such a file takes space, the free space is looked at. If no more than the
//! reserve would be left, the write is refused with [`DiskError::NoSpace`]. A write to blocks that
//! the file has is never refused, so that a file system in the file stays whole and files can be
//! removed there. Zeros and discarded blocks are holes: they give their space back and take none.
//!
//! Many files on one file system share an account. It counts the bytes of writes in flight, which
//! the file system may not have taken yet, and grants some space between two looks. So all files
//! together exceed the bound by little, however many they are. On a file system that never writes
//! in place (btrfs), a write to blocks that the file has takes space until the old ones are freed.
//!
//! # Parts
//! - [`Account`]: the space that the writes of all files may take.
//! - [`AllocatedPages`] (`held`): the pages of one file that have space. Writes set its bits and
//!   holes clear them.
//! - [`Holes`]: whether a hole was made during a write, which must then set no bit.
//! - [`Thin`]: the three for one file. [`Thin::begin`] admits an operation, and the [`Begun`] that
//!   it returns ends it.

mod held;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use slipway_space::Space;

use crate::{DiskError, Operation};
use held::{AllocatedPages, space};

/// The most bytes that are granted between two looks at the free space.
const STEP: u64 = 16 << 20;

/// The part of a file system that a file leaves to others.
#[derive(Clone)]
pub struct Reserve {
    bytes: u64,
    report: Arc<dyn Fn() + Send + Sync>,
}

impl Reserve {
    /// Describes a reserve of `bytes` bytes. The first write of a file that is refused is given to
    /// `report`, on the thread of the disk, so `report` must not block for long.
    pub fn new(bytes: u64, report: impl Fn() + Send + Sync + 'static) -> Self {
        Self { bytes, report: Arc::new(report) }
    }
}

impl fmt::Debug for Reserve {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_struct("Reserve").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// The files of this process that keep the same reserve of one file system.
struct Account {
    reserve: u64,
    /// The bytes that writes may take before the next look.
    granted: AtomicU64,
    /// The bytes of writes in flight.
    pending: AtomicU64,
}

impl Account {
    /// Returns the account of the file system that `file` is on.
    fn of(file: BorrowedFd<'_>, reserve: u64) -> io::Result<Arc<Self>> {
        static ALL: Mutex<BTreeMap<(u64, u64), Weak<Account>>> = Mutex::new(BTreeMap::new());
        let key = (rustix::fs::fstat(file)?.st_dev, reserve);
        // The map is changed in single calls: a panic leaves it consistent.
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(account) = all.get(&key).and_then(Weak::upgrade) {
            return Ok(account);
        }
        all.retain(|_, one| one.strong_count() > 0);
        let account = Arc::new(Self::new(reserve));
        all.insert(key, Arc::downgrade(&account));
        Ok(account)
    }

    fn new(reserve: u64) -> Self {
        Self { reserve, granted: AtomicU64::new(0), pending: AtomicU64::new(0) }
    }

    /// Counts a write of `bytes` new bytes as pending. Returns `false`, and counts nothing, if
    /// there is no space for it.
    fn take(&self, file: BorrowedFd<'_>, bytes: u64) -> bool {
        let before = self.pending.fetch_add(bytes, Ordering::SeqCst);
        let rest = |granted: u64| granted.checked_sub(bytes);
        if self.granted.fetch_update(Ordering::SeqCst, Ordering::SeqCst, rest).is_ok() {
            return true;
        }
        let space = Space::of(file).map_or(0, |space| space.beyond(self.reserve));
        let Some(rest) = space.saturating_sub(before).checked_sub(bytes) else {
            self.end(bytes);
            return false;
        };
        self.granted.store(rest.min(STEP), Ordering::SeqCst);
        true
    }

    /// Ends a pending write.
    fn end(&self, bytes: u64) {
        self.pending.fetch_sub(bytes, Ordering::SeqCst);
    }
}

/// The holes that operations make in a file, counted for its writes.
///
/// A write that runs at the same time as a hole may reach the file before it or after it, so the
/// write must not claim that its pages have space. A hole counts itself as running before it counts
/// itself as begun, and a write reads the two counts in the other order. So a write that finds no
/// hole running has not counted one as begun that still runs.
#[derive(Default)]
struct Holes {
    begun: AtomicU64,
    running: AtomicU64,
}

/// The number of holes that were begun when none ran.
#[derive(Clone, Copy)]
struct HoleCount(u64);

impl Holes {
    fn begin(&self) {
        self.running.fetch_add(1, Ordering::SeqCst);
        self.begun.fetch_add(1, Ordering::SeqCst);
    }

    fn end(&self) {
        self.running.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns the count of holes, for [`Holes::none_since`]. Returns `None` while a hole runs.
    fn count(&self) -> Option<HoleCount> {
        let begun = self.begun.load(Ordering::SeqCst);
        (self.running.load(Ordering::SeqCst) == 0).then_some(HoleCount(begun))
    }

    /// Returns whether no hole was begun since `count` was taken.
    fn none_since(&self, count: HoleCount) -> bool {
        self.begun.load(Ordering::SeqCst) == count.0
    }
}

/// The state of a file that keeps a reserve, for all disks on it.
pub(crate) struct Thin {
    account: Arc<Account>,
    held: AllocatedPages,
    holes: Holes,
    /// The number of refused writes.
    refused: AtomicU64,
    report: Arc<dyn Fn() + Send + Sync>,
}

impl Thin {
    /// Looks at a regular file of `bytes` bytes.
    ///
    /// # Errors
    /// The errors of fstat(2) and lseek(2).
    pub fn new(file: impl AsFd, bytes: u64, reserve: &Reserve) -> io::Result<Self> {
        let file = file.as_fd();
        Ok(Self {
            account: Account::of(file, reserve.bytes)?,
            held: AllocatedPages::of(file, bytes)?,
            holes: Holes::default(),
            refused: AtomicU64::new(0),
            report: Arc::clone(&reserve.report),
        })
    }

    /// Returns the number of refused writes.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Begins an operation on `bytes` of `file`. Returns the value that ends it, or `None` if the
    /// operation changes nothing of what the file holds.
    ///
    /// # Errors
    /// [`DiskError::NoSpace`] if a write would take of the reserve.
    pub fn begin(
        self: &Arc<Self>,
        file: impl AsFd,
        operation: Operation,
        bytes: Range<u64>,
    ) -> Result<Option<Begun>, DiskError> {
        let change = match operation {
            Operation::Read | Operation::Flush => return Ok(None),
            Operation::Write if self.held.has(&bytes) => return Ok(None),
            Operation::Write => {
                if !self.account.take(file.as_fd(), space(&bytes)) {
                    return Err(self.refuse());
                }
                Change::Data { holes: self.holes.count() }
            }
            Operation::WriteZeroes | Operation::Discard => {
                self.holes.begin();
                self.held.clear(&bytes);
                Change::Hole
            }
        };
        Ok(Some(Begun { thin: Arc::clone(self), change, bytes }))
    }

    /// Counts a refused write, and reports the first one.
    fn refuse(&self) -> DiskError {
        if self.refused.fetch_add(1, Ordering::Relaxed) == 0 {
            (self.report)();
        }
        DiskError::NoSpace
    }
}

/// The change that an operation makes to a file.
enum Change {
    /// The file gets data. `holes` is the count of holes before, or `None` if one ran.
    Data { holes: Option<HoleCount> },
    /// The file gets a hole.
    Hole,
}

/// An operation that changes which pages of a file have space. Dropping it ends the operation.
pub(crate) struct Begun {
    thin: Arc<Thin>,
    change: Change,
    bytes: Range<u64>,
}

impl Begun {
    /// Notes that the operation has succeeded: the pages of a write have space now, unless a hole
    /// was made meanwhile, which may be in the same place and later.
    ///
    /// A hole may begin between the first look at the holes and the setting of the bits. It counts
    /// itself and then clears its bits. If it does both in between, the bits set here are wrong,
    /// and the second look finds the hole and takes them back. If the second look finds no hole,
    /// any later one clears the bits after they were set. Taking back bits that are right only
    /// has a later write counted as one that takes space.
    pub fn succeed(&self) {
        let Change::Data { holes: Some(before) } = self.change else { return };
        let Thin { holes, held, .. } = &*self.thin;
        if !holes.none_since(before) {
            return;
        }
        held.set(&self.bytes);
        if !holes.none_since(before) {
            held.clear(&self.bytes);
        }
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        match self.change {
            Change::Data { .. } => self.thin.account.end(space(&self.bytes)),
            Change::Hole => {
                // A write that has set bits since the hole began may have reached the file first.
                self.thin.held.clear(&self.bytes);
                self.thin.holes.end();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    /// Makes a file that keeps a reserve. All tests with the same one share an account.
    fn thin(reserve: u64) -> (std::fs::File, Arc<Thin>) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 * PAGE).unwrap();
        let thin = Thin::new(&file, 64 * PAGE, &Reserve::new(reserve, || {})).unwrap();
        (file, Arc::new(thin))
    }

    #[test]
    fn writes_in_flight_count_before_the_file_system_has_taken_them() {
        let (file, _) = thin(0);
        let free = Space::of(&file).unwrap().free;
        // Space for half of what is free, which other programs may change meanwhile.
        let account = Account::new(free / 2);
        assert!(account.take(file.as_fd(), free / 4));
        account.granted.store(0, Ordering::SeqCst);
        assert!(!account.take(file.as_fd(), free / 2));
        assert_eq!(account.pending.load(Ordering::SeqCst), free / 4);
        account.end(free / 4);
        assert!(account.take(file.as_fd(), free / 4));
    }

    #[test]
    fn a_write_of_a_part_of_a_page_takes_the_page() {
        let (file, thin) = thin(2);
        let pending = || thin.account.pending.load(Ordering::SeqCst);
        let write = |bytes| thin.begin(&file, Operation::Write, bytes).unwrap().unwrap();
        let both = [write(512..1024), write(3 * PAGE - 1..3 * PAGE + 1)];
        assert_eq!(pending(), 3 * PAGE);
        drop(both);
        assert_eq!(pending(), 0);
    }

    #[test]
    fn blocks_of_a_write_are_held_unless_a_hole_was_made_meanwhile() {
        let (file, thin) = thin(3);
        let write = |page: u64| {
            let bytes = page * PAGE..(page + 1) * PAGE;
            thin.begin(&file, Operation::Write, bytes).unwrap()
        };
        let hole = || thin.begin(&file, Operation::Discard, 0..PAGE).unwrap().unwrap();
        let first = write(0).unwrap();
        first.succeed();
        drop(first);
        assert!(write(0).is_none(), "it takes nothing");
        // The hole is asked for during the write.
        let second = write(1).unwrap();
        drop(hole());
        second.succeed();
        drop(second);
        assert!(write(1).is_some() && write(0).is_some());
        // The hole is asked for before the write, and ends after it began.
        let before = hole();
        let third = write(2).unwrap();
        drop(before);
        third.succeed();
        drop(third);
        assert!(write(2).is_some());
        // A write that failed holds nothing.
        drop(write(3).unwrap());
        assert!(write(3).is_some());
        assert_eq!(thin.account.pending.load(Ordering::SeqCst), 0);
    }
}
