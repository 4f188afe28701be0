//! Requests in an io_uring, each as a job that is a sequence of steps.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use io_uring::{IoUring, Submitter, cqueue, squeue, types};
use slipway_ram::{Fault, Span};

use crate::check::complete;
use crate::vectors::IoVectors;
use crate::{Completion, DiskError, Operation, Request};

/// The number of requests that the kernel works on at a time; more wait in this process. Bounds the
/// kernel memory that a disk pins, and is far above a drive's own queue depth.
pub(crate) const RING_ENTRIES: u32 = 256;

/// The next action for a job.
pub(crate) enum Next {
    /// Submit the next step, which [`UringRequest::entry`] makes.
    Again,
    Done(Result<(), DiskError>),
}

/// A request and its progress.
pub(crate) trait UringRequest: Sized {
    /// The object that jobs work on, and the state that they share.
    type Target;
    type Entry: squeue::EntryMarker;
    type Answer: cqueue::EntryMarker;

    fn request(&self) -> &Request;

    /// Makes the submission entry of the next step. `vectors`, the job and the target stay until
    /// the kernel has answered, and with them all memory that the entry names.
    ///
    /// # Errors
    /// [`DiskError::Memory`] if the data to write is gone before the step begins.
    fn entry(
        &mut self,
        target: &mut Self::Target,
        vectors: &mut IoVectors,
    ) -> Result<Self::Entry, DiskError>;

    /// Processes the kernel's answer: bytes moved, 0, a positive status, or a negative errno.
    fn advance(&mut self, result: i32, target: &mut Self::Target) -> Next;

    /// Returns the request, which ends with `result`.
    fn into_request(self, result: Result<(), DiskError>, target: &mut Self::Target) -> Request;
}

/// A ring and the jobs that the kernel has. Dropping it waits for them, since they use the spans'
/// memory.
pub(crate) struct Engine<J: UringRequest> {
    ring: IoUring<J::Entry, J::Answer>,
    pub target: J::Target,
    slots: Vec<Slot<J>>,
    free: Vec<usize>,
    /// Bytes that the jobs in the kernel move.
    bytes: u64,
    block_size: u32,
    /// The kernel's answers in one poll: slot and result.
    answers: Vec<(usize, i32)>,
}

/// A slot for one request in the kernel.
struct Slot<J> {
    job: Option<J>,
    vectors: IoVectors,
    /// The caller was told that the request is not cancelled, so a later answer that it is must be
    /// retried.
    spared: bool,
}

impl<J: UringRequest> Engine<J> {
    /// Creates a ring. The kernel holds `witness` until the last request has ended, even if the
    /// process is killed.
    pub fn new(
        target: J::Target,
        block_size: u32,
        witness: Option<&Arc<OwnedFd>>,
    ) -> std::io::Result<Self> {
        let ring = IoUring::builder().build(RING_ENTRIES)?;
        if let Some(witness) = witness {
            // The kernel releases a ring's files last, after its last request has ended.
            ring.submitter().register_files(&[witness.as_raw_fd()])?;
        }
        let (slots, free, answers) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { ring, target, slots, free, bytes: 0, block_size, answers })
    }

    /// Returns the number of requests that the kernel has.
    pub fn running(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns the number of bytes that the requests in the kernel move.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of bytes that a request moves.
    pub fn moved(&self, request: &Request) -> u64 {
        match request.operation {
            Operation::Read | Operation::Write => {
                u64::from(request.blocks) * u64::from(self.block_size)
            }
            _ => 0,
        }
    }

    /// Returns whether there is a free slot; adds one if the ring has more entries than slots.
    pub fn has_place(&mut self) -> bool {
        if self.free.is_empty() && self.slots.len() < RING_ENTRIES as usize {
            self.free.push(self.slots.len());
            self.slots.push(Slot { job: None, vectors: IoVectors::default(), spared: false });
        }
        !self.free.is_empty()
    }

    /// Hands `job` to the kernel with the next [`Engine::tell`]. The caller has checked that there
    /// is a free slot.
    pub fn start(&mut self, job: J, completions: &mut Vec<Completion>) {
        let index = self.free.pop();
        assert!(index.is_some(), "the caller has asked for a place");
        if let Some(index) = index {
            self.bytes += self.moved(job.request());
            self.push(index, job, completions);
        }
    }

    /// Puts the next step of `job` into the submission queue, with the slot `index`.
    fn push(&mut self, index: usize, mut job: J, completions: &mut Vec<Completion>) {
        let slot = &mut self.slots[index];
        let mut entry = match job.entry(&mut self.target, &mut slot.vectors) {
            Ok(entry) => entry,
            Err(error) => return self.finish(index, job, Err(error), completions),
        };
        squeue::EntryMarker::set_user_data(&mut entry, index as u64);
        slot.job = Some(job);
        // SAFETY: the buffers and vectors that the entry points to belong to the slot, its job or
        // the target, which stay until the kernel has answered: only `reap` takes a job out, and
        // dropping the engine waits. The descriptor belongs to `target`, which stays as long for
        // the same reason.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // A slot has at most one entry in flight, and the queue has as many entries as there are
        // slots.
        assert!(pushed.is_ok(), "the submission queue has an entry per slot");
    }

    /// Submits new entries to the kernel. If the call is interrupted or refused (no memory), the
    /// entries stay in the queue for the next call.
    pub fn tell(&mut self) {
        if !self.ring.submission().is_empty() {
            let _ = self.ring.submit();
        }
    }

    /// Processes the kernel's answers; jobs with more steps go on.
    pub fn reap(&mut self, completions: &mut Vec<Completion>) {
        self.reap_or(completions, false);
    }

    /// Processes the kernel's answers. Jobs with more steps go on, unless `closing`, which ends
    /// them.
    fn reap_or(&mut self, completions: &mut Vec<Completion>, closing: bool) {
        let mut answers = std::mem::take(&mut self.answers);
        answers.extend(self.ring.completion().map(|answer| {
            let answer: cqueue::Entry = answer.into();
            (answer.user_data() as usize, answer.result())
        }));
        for (index, result) in answers.drain(..) {
            let Some(slot) = self.slots.get_mut(index) else { continue };
            let Some(mut job) = slot.job.take() else { continue };
            if result == -libc::ECANCELED && slot.spared && !closing {
                self.push(index, job, completions);
                continue;
            }
            match job.advance(result, &mut self.target) {
                Next::Again if !closing => self.push(index, job, completions),
                // Not an I/O error: that of a flush would count as a loss for all disks on the
                // medium.
                Next::Again => self.finish(index, job, Err(DiskError::Cancelled), completions),
                Next::Done(result) => self.finish(index, job, result, completions),
            }
        }
        self.answers = answers;
    }

    fn finish(
        &mut self,
        index: usize,
        job: J,
        result: Result<(), DiskError>,
        completions: &mut Vec<Completion>,
    ) {
        self.free.push(index);
        self.slots[index].spared = false;
        let request = job.into_request(result, &mut self.target);
        self.bytes -= self.moved(&request);
        completions.push(complete(request, result));
    }

    /// Cancels the request `tag`; see [`Disk::cancel`](crate::Disk::cancel). Returns whether the
    /// kernel had not begun the request and dropped it.
    pub fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        let is_it = |slot: &Slot<J>| slot.job.as_ref().is_some_and(|job| job.request().tag == tag);
        let Some(index) = self.slots.iter().position(is_it) else { return false };
        self.tell();
        let now = Some(types::Timespec::new());
        let request = types::CancelBuilder::user_data(index as u64);
        // The result is ignored: the completion tells how the request ended. Kernels before 6.0
        // refuse.
        let _ = self.ring.submitter().register_sync_cancel(now, request);
        let before = completions.len();
        self.reap(completions);
        self.tell();
        let cancelled = Err(DiskError::Cancelled);
        let given_up =
            completions[before..].iter().any(|one| one.tag == tag && one.result == cancelled);
        // The kernel may have cancelled the request and report it only later.
        let slot = &mut self.slots[index];
        slot.spared |= slot.job.is_some();
        given_up
    }

    /// Returns the interface for registering memory with the ring.
    pub fn submitter(&self) -> Submitter<'_> {
        self.ring.submitter()
    }

    /// Returns the ring's own descriptor, which is readable exactly while a completion waits.
    pub fn wake_descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring's descriptor is open as long as the ring, which the borrow keeps.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl<J: UringRequest> Engine<J> {
    /// Waits until the kernel has no more requests.
    pub fn close(&mut self) {
        let mut ended = Vec::new();
        while self.running() > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if is_passing(&error) => {}
                // The kernel may use the memory for ever, so it must not be freed.
                Err(_) => {
                    self.free.clear();
                    return std::mem::forget(std::mem::take(&mut self.slots));
                }
            }
            self.reap_or(&mut ended, true);
            ended.clear();
        }
    }
}

impl<J: UringRequest> Drop for Engine<J> {
    fn drop(&mut self) {
        self.close();
    }
}

/// Returns whether the same call may succeed next time.
fn is_passing(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

/// Cancels the request `tag` if it still waits in `waiting`. Returns whether it did.
pub(crate) fn give_up(
    waiting: &mut VecDeque<Request>,
    tag: u64,
    completions: &mut Vec<Completion>,
) -> bool {
    let at = waiting.iter().position(|request| request.tag == tag);
    let Some(request) = at.and_then(|at| waiting.remove(at)) else { return false };
    completions.push(complete(request, Err(DiskError::Cancelled)));
    true
}

/// Returns the error of `request` after the kernel refused it with `errno`.
pub(crate) fn refused(errno: i32, request: &Request) -> DiskError {
    match errno {
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => DiskError::NoSpace,
        libc::EFAULT => {
            let iova = request.spans.first().map_or(0, Span::iova);
            DiskError::Memory(Fault::Gone { iova })
        }
        libc::ECANCELED => DiskError::Cancelled,
        errno => DiskError::Io(errno),
    }
}

/// Returns the descriptor in io_uring's type.
pub(crate) fn uring_fd(fd: &OwnedFd) -> types::Fd {
    types::Fd(fd.as_fd().as_raw_fd())
}
