//! A disk on an NVMe namespace's generic character device (/dev/ngXnY), by NVMe commands through
//! io_uring (`IORING_OP_URING_CMD`, Linux 5.19).
//!
//! The block layer's scheduler, merging and page cache are bypassed: a request becomes one command
//! for the drive's driver, whose data pointers name the spans' own pages.
//!
//! - The namespace's block device is also opened, exclusively, so that nobody mounts the namespace
//!   while this disk writes to it.
//! - A durable write sets Force Unit Access. A drive without a volatile write cache needs no flush.
//! - Discard and Write Zeroes both become Write Zeroes; a Discard sets Deallocate if the drive
//!   reports that deallocated blocks read as zeros (DLFEAT). A drive without Write Zeroes gets
//!   zeros written. Dataset Management is not used: it is a hint, and these blocks must read as
//!   zeros afterwards.
//! - The drive's transfer limit (MDTS) bounds a command; a longer request becomes several commands,
//!   one after the other. A command that the kernel refuses for too many segments is halved.
//! - A command that the drive did not carry out, because it was reset for example, is retried a few
//!   times unless the drive forbids that. Linux does so for its own commands, but not for those
//!   from user space.
//!
//! Disks that share a namespace each have few requests in the kernel, as disks that share a file
//! have.
//!
//! Not supported, and refused at opening: metadata with each block, blocks larger than 4 KiB. The
//! size is read when the namespace is opened, and again on demand. Section numbers are those of
//! *NVM Express Base Specification, Revision 1.4*; the interface is Linux's
//! (`include/uapi/linux/nvme_ioctl.h`).

mod command;
mod common;
mod device;
mod job;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use crate::check::{check_request, complete};
use crate::uring::{Engine, give_up};
use crate::{Completion, Disk, DiskError, FileOptions, Geometry, OpenError, Operation, Request};
use job::{PassthroughJob, Target};

pub(crate) use common::Common;

/// A disk on an NVMe namespace, by NVMe commands through io_uring.
pub struct PassthroughDisk {
    engine: Engine<PassthroughJob>,
    geometry: Geometry,
    waiting: VecDeque<Request>,
    common: Arc<Common>,
}

impl PassthroughDisk {
    /// Opens the namespace whose generic character device is at `path`. The options `direct` and
    /// `pin` have no effect.
    ///
    /// # Errors
    /// [`OpenError::Kind`] if the path is no such device, [`OpenError::InUse`] if the namespace is
    /// mounted or in use as a disk, [`OpenError::Namespace`] if it cannot hold a disk; the others
    /// are those of [`FileDisk::open`](crate::FileDisk::open).
    pub fn open(path: &Path, options: &FileOptions) -> Result<Self, OpenError> {
        Self::over(Arc::new(Common::open(path, options)?), options.read_only)
    }

    /// Opens one more disk on an open namespace; `read_only` write-protects this disk alone.
    pub(crate) fn over(common: Arc<Common>, read_only: bool) -> Result<Self, OpenError> {
        let geometry = common.geometry();
        let target = Target::new(Arc::clone(&common));
        let engine = Engine::new(target, geometry.block_size, common.witness.as_ref());
        let engine = engine.map_err(OpenError::Ring)?;
        common.users.join();
        let geometry = Geometry { read_only: read_only || geometry.read_only, ..geometry };
        Ok(Self { engine, geometry, waiting: VecDeque::new(), common })
    }

    /// Returns the outcome of a request that needs no command, or `None` if it needs one.
    fn immediate(&self, request: &Request) -> Option<Result<(), DiskError>> {
        let extent = match check_request(&self.geometry, request) {
            Ok(extent) => extent,
            Err(error) => return Some(Err(error)),
        };
        let flushes = self.common.device.caches && !self.geometry.read_only;
        let lost = self.common.users.lost();
        match request.operation {
            Operation::Flush if lost.is_some() => lost.map(Err),
            Operation::Flush => (!flushes).then_some(Ok(())),
            _ => (extent.len == 0).then_some(Ok(())),
        }
    }

    /// Hands waiting requests to the kernel as long as there is room.
    fn start_waiting(&mut self, completions: &mut Vec<Completion>) {
        let share = self.common.users.share();
        while share.has_room(&self.engine, &self.waiting) && self.engine.has_place() {
            let Some(request) = self.waiting.pop_front() else { return };
            match self.immediate(&request) {
                Some(result) => completions.push(complete(request, result)),
                None => {
                    let job = PassthroughJob::new(request, &self.engine.target);
                    self.engine.start(job, completions);
                }
            }
        }
    }

    /// Reports a failed flush to all disks on the namespace.
    fn note_lost(&mut self) {
        if let Some(error) = self.engine.target.lost.take() {
            self.common.users.lose(error);
        }
    }
}

impl Disk for PassthroughDisk {
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
        self.engine.reap(completions);
        self.note_lost();
        self.start_waiting(completions);
        self.engine.tell();
    }

    /// Cancels only waiting requests; a command that the drive has runs to its end.
    fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        give_up(&mut self.waiting, tag, completions)
    }

    fn wake_descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.engine.wake_descriptor())
    }
}

impl Drop for PassthroughDisk {
    fn drop(&mut self) {
        self.common.users.leave();
        self.waiting.clear();
        self.engine.close();
        self.note_lost();
    }
}
