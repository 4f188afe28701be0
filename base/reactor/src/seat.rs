//! The *seat*: where a reactor is while its thread is inside a call into a task.
//!
//! The thread parks the reactor in its seat before each call, and takes it back after the call. If
//! the thread falls asleep in the call, the watchdog may take the reactor out of the seat. A new
//! thread then goes on with all tasks but the called one. This happens at most once for a seat.
//!
//! # Which thread owns the reactor
//! Two threads may want the reactor at the same time: the seat's thread, whose call ends, and the
//! watchdog. Each writes one word and then reads the other's:
//! - after the call, the seat's thread clears `parked`, and *then* reads `claimed`;
//! - the watchdog sets `claimed`, calls membarrier(2), and *then* reads `parked`.
//!
//! The seat's thread does so at each call, so it has plain stores and one load, without a barrier.
//! The barrier is the watchdog's: membarrier(2) puts a full one into the seat's thread, wherever
//! that is. There are two cases:
//! - The barrier comes before the thread clears `parked`. Then the thread reads `claimed` after the
//!   barrier, and finds it set. It takes the lock of `decision` and reads who has the reactor.
//! - The barrier comes after that. Then the watchdog reads that `parked` is cleared, or that it
//!   belongs to a later call, and gives up.

#![allow(unsafe_code)] // a reactor behind a pointer that two threads may want

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, compiler_fence};
use std::sync::{Arc, Mutex};

use rustix::thread::{MembarrierCommand, membarrier};

use crate::context::Watches;
use crate::mailbox::Mailbox;
use crate::run::{Run, drive_alone};
use crate::tasks::Body;
use crate::{Settings, Step, TaskId};

/// The seat of one thread. A thread whose reactor was taken has no seat any more, so that a reactor
/// is taken from a seat at most once.
pub(crate) struct Seat {
    /// The reactor during a call, and null otherwise. Only the seat's thread writes it.
    parked: AtomicPtr<Run>,
    /// `true` while the watchdog decides whether to take the reactor, and after it has taken it.
    claimed: AtomicBool,
    /// The watchdog's decision.
    decision: Mutex<Decision>,
    /// The number of calls and wake-ups. Only the seat's thread writes it.
    calls: AtomicU64,
    /// The task of the last call. Only the seat's thread writes it.
    task: AtomicU64,
    /// The thread id of the seat's thread in the kernel.
    thread: i32,
}

/// Which thread has the reactor.
enum Decision {
    /// The seat's thread.
    Stays,
    /// Another thread. The called task, which stays behind, has this mailbox from then on.
    Taken(Arc<Mailbox>),
}

/// The place of a reactor during a call.
pub(crate) enum Parked<'a> {
    /// In a seat.
    In(&'a Seat, *mut Run),
    /// With its thread, which has no seat.
    Kept(Box<Run>),
}

impl Seat {
    /// Returns a seat for the calling thread.
    pub(crate) fn taken() -> Arc<Self> {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        Arc::new(Self {
            parked: AtomicPtr::default(),
            claimed: AtomicBool::new(false),
            decision: Mutex::new(Decision::Stays),
            calls: AtomicU64::new(0),
            task: AtomicU64::new(0),
            thread,
        })
    }

    /// Parks the reactor `run` in `seat`, if there is one, during a call into `task`.
    #[inline]
    pub(crate) fn park(seat: Option<&Self>, run: Box<Run>, task: TaskId) -> Parked<'_> {
        let Some(seat) = seat else { return Parked::Kept(run) };
        seat.count();
        seat.task.store(task.0, Ordering::Relaxed);
        let run = Box::into_raw(run);
        // Pairs with the load in `take_over`: a thread that reads the pointer sees all changes of
        // the reactor by this thread.
        seat.parked.store(run, Ordering::Release);
        Parked::In(seat, run)
    }

    /// Increments the number of calls. Only the seat's thread may call it.
    #[inline]
    pub(crate) fn count(&self) {
        let calls = self.calls.load(Ordering::Relaxed);
        self.calls.store(calls.wrapping_add(1), Ordering::Relaxed);
    }

    /// Returns the number of calls, which changes with each call, and the task of the call that is
    /// in progress, if there is one. After the reactor was taken, its call counts as in progress
    /// until it ends.
    pub(crate) fn look(&self) -> (u64, Option<TaskId>) {
        let within = !self.parked.load(Ordering::Acquire).is_null();
        let task = within.then(|| TaskId(self.task.load(Ordering::Relaxed)));
        (self.calls.load(Ordering::Relaxed), task)
    }

    /// Returns the thread id of the seat's thread in the kernel.
    pub(crate) fn thread(&self) -> i32 {
        self.thread
    }

    /// Takes the reactor out of the seat if its thread is still in the call for which
    /// [`Seat::look`] returned `calls`. `alone` becomes the called task's mailbox. Returns `None`
    /// if that call has ended, the reactor was taken before, or membarrier(2) failed.
    pub(crate) fn take_over(&self, alone: Arc<Mailbox>, calls: u64) -> Option<Box<Run>> {
        let mut decision = lock(&self.decision);
        if matches!(*decision, Decision::Taken(_)) {
            return None;
        }
        self.claimed.store(true, Ordering::Relaxed);
        let barrier = membarrier(MembarrierCommand::PrivateExpedited);
        let found = self.parked.load(Ordering::Acquire);
        // The acquire above makes the count of a later call visible with its pointer.
        let same = self.calls.load(Ordering::Relaxed) == calls;
        if found.is_null() || !same || barrier.is_err() {
            self.claimed.store(false, Ordering::Relaxed);
            return None;
        }
        *decision = Decision::Taken(alone);
        // SAFETY: the pointer comes from `Box::into_raw` in `park`. The thread is still in the
        // call, so it will find the seat claimed (see the head) and read the decision that the
        // reactor is the caller's.
        Some(unsafe { Box::from_raw(found) })
    }

    /// Returns whether the seat's thread still owns the reactor. Waits for a decision of the
    /// watchdog that is under way.
    #[cold]
    fn is_kept(&self) -> bool {
        matches!(*lock(&self.decision), Decision::Stays)
    }

    /// Returns the mailbox of the task that was being called when the reactor was taken over.
    /// Returns `None` if the reactor was not taken.
    fn mailbox(&self) -> Option<Arc<Mailbox>> {
        match &*lock(&self.decision) {
            Decision::Stays => None,
            Decision::Taken(mailbox) => Some(mailbox.clone()),
        }
    }
}

impl Parked<'_> {
    /// Takes the reactor back after the call. Returns `None` if it was taken over.
    #[inline]
    pub(crate) fn back(self) -> Option<Box<Run>> {
        match self {
            Self::In(seat, run) => {
                seat.parked.store(std::ptr::null_mut(), Ordering::Release);
                // A barrier for the compiler; the processor's barrier is the membarrier in
                // `take_over`.
                compiler_fence(Ordering::SeqCst);
                if seat.claimed.load(Ordering::Acquire) && !seat.is_kept() {
                    return None;
                }
                // SAFETY: the pointer comes from `Box::into_raw` in `park`, and no thread took the
                // reactor over: not before, by the decision, and not from now on, since `parked` is
                // null.
                Some(unsafe { Box::from_raw(run) })
            }
            Self::Kept(run) => Some(run),
        }
    }
}

/// Registers the process for membarrier(2).
///
/// # Errors
/// If the kernel has no membarrier (before Linux 4.14), or a filter refuses it.
pub(crate) fn register() -> std::io::Result<()> {
    Ok(membarrier(MembarrierCommand::RegisterPrivateExpedited)?)
}

/// The outcome for a task that was left behind, once the call in which it slept has returned.
#[derive(Clone, Copy)]
pub(crate) enum Fate {
    /// The task goes on, on this thread.
    GoesOn,
    /// The task leaves, as after [`Step::Leave`].
    Leaves,
    /// The task is done or has panicked: it is dropped.
    Ends,
}

impl Fate {
    /// Returns the fate of a task whose call returned `step`.
    pub(crate) fn after(step: Step) -> Self {
        match step {
            Step::Done => Self::Ends,
            Step::Leave => Self::Leaves,
            _ => Self::GoesOn,
        }
    }
}

/// The remainder of a thread whose reactor was taken: the task that slept in the call, if it is not
/// gone.
pub(crate) struct Lost(Option<Left>);

struct Left {
    body: Box<Body>,
    fate: Fate,
    mailbox: Arc<Mailbox>,
    settings: Arc<Settings>,
}

impl Lost {
    /// Makes the remainder of a thread that has the task in `body`. `fate` is what happens to it.
    pub(crate) fn new(
        seat: Option<&Seat>,
        settings: &Arc<Settings>,
        body: Box<Body>,
        fate: Fate,
    ) -> Self {
        let mailbox = seat.and_then(Seat::mailbox);
        let settings = settings.clone();
        Self(mailbox.map(|mailbox| Left { body, fate, mailbox, settings }))
    }

    /// Makes the remainder of a thread whose task is gone already.
    pub(crate) fn nothing() -> Self {
        Self(None)
    }

    /// Carries out the task's fate on this thread: runs it until it is done or leaves, or drops it.
    /// `watches` has the descriptors that the lost reactor watches.
    pub(crate) fn go_on(self, watches: &Watches) {
        // The stall is over, so making a thread does not block. The rescue used up the standby
        // thread.
        crate::watchdog::prepare();
        let Some(Left { body, fate, mailbox, settings }) = self.0 else { return };
        // Removes descriptors that the call watched after the reactor was taken.
        watches.forget_task(body.id);
        let Body { id, task, .. } = *body;
        match fate {
            Fate::Ends => drop(mailbox.close()),
            Fate::Leaves => {
                drop(mailbox.close());
                task.leave();
            }
            Fate::GoesOn => match Run::new(settings.clone(), mailbox, None) {
                Ok(run) => drive_alone(run, id, task),
                Err(error) => (settings.on_panic)(&format!("it could not go on: {error}")),
            },
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // No code that may panic runs under the lock.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
