//! A disk in a file or on a block device, by io_uring.
//!
//! Data moves between the file and the spans without a copy (readv and writev on the spans' own
//! addresses). With O_DIRECT, a request whose spans are not aligned as the device wants goes
//! through an aligned bounce buffer in pieces. Not through the page cache by a second, buffered
//! descriptor: a buffered write brings its whole page into the cache, and when a direct write to
//! the page's other blocks is under way at that time, the page's later write-back undoes it, an
//! acknowledged write lost.
//!
//! All requests of a `submit` go to the kernel in one call, and so does what a `poll` starts.
//!
//! Disks that share a file have few requests each with the kernel ([`Share`](common::Share)); the
//! others wait here, in their own disk's queue and in nobody else's way.
//!
//! What io_uring offers and is not used:
//! - registered files: a ring lets go of them when the kernel gets to taking it down, some time after
//!   it was closed. The lock on the file would outlive the disk, and the process that was killed, and
//!   who opens the file next would be told that it is in use;
//! - registered buffers, of guest memory: they pin its pages. A guest would take all of its memory
//!   from the first request on, and what it gave back, by a hole in its file, would stay, with the ring
//!   reading into pages that are nobody's any more;
//! - NVMe passthrough (`IORING_OP_URING_CMD` on /dev/ngXnY): there was no such drive to try it on.
//!
//! The descriptor to wait on is the ring's own: it is readable exactly while a completion waits,
//! so there is no eventfd to clear on the hot path and no wake-up to lose.

mod common;
mod job;
mod open;

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use io_uring::{IoUring, types};

use crate::check::{admit, complete};
use crate::{BaseIdentity, Completion, Disk, DiskError, Geometry, OpenError, Operation, Request};
use common::Share;
use job::{Job, Next, Step, Target};

pub(crate) use common::{Common, cut, measure, set_size};

pub use open::{FileOptions, create_sparse};

/// Requests that the kernel works on at a time; more wait in this process. Bounds what a disk pins
/// in the kernel, and lies far above what a drive works on at once.
const RING_ENTRIES: u32 = 256;

/// A disk in a regular file or on a block device.
///
/// - A completed durable write, and every write acknowledged before a completed flush, is on the
///   medium as far as the host's file system and drive tell the truth (`RWF_DSYNC`, fdatasync(2)).
/// - After a failed flush all later ones fail with the same error: the kernel reports a lost write
///   once, and a flush that then succeeded would vouch for it.
/// - Write Zeroes and Discard use fallocate(2) and write zeros where the file system cannot.
/// - A file that shrinks under the disk gives errors, never stale bytes.
/// - Past `RLIMIT_FSIZE` the kernel sends `SIGXFSZ`, which kills a process that does not ignore it.
/// - Dropping it waits for what the kernel still works on, since that uses the spans' memory.
pub struct FileDisk {
    ring: IoUring,
    target: Target,
    geometry: Geometry,
    slots: Vec<Slot>,
    free: Vec<usize>,
    waiting: VecDeque<Request>,
    /// Bytes of the jobs that the kernel has.
    bytes: u64,
    /// Kernel's answers of one poll: slot and result.
    answers: Vec<(usize, i32)>,
    common: Arc<Common>,
}

/// A place for one request that the kernel works on.
#[derive(Default)]
struct Slot {
    job: Option<Job>,
    vectors: job::IoVectors,
}

impl FileDisk {
    /// Opens the file or block device at `path` and locks it against a second writer.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(path: &std::path::Path, options: &FileOptions) -> Result<Self, OpenError> {
        Self::over(Arc::new(Common::open(path, options)?), options.read_only)
    }

    /// One more disk on an open file; `read_only` protects this one alone.
    pub(crate) fn over(common: Arc<Common>, read_only: bool) -> Result<Self, OpenError> {
        let ring = IoUring::new(RING_ENTRIES).map_err(OpenError::Ring)?;
        if let Some(witness) = &common.witness {
            // A ring is taken down, its files last, when its last request has ended.
            let files = [witness.as_raw_fd()];
            ring.submitter().register_files(&files).map_err(OpenError::Ring)?;
        }
        let fd = common.fd.try_clone().map_err(OpenError::Wake)?;
        let geometry = common.geometry();
        common.join();
        Ok(Self {
            ring,
            target: Target::new(fd, common.direct),
            geometry: Geometry { read_only: read_only || geometry.read_only, ..geometry },
            slots: Vec::new(),
            free: Vec::new(),
            waiting: VecDeque::new(),
            bytes: 0,
            answers: Vec::new(),
            common,
        })
    }

    /// Equal for the same file, or device, as long as nobody has written to the file: for an overlay
    /// over it.
    ///
    /// # Errors
    /// What fstat(2) says.
    pub fn identity(&self) -> std::io::Result<BaseIdentity> {
        Ok(open::identity(&self.common.fd)?)
    }

    /// Whether data bypasses the host's page cache.
    pub fn is_direct(&self) -> bool {
        self.target.direct.is_some()
    }

    /// Whether a request ends without the kernel, and how.
    fn immediate(&self, request: &Request) -> Option<Result<(), DiskError>> {
        let extent = match admit(&self.geometry, request) {
            Ok(extent) => extent,
            Err(error) => return Some(Err(error)),
        };
        match (request.operation, self.common.lost.get()) {
            (Operation::Flush, Some(error)) => Some(Err(*error)),
            (Operation::Flush, None) if self.geometry.read_only => Some(Ok(())),
            (Operation::Flush, None) => None,
            _ => (extent.len == 0).then_some(Ok(())),
        }
    }

    /// Hands waiting requests to the kernel as long as there is a place.
    fn start_waiting(&mut self, completions: &mut Vec<Completion>) {
        let share = self.common.share();
        while self.has_room(share) && self.free_slot() {
            let Some(request) = self.waiting.pop_front() else { return };
            match self.immediate(&request) {
                Some(result) => completions.push(complete(request, result)),
                None => self.start(request, completions),
            }
        }
    }

    /// Whether the kernel may have the first of the waiting requests.
    fn has_room(&self, share: Share) -> bool {
        let running = self.running();
        let Some(next) = self.waiting.front().filter(|_| running < share.requests) else {
            return false;
        };
        let bytes = moved(next, &self.geometry);
        running == 0 || self.bytes.saturating_add(bytes) <= share.bytes
    }

    /// Whether there is a free place; makes one when there may be more.
    fn free_slot(&mut self) -> bool {
        if self.free.is_empty() && self.slots.len() < RING_ENTRIES as usize {
            self.free.push(self.slots.len());
            self.slots.push(Slot::default());
        }
        !self.free.is_empty()
    }

    fn start(&mut self, request: Request, completions: &mut Vec<Completion>) {
        match self.free.pop() {
            Some(index) => {
                self.bytes += moved(&request, &self.geometry);
                let job = Job::new(request, &self.geometry, &self.target);
                self.push(index, job, completions);
            }
            None => self.waiting.push_front(request),
        }
    }

    /// Puts the next step of `job` into the submission queue, at a slot of its own.
    fn push(&mut self, index: usize, mut job: Job, completions: &mut Vec<Completion>) {
        let slot = &mut self.slots[index];
        let entry = match job.entry(&mut self.target, &mut slot.vectors) {
            Ok(entry) => entry.user_data(index as u64),
            Err(error) => return self.finish(index, job, Err(error), completions),
        };
        slot.job = Some(job);
        // SAFETY: the buffers and vectors that the entry points to belong to the slot and its job,
        // which stay until the kernel has answered: `reap` is the only one to take a job, and
        // dropping the disk waits. The descriptor belongs to `target`, which outlives the slots'
        // use of it for the same reason.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // A slot has one entry under way, and there are as many entries as slots.
        assert!(pushed.is_ok(), "the submission queue has an entry per slot");
    }

    /// Tells the kernel of new entries. An interrupted or refused call (no memory) leaves them in
    /// the queue and the next poll tries again.
    fn tell(&mut self) {
        if !self.ring.submission().is_empty() {
            let _ = self.ring.submit();
        }
    }

    /// Takes the kernel's answers; jobs with more to do go on unless `closing`.
    fn reap(&mut self, completions: &mut Vec<Completion>, closing: bool) {
        let mut answers = std::mem::take(&mut self.answers);
        answers.extend(self.ring.completion().map(|e| (e.user_data() as usize, e.result())));
        for (index, result) in answers.drain(..) {
            let Some(mut job) = self.slots.get_mut(index).and_then(|slot| slot.job.take()) else {
                continue;
            };
            match job.advance(result, &mut self.target) {
                Next::Again if !closing => self.push(index, job, completions),
                Next::Again => {
                    self.finish(index, job, Err(DiskError::Io(libc::ECANCELED)), completions);
                }
                Next::Done(result) => self.finish(index, job, result, completions),
            }
        }
        self.answers = answers;
    }

    fn finish(
        &mut self,
        index: usize,
        job: Job,
        result: Result<(), DiskError>,
        completions: &mut Vec<Completion>,
    ) {
        if let (Err(error), Step::Sync) = (result, job.step())
            && error != DiskError::Cancelled
        {
            self.common.lose(error);
        }
        self.free.push(index);
        let request = job.into_request(&mut self.target);
        self.bytes -= moved(&request, &self.geometry);
        completions.push(complete(request, result));
    }

    /// Whether the kernel had not begun with the request in slot `index`, and does not any more.
    fn kernel_cancels(&mut self, index: usize, completions: &mut Vec<Completion>) -> bool {
        let Some(tag) = self.slots[index].job.as_ref().map(Job::tag) else { return false };
        self.tell();
        let now = Some(types::Timespec::new());
        let request = types::CancelBuilder::user_data(index as u64);
        // Whatever it says, the completion tells how the request ended. Kernels before 6.0 refuse.
        let _ = self.ring.submitter().register_sync_cancel(now, request);
        let before = completions.len();
        self.reap(completions, false);
        self.tell();
        let cancelled = Err(DiskError::Cancelled);
        completions[before..].iter().any(|one| one.tag == tag && one.result == cancelled)
    }

    /// Requests that the kernel has.
    pub(crate) fn running(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

impl Disk for FileDisk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn refresh(&mut self) -> Geometry {
        self.geometry.blocks = self.common.geometry().blocks;
        self.geometry
    }

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        self.waiting.extend(requests.drain(..));
        self.start_waiting(completions);
        self.tell();
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.reap(completions, false);
        if !self.waiting.is_empty() {
            self.start_waiting(completions);
        }
        self.tell();
    }

    fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        if let Some(at) = self.waiting.iter().position(|request| request.tag == tag) {
            let given_up = |request| complete(request, Err(DiskError::Cancelled));
            completions.extend(self.waiting.remove(at).map(given_up));
            return true;
        }
        let is_it = |slot: &Slot| slot.job.as_ref().is_some_and(|job| job.tag() == tag);
        let index = self.slots.iter().position(is_it);
        index.is_some_and(|index| self.kernel_cancels(index, completions))
    }

    fn wake_descriptor(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the ring's descriptor is open as long as the ring, which the borrow keeps.
        Some(unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) })
    }
}

impl Drop for FileDisk {
    fn drop(&mut self) {
        self.common.leave();
        self.waiting.clear();
        let mut ended = Vec::new();
        while self.running() > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if is_passing(&error) => {}
                // The kernel may use the memory for ever: it must not be given back.
                Err(_) => return std::mem::forget(std::mem::take(&mut self.slots)),
            }
            self.reap(&mut ended, true);
            ended.clear();
        }
    }
}

/// Whether the same call may succeed next time.
fn is_passing(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

/// Bytes that a request moves.
fn moved(request: &Request, geometry: &Geometry) -> u64 {
    match request.operation {
        Operation::Read | Operation::Write => {
            u64::from(request.blocks) * u64::from(geometry.block_size)
        }
        _ => 0,
    }
}

/// The descriptor as io_uring wants it.
fn uring_fd(fd: &OwnedFd) -> types::Fd {
    types::Fd(fd.as_fd().as_raw_fd())
}
