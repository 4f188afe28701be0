//! Posts jobs from other threads to a controller.
//!
//! The control thread never touches a controller: it posts a job, which the controller runs on its
//! own thread at the start of its next poll. The job sends its answer wherever it likes, for
//! example into a channel. A job that is never run, because the controller was dropped first, is
//! dropped together with the channel's sender.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::task::Waker;

use crate::Controller;

type HomeCall = Box<dyn FnOnce(&mut Controller) + Send>;

#[derive(Default)]
struct Shared {
    /// `true` if the next poll is to look for jobs or reports. A post sets it, and taking jobs
    /// clears it, under the lock.
    waiting: AtomicBool,
    post: Mutex<Post>,
    /// The waker that has the controller polled.
    waker: OnceLock<Waker>,
}

#[derive(Default)]
struct Post {
    jobs: Vec<HomeCall>,
    /// `true` if the controller is gone.
    closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Post> {
        // The vector is changed by single calls, so a panic leaves it whole.
        self.post.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A handle for posting jobs to a controller; see [`Controller::mailbox`]. It is cheap to clone,
/// and harmless after the controller is gone.
#[derive(Clone)]
pub struct Mailbox(Arc<Shared>);

impl Mailbox {
    /// Leaves `job` for the controller's next poll. Jobs run in the order in which they were
    /// posted. They run on a data path: a job must be short, wait for nothing, and allocate nothing
    /// that the poster could have allocated for it.
    ///
    /// A controller that sleeps does not look for jobs: the caller must have its host poll it
    /// afterwards (`slipway_vfio_user::Control::poke`), except for a controller that has lanes or
    /// is one, which is woken here. A job for a controller that is gone is dropped.
    pub fn post(&self, job: impl FnOnce(&mut Controller) + Send + 'static) {
        let mut post = self.0.lock();
        if !post.closed {
            post.jobs.push(Box::new(job));
            self.0.waiting.store(true, Ordering::Release);
        }
        drop(post);
        self.wake();
    }

    /// Makes the controller look for messages elsewhere (an outbox) soon: in the next poll, or in
    /// the present one if it takes its jobs just now and looks afterwards.
    pub(crate) fn look(&self) {
        self.0.waiting.store(true, Ordering::Release);
        self.wake();
    }

    /// Has the controller polled, if a waker is known.
    pub(crate) fn wake(&self) {
        if let Some(waker) = self.0.waker.get() {
            waker.wake_by_ref();
        }
    }
}

/// The receiving end of a mailbox, which the controller has.
#[derive(Default)]
pub(crate) struct Inbox(Arc<Shared>);

impl Inbox {
    pub fn mailbox(&self) -> Mailbox {
        Mailbox(Arc::clone(&self.0))
    }

    /// Returns whether there may be jobs. A job posted at the same time is found by the next poll,
    /// which the poster requests after posting.
    pub fn has_post(&self) -> bool {
        self.0.waiting.load(Ordering::Relaxed)
    }

    /// Makes posted jobs wake the controller from now on.
    pub fn wake_by(&self, waker: Waker) {
        let _ = self.0.waker.set(waker);
    }

    /// Makes the next poll look for jobs, whether there are any or not.
    pub fn look_again(&self) {
        self.0.waiting.store(true, Ordering::Relaxed);
    }

    fn take(&self) -> Vec<HomeCall> {
        let mut post = self.0.lock();
        self.0.waiting.store(false, Ordering::Relaxed);
        std::mem::take(&mut post.jobs)
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        let jobs = {
            let mut post = self.0.lock();
            post.closed = true;
            std::mem::take(&mut post.jobs)
        };
        // Outside the lock: dropping a job may make its poster post again.
        drop(jobs);
    }
}

impl Controller {
    /// Returns a handle with which other threads post jobs to this controller.
    pub fn mailbox(&self) -> Mailbox {
        self.inbox.mailbox()
    }

    /// Runs the jobs that wait.
    #[cold]
    pub(crate) fn run_jobs(&mut self) {
        self.get_up();
        for job in self.inbox.take() {
            job(self);
        }
        self.collect_reports();
        self.resume_lanes();
    }
}
