//! A disk in a file or on a block device, by io_uring.
//!
//! Data moves between the file and the spans without a copy (readv and writev on the spans' own
//! addresses). With O_DIRECT, a request whose spans are not aligned as the device requires goes
//! through an aligned bounce buffer in pieces. It does not go through the page cache by a second,
//! buffered descriptor: a buffered write brings its whole page into the cache, and if a direct
//! write to the page's other blocks is in flight at that time, the page's later write-back undoes
//! that write, although it was acknowledged.
//!
//! All requests of a `submit` go to the kernel in one call, and so do those that a `poll` starts.
//!
//! Disks that share a file each have few requests in the kernel (`users`); their other requests
//! wait in their own queue, where they delay no other disk.
//!
//! Registered buffers are used on demand ([`FileOptions::pin`], `pinned`), for requests whose data
//! is contiguous. They are not the default, since they pin pages of guest memory: in the end these
//! are all pages that the guest's page cache ever used. Pages that a guest gives back by a hole in
//! its file, without an unmap, would stay pinned, and the ring would read into pages that no longer
//! belong to the guest.
//!
//! Registered files are not used: the kernel releases a ring's files some time after the ring was
//! closed. The lock on the file would outlive the disk, and a killed process, and the next process
//! to open the file would be told that it is in use. Registered files would save the kernel two
//! reference-count changes: reads of 4 KiB from a disk in memory took 2 % less at depth 1 and 1 %
//! less at depth 32, which is less than the spread of the runs.
//!
//! The descriptor to wait on is the ring's own: it is readable exactly while a completion waits,
//! so there is no eventfd to clear on the hot path and no wake-up to lose.

mod common;
mod copy;
mod job;
mod open;
mod pinned;
mod target;
mod thin;

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use crate::check::{check_request, complete};
use crate::uring::{Engine, give_up};
use crate::{BaseIdentity, Completion, Disk, DiskError, Geometry, OpenError, Operation, Request};
use job::{FileJob, Target};
use pinned::Pinned;
use thin::Begun;

pub(crate) use common::{Common, cut, measure, set_size};
pub(crate) use open::{failed, file_type, identity};
pub(crate) use target::CopyTarget;

pub use copy::FileContent;
pub use open::{FileOptions, create_sparse};
pub use thin::Reserve;

/// A disk in a regular file or on a block device.
///
/// - A completed durable write, and every write acknowledged before a completed flush, is on the
///   medium as far as the host's file system and drive tell the truth (`RWF_DSYNC`, fdatasync(2)).
/// - After a failed flush all later ones fail with the same error: the kernel reports a lost write
///   once, and a flush that then succeeded would hide the loss.
/// - Write Zeroes and Discard use fallocate(2), and write zeros if the file system lacks it.
/// - A file that shrinks under the disk gives errors, never stale bytes.
/// - A file that keeps a reserve ([`FileOptions::reserve`]) is not written where it has a hole
///   while less is free. Write Zeroes and Discard make holes in it, or fail with
///   [`DiskError::Unsupported`] if the file system has none.
/// - Past `RLIMIT_FSIZE` the kernel sends `SIGXFSZ`, which kills a process that does not ignore it.
/// - Dropping the disk waits for requests in the kernel, since they use the spans' memory.
pub struct FileDisk {
    engine: Engine<FileJob>,
    geometry: Geometry,
    waiting: VecDeque<Request>,
    pinned: Pinned,
    common: Arc<Common>,
}

impl FileDisk {
    /// Opens the file or block device at `path` and locks it against a second writer.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(path: &Path, options: &FileOptions) -> Result<Self, OpenError> {
        Self::over(Arc::new(Common::open(path, options)?), options.read_only)
    }

    /// Opens one more disk on an open file; `read_only` write-protects this disk alone.
    pub(crate) fn over(common: Arc<Common>, read_only: bool) -> Result<Self, OpenError> {
        let geometry = common.geometry();
        let target = Target::new(Arc::clone(&common.fd), common.direct);
        let engine = Engine::new(target, geometry.block_size, common.witness.as_ref());
        let engine = engine.map_err(OpenError::Ring)?;
        common.users.join();
        Ok(Self {
            engine,
            geometry: Geometry { read_only: read_only || geometry.read_only, ..geometry },
            waiting: VecDeque::new(),
            pinned: Pinned::default(),
            common,
        })
    }

    /// Returns an identity of the file or device for an overlay over it: equal for the same file as
    /// long as nobody has written to it, and for the same device.
    ///
    /// # Errors
    /// The errors of fstat(2).
    pub fn identity(&self) -> std::io::Result<BaseIdentity> {
        Ok(identity(&self.common.fd)?)
    }

    /// Returns the open file, which is locked as long as anybody holds it.
    pub(crate) fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.common.fd)
    }

    /// Returns the content of a regular file, which has this path, for copies; `None` for a device.
    pub(crate) fn content(&self, path: &Path) -> Option<FileContent> {
        FileContent::of(&self.common, path)
    }

    /// Returns whether data bypasses the host's page cache.
    pub fn is_direct(&self) -> bool {
        self.engine.target.direct.is_some()
    }

    /// Returns the outcome of a request that needs no kernel call, or `None` if it needs one.
    fn immediate(&self, request: &Request) -> Option<Result<(), DiskError>> {
        let extent = match check_request(&self.geometry, request) {
            Ok(extent) => extent,
            Err(error) => return Some(Err(error)),
        };
        match (request.operation, self.common.users.lost()) {
            (Operation::Flush, Some(error)) => Some(Err(error)),
            (Operation::Flush, None) if self.geometry.read_only => Some(Ok(())),
            (Operation::Flush, None) => None,
            _ => (extent.len == 0).then_some(Ok(())),
        }
    }

    /// Hands waiting requests to the kernel as long as there is room.
    fn start_waiting(&mut self, completions: &mut Vec<Completion>) {
        let share = self.common.users.share();
        while share.has_room(&self.engine, &self.waiting) && self.engine.has_place() {
            let Some(request) = self.waiting.pop_front() else { return };
            if let Some(result) = self.immediate(&request) {
                completions.push(complete(request, result));
                continue;
            }
            match self.begin(&request) {
                Err(error) => completions.push(complete(request, Err(error))),
                Ok(begun) => {
                    let number = self.number(&request);
                    let job = FileJob::new(request, number, &self.geometry, &self.engine.target);
                    self.engine.start(job.in_thin(begun), completions);
                }
            }
        }
    }

    /// Begins an admitted request on a file that keeps a reserve.
    fn begin(&self, request: &Request) -> Result<Option<Begun>, DiskError> {
        let Some(thin) = &self.common.thin else { return Ok(None) };
        let block = u64::from(self.geometry.block_size);
        let start = request.lba.saturating_mul(block);
        let bytes = start..start.saturating_add(u64::from(request.blocks) * block);
        thin.begin(&self.common.fd, request.operation, bytes)
    }

    /// Returns the ring's number for the registered memory of the request, or `None` if the memory
    /// is not registered.
    fn number(&mut self, request: &Request) -> Option<u16> {
        match request.spans.as_slice() {
            [span] if self.common.pin => self.pinned.number(&self.engine.submitter(), span),
            _ => None,
        }
    }

    /// Processes the kernel's completions.
    fn reap(&mut self, completions: &mut Vec<Completion>) {
        self.engine.reap(completions);
        self.note_lost();
    }

    /// Reports a failed flush to all disks on the file.
    fn note_lost(&mut self) {
        if let Some(error) = self.engine.target.lost.take() {
            self.common.users.lose(error);
        }
    }

    /// Returns the number of requests that the kernel has.
    #[cfg(test)]
    pub(crate) fn running(&self) -> usize {
        self.engine.running()
    }

    /// Returns the number of registered pieces of memory.
    #[cfg(test)]
    pub(crate) fn pinned(&self) -> usize {
        self.pinned.count()
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
        self.engine.tell();
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.reap(completions);
        if !self.waiting.is_empty() {
            self.start_waiting(completions);
        }
        self.engine.tell();
    }

    fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        if give_up(&mut self.waiting, tag, completions) {
            return true;
        }
        let cancelled = self.engine.cancel(tag, completions);
        self.note_lost();
        cancelled
    }

    fn release(&mut self) {
        self.pinned.release(&self.engine.submitter());
    }

    fn wake_descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.engine.wake_descriptor())
    }
}

impl Drop for FileDisk {
    fn drop(&mut self) {
        self.common.users.leave();
        self.waiting.clear();
        self.engine.close();
        self.release();
        self.note_lost();
    }
}
