//! A reactor's state, without the thread that runs it.
//!
//! - [`Run`], here, has the tasks and the queues that say which of them have a step next. Nothing
//!   here calls into a task.
//! - `worker` is the thread: it waits for events, and calls the tasks.
//! - `seat` holds the [`Run`] during each such call, so that another thread can go on with it if
//!   the call sleeps.

mod worker;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::event::epoll;

pub(crate) use self::worker::{drive, drive_alone, pin};
use crate::context::Watches;
use crate::mailbox::{Mailbox, Message};
use crate::polling::{self, Polling};
use crate::share::Share;
use crate::sweep::{Due, Sweeps};
use crate::tasks::{Slot, Tasks};
use crate::{Event, Settings, Step, TaskId};

/// A reactor: its tasks, and all that its thread keeps between two calls into them.
pub(crate) struct Run {
    pub(crate) settings: Arc<Settings>,
    mailbox: Arc<Mailbox>,
    watches: Arc<Watches>,
    tasks: Tasks,
    /// Places of the ready tasks, each once.
    ready: VecDeque<usize>,
    deadlines: BTreeSet<(Instant, TaskId)>,
    polling: Polling,
    sweeps: Sweeps,
    /// Tasks that are due for [`Task::stirs`](crate::Task::stirs).
    due: VecDeque<Due>,
    /// Messages taken from the mailbox and not handled yet.
    mail: VecDeque<Message>,
    share: Share,
    /// Mailboxes of tasks that were left behind on threads of their own, for messages that still
    /// come here.
    elsewhere: HashMap<TaskId, Arc<Mailbox>>,
    /// Place of the task that is being called.
    called: Option<usize>,
    /// Time of the last work.
    last_work: Instant,
    /// Time slept since the last work, over several sleeps; `None` if the thread has not slept.
    slept: Option<Duration>,
    /// Set once a task was added: a reactor that ends with its last task waits for its first one.
    had_task: bool,
    /// Set when the loop is to end after the present round.
    stopping: bool,
    /// Set for the reactor of a task that another reactor left behind.
    alone: bool,
    /// Its drop tells the thread that stops the reactor that the reactor and its tasks are dropped:
    /// must be the last field.
    _ended: Option<Sender<()>>,
}

impl Run {
    pub(crate) fn new(
        settings: Arc<Settings>,
        mailbox: Arc<Mailbox>,
        ended: Option<Sender<()>>,
    ) -> std::io::Result<Box<Self>> {
        let watches = Arc::new(Watches::new(mailbox.bell().as_fd())?);
        let most = polling::budget(settings.poll_budget, polling::has_one_processor());
        Ok(Box::new(Self {
            polling: Polling::new(most),
            sweeps: Sweeps::default(),
            due: VecDeque::new(),
            mail: VecDeque::new(),
            share: Share::default(),
            elsewhere: HashMap::new(),
            called: None,
            last_work: Instant::now(),
            slept: None,
            settings,
            mailbox,
            watches,
            tasks: Tasks::default(),
            ready: VecDeque::new(),
            deadlines: BTreeSet::new(),
            had_task: false,
            stopping: false,
            alone: false,
            _ended: ended,
        }))
    }

    /// Removes the task that is being called. Its descriptors are no longer watched, and messages
    /// for it are forwarded to `mailbox` from now on. Returns the task's number.
    pub(crate) fn abandon_called(&mut self, mailbox: Arc<Mailbox>) -> Option<TaskId> {
        let slot = self.tasks.remove(self.called.take()?)?;
        if let Some(deadline) = slot.deadline {
            self.deadlines.remove(&(deadline, slot.id));
        }
        self.watches.forget_task(slot.id);
        self.elsewhere.retain(|_, mailbox| !mailbox.is_closed());
        self.elsewhere.insert(slot.id, mailbox);
        Some(slot.id)
    }

    /// Returns whether the reactor is meant for a single task, so that a call that sleeps delays no
    /// other.
    pub(crate) fn is_for_one_task(&self) -> bool {
        self.settings.exit_when_empty
    }

    /// Notes that there was work at `now`.
    fn worked(&mut self, now: Instant) {
        self.last_work = now;
        if let Some(slept) = self.slept.take() {
            self.polling.slept(slept);
        }
    }

    /// Returns whether the reactor ends because its last task has ended.
    fn finished(&self) -> bool {
        (self.settings.exit_when_empty || self.alone)
            && self.had_task
            && self.tasks.is_empty()
            && self.mailbox.close_if_empty()
    }

    /// Returns the time until the next deadline or sweep. Returns `None` if none is set.
    fn until_deadline(&self, now: Instant) -> Option<Duration> {
        let next = self.deadlines.first().map(|(at, _)| *at).into_iter().chain(self.sweeps.next());
        next.min().map(|at| at.saturating_duration_since(now))
    }

    /// Makes tasks ready whose deadline has come, and takes the tasks that are due for a sweep.
    fn expire(&mut self, now: Instant) {
        while let Some((_, id)) = self.deadlines.first().copied().filter(|(at, _)| *at <= now) {
            self.deadlines.pop_first();
            if let Some((_, slot)) = self.tasks.find(id) {
                slot.deadline = None;
            }
            self.enqueue(id);
        }
        if self.sweeps.next().is_some_and(|at| at <= now) {
            self.sweeps.take_due(now, &mut self.due);
        }
    }

    /// Notes an event of a task's descriptor, and makes the task ready.
    fn deliver(&mut self, id: TaskId, token: u32, flags: epoll::EventFlags) {
        use epoll::EventFlags as F;
        let Some((_, slot)) = self.tasks.find(id) else { return };
        let Some(body) = &mut slot.body else { return };
        let broken = F::ERR | F::HUP;
        let event = Event {
            token,
            readable: flags.intersects(F::IN | F::RDHUP | broken),
            writable: flags.intersects(F::OUT | broken),
        };
        // Events of a busy task may be reported several times between two of its steps.
        match body.events.iter_mut().find(|old| old.token == token) {
            Some(old) => *old = event,
            None => body.events.push(event),
        }
        self.enqueue(id);
    }

    /// Makes a task ready, unless it is.
    fn enqueue(&mut self, id: TaskId) {
        if let Some((place, slot)) = self.tasks.find(id)
            && !slot.queued
        {
            slot.queued = true;
            self.ready.push_back(place);
        }
    }

    /// Wakes a task of this reactor, or one that was left behind on a thread of its own.
    fn wake(&mut self, id: TaskId) {
        if let Some(mailbox) = self.elsewhere.get(&id)
            && mailbox.push(Message::Wake(id)).is_err()
        {
            self.elsewhere.remove(&id);
        }
        self.enqueue(id);
    }

    /// Applies the request `step` of the task at `place`. Returns the task if it is done or leaves.
    fn apply(&mut self, place: usize, step: Step) -> Option<Slot> {
        let slot = self.tasks.at(place)?;
        let deadline = match step {
            Step::Idle(deadline) | Step::Sweep(_, deadline) => deadline,
            _ => None,
        };
        set_deadline(&mut self.deadlines, slot, deadline);
        match step {
            Step::Busy | Step::Behind | Step::Looking => {
                slot.queued = true;
                self.ready.push_back(place);
            }
            Step::Idle(_) => slot.sweep = None,
            Step::Sweep(period, _) => {
                if slot.sweep != Some(period) {
                    slot.sweep = Some(period);
                    self.sweeps.add(period, (slot.id, place), Instant::now());
                }
            }
            Step::Done | Step::Leave => return self.tasks.remove(place),
        }
        None
    }
}

/// Changes the deadline of the task in `slot` to `wanted`, or removes it (`None`).
fn set_deadline(
    deadlines: &mut BTreeSet<(Instant, TaskId)>,
    slot: &mut Slot,
    wanted: Option<Instant>,
) {
    if slot.deadline == wanted {
        return;
    }
    if let Some(old) = std::mem::replace(&mut slot.deadline, wanted) {
        deadlines.remove(&(old, slot.id));
    }
    if let Some(new) = wanted {
        deadlines.insert((new, slot.id));
    }
}
