//! How other threads have something done by a controller.
//!
//! The control thread never touches a controller: it posts a job, which the controller runs on its
//! own thread at the start of its next poll. An answer goes wherever the job sends it, for example
//! into a channel; a job that is never run (the controller was dropped first) is dropped, and with
//! it the channel's sender.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::task::Waker;

use crate::Controller;

type Job = Box<dyn FnOnce(&mut Controller) + Send>;

#[derive(Default)]
struct Shared {
    /// Whether jobs wait: what a poll looks at. Written under the lock only.
    waiting: AtomicBool,
    post: Mutex<Post>,
    /// Has the controller polled.
    waker: OnceLock<Waker>,
}

#[derive(Default)]
struct Post {
    jobs: Vec<Job>,
    /// The controller is gone.
    closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Post> {
        // The vector is changed in single calls: a panic leaves it whole.
        self.post.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Where jobs for a controller are posted; see [`Controller::mailbox`]. Cheap to clone; outlives
/// the controller harmlessly.
#[derive(Clone)]
pub struct Mailbox(Arc<Shared>);

impl Mailbox {
    /// Leaves `job` for the controller's next poll. Jobs run in the order in which they were
    /// posted. They run on a data path: they are short, wait for nothing, and allocate nothing that
    /// the poster could have allocated for them.
    ///
    /// A controller that sleeps does not look: the caller has its host poll it afterwards
    /// (`slipway_vfio_user::Control::poke`), unless it has lanes or is one: those are woken here. A job
    /// for a controller that is gone is dropped.
    pub fn post(&self, job: impl FnOnce(&mut Controller) + Send + 'static) {
        let mut post = self.0.lock();
        if !post.closed {
            post.jobs.push(Box::new(job));
            self.0.waiting.store(true, Ordering::Release);
        }
        drop(post);
        self.wake();
    }

    /// Has the controller look at what lies elsewhere for it, soon: in the next poll, or in the one
    /// that takes its jobs just now and looks afterwards.
    pub(crate) fn look(&self) {
        self.0.waiting.store(true, Ordering::Release);
        self.wake();
    }

    /// Has the controller polled, where it is known how.
    pub(crate) fn wake(&self) {
        if let Some(waker) = self.0.waker.get() {
            waker.wake_by_ref();
        }
    }
}

/// The controller's end.
#[derive(Default)]
pub(crate) struct Inbox(Arc<Shared>);

impl Inbox {
    pub fn mailbox(&self) -> Mailbox {
        Mailbox(Arc::clone(&self.0))
    }

    /// Whether there may be jobs. A job posted beside this is found by the next poll, which the
    /// poster asks for after posting.
    pub fn has_post(&self) -> bool {
        self.0.waiting.load(Ordering::Relaxed)
    }

    /// Has jobs wake the controller from now on.
    pub fn wake_by(&self, waker: Waker) {
        let _ = self.0.waker.set(waker);
    }

    /// Has the next poll look for jobs, whether there are any or not.
    pub fn look_again(&self) {
        self.0.waiting.store(true, Ordering::Relaxed);
    }

    fn take(&self) -> Vec<Job> {
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
        // Outside the lock: whoever waits for an answer may post again.
        drop(jobs);
    }
}

impl Controller {
    /// Where other threads post jobs for this controller.
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
