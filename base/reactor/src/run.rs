//! The loop of a reactor's thread.
//!
//! [`Run`] is the reactor with all its state. A [`Worker`] is a thread that runs it, and parks it
//! in its seat for the length of each call into a task. A worker that does not find it there
//! afterwards has lost it: the call slept, and another thread went on with everything but the
//! called task (`seat`).
//!
//! Over 500 lines: the loop of a reactor, with all reasons for which it goes on, sleeps or ends.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use crate::context::{BELL, Watches};
use crate::mailbox::{Mailbox, Message};
use crate::polling::{EventChecks, Polling};
use crate::seat::{Lost, Seat};
use crate::share::Share;
use crate::sweep::{Due, Sweeps};
use crate::tasks::{Body, Slot, Tasks};
use crate::{Context, Event, Settings, Step, Task, TaskId, watchdog};

/// Maximum number of events taken from the kernel at a time.
const EVENTS_PER_WAIT: usize = 128;
/// Number of rounds of a single ready task without work per reading of the clock: such a round
/// takes less time than the reading.
const ROUNDS_PER_READING: u32 = 8;

/// A reactor.
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
    /// Tasks that are due for [`Task::stirs`].
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
    had_task: bool,
    stopping: bool,
    /// Set for the reactor of a task that another reactor left behind.
    alone: bool,
    /// Its drop tells the thread that stops the reactor that the reactor and its tasks are dropped:
    /// must be the last field.
    _ended: Option<Sender<()>>,
}

/// The reactor and a call's result, or `Err` if the call slept and another thread has the reactor
/// by now.
///
/// The functions below take the reactor by value and return it with their result, as in
/// `(run, found) = self.take_events(run, timeout)?`: so a thread that has lost its reactor cannot
/// use it, and `?` leads out of its loop.
type StillOurs<T> = Result<(Box<Run>, T), Box<Lost>>;

impl Run {
    pub(crate) fn new(
        settings: Arc<Settings>,
        mailbox: Arc<Mailbox>,
        ended: Option<Sender<()>>,
    ) -> std::io::Result<Box<Self>> {
        let watches = Arc::new(Watches::new(mailbox.bell().as_fd())?);
        Ok(Box::new(Self {
            polling: Polling::new(settings.poll_budget),
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

    /// Runs one task that was left behind, which keeps its number, and ends with it.
    pub(crate) fn run_alone(mut self: Box<Self>, id: TaskId, task: Box<dyn Task>) {
        self.alone = true;
        let worker = Worker::new(&self, None);
        if let Ok((run, ())) = worker.add(self, id, task) {
            worker.run(run);
        }
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
        let wanted = match step {
            Step::Idle(deadline) | Step::Sweep(_, deadline) => deadline,
            _ => None,
        };
        match step {
            Step::Sweep(period, _) if slot.sweep != Some(period) => {
                slot.sweep = Some(period);
                self.sweeps.add(period, (slot.id, place), Instant::now());
            }
            Step::Idle(_) => slot.sweep = None,
            _ => {}
        }
        if slot.deadline != wanted {
            let (id, old) = (slot.id, std::mem::replace(&mut slot.deadline, wanted));
            if let Some(old) = old {
                self.deadlines.remove(&(old, id));
            }
            if let Some(new) = wanted {
                self.deadlines.insert((new, id));
            }
        }
        match step {
            Step::Busy | Step::Behind | Step::Looking => {
                slot.queued = true;
                self.ready.push_back(place);
                None
            }
            Step::Idle(_) | Step::Sweep(..) => None,
            Step::Done | Step::Leave => self.tasks.remove(place),
        }
    }
}

/// A thread that runs a reactor.
pub(crate) struct Worker {
    seat: Option<Arc<Seat>>,
    settings: Arc<Settings>,
    watches: Arc<Watches>,
    alone: bool,
}

impl Worker {
    /// Returns the worker for the thread that will run `run`. Without a seat the reactor stalls
    /// while a call sleeps.
    pub(crate) fn new(run: &Run, seat: Option<Arc<Seat>>) -> Self {
        let (settings, watches) = (run.settings.clone(), run.watches.clone());
        Self { seat, settings, watches, alone: run.alone }
    }

    /// Runs the reactor until it ends. If another thread took it over, runs the task that was left
    /// behind here.
    pub(crate) fn run(self, run: Box<Run>) {
        match self.go_round(run) {
            // Drops tasks that were sent and never started.
            Ok((run, ())) => drop(run.mailbox.close()),
            Err(lost) => lost.go_on(&self.watches),
        }
    }

    /// Runs rounds of all ready tasks until the reactor ends.
    fn go_round(&self, mut run: Box<Run>) -> StillOurs<()> {
        let mut checks = EventChecks::new(run.last_work);
        let (mut now, mut rounds, mut worked) = (run.last_work, 0, false);
        // Messages that the reactor's previous thread left unhandled.
        (run, ()) = self.handle_mail(run)?;
        while !run.stopping {
            if rounds == 0 || run.ready.len() != 1 {
                let before = std::mem::replace(&mut now, Instant::now());
                if std::mem::take(&mut worked) {
                    run.mailbox.worked(now.duration_since(before));
                }
                rounds = ROUNDS_PER_READING;
                run.expire(now);
                if !run.due.is_empty() {
                    (run, ()) = self.sweep(run, now)?;
                }
            }
            rounds -= 1;
            if run.ready.is_empty() {
                (run, ()) = self.check_or_sleep(run, now)?;
                rounds = 0;
                continue;
            }
            let had_work;
            (run, had_work) = self.round(run, now)?;
            if had_work {
                run.worked(now);
                worked = true;
                rounds = 0;
            }
            if checks.is_due(now, had_work) {
                let found;
                (run, found) = self.take_events(run, Some(Duration::ZERO))?;
                checks.checked(now, found);
                // A check takes longer than the reading of the clock.
                rounds = 0;
                if found {
                    run.worked(now);
                }
            }
            if run.finished() {
                break;
            }
        }
        Ok((run, ()))
    }

    /// Checks for events while no task is ready, and sleeps if there was no work for the polling
    /// time.
    fn check_or_sleep(&self, run: Box<Run>, now: Instant) -> StillOurs<()> {
        if now.duration_since(run.last_work) < run.polling.budget() {
            let (mut run, found) = self.take_events(run, Some(Duration::ZERO))?;
            if found {
                run.worked(now);
            }
            return Ok((run, ()));
        }
        let until = run.until_deadline(now);
        let (mut run, found) = self.take_events(run, until)?;
        let woken = Instant::now();
        // Several sleeps until there is work, caused by deadlines, count as one.
        let slept = run.slept.unwrap_or_default() + woken.duration_since(now);
        run.slept = Some(slept);
        if found {
            run.worked(woken);
        }
        Ok((run, ()))
    }

    /// Takes kernel events, and delivers each to its task, whose turn comes in the next round.
    /// Waits for them for at most `timeout` (`None`: for ever; zero: not at all). Returns whether
    /// there were any. If the kernel cannot wait, the reactor stops.
    fn take_events(&self, mut run: Box<Run>, timeout: Option<Duration>) -> StillOurs<bool> {
        let sleeps = timeout != Some(Duration::ZERO);
        let timeout = timeout.map(|time| Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: time.subsec_nanos().into(),
        });
        let mut buffer = [MaybeUninit::<epoll::Event>::uninit(); EVENTS_PER_WAIT];
        let waited = epoll::wait(&self.watches.epoll, &mut buffer, timeout.as_ref());
        if sleeps && let Some(seat) = &self.seat {
            watchdog::wake(seat);
        }
        let events = match waited {
            Ok((events, _)) => events,
            // Interrupted by a signal.
            Err(Errno::INTR) => return Ok((run, false)),
            Err(error) => {
                // Without events the tasks would sleep for ever, and this thread never.
                (run.settings.on_panic)(&format!("all: it cannot wait for events: {error}"));
                run.stopping = true;
                return Ok((run, false));
            }
        };
        let found = !events.is_empty();
        let mut mail = false;
        for event in events.iter() {
            let (key, flags) = (event.data.u64(), event.flags);
            if key == BELL {
                mail = true;
            } else if let Some((id, token)) = self.watches.owner(key) {
                run.deliver(id, token, flags);
            }
        }
        if mail {
            (run, ()) = self.read_mail(run)?;
        }
        Ok((run, found))
    }

    fn read_mail(&self, mut run: Box<Run>) -> StillOurs<()> {
        run.mail.extend(run.mailbox.take());
        self.handle_mail(run)
    }

    fn handle_mail(&self, mut run: Box<Run>) -> StillOurs<()> {
        while let Some(message) = run.mail.pop_front() {
            match message {
                Message::Add(id, task) => (run, ()) = self.add(run, id, task)?,
                Message::Wake(id) => run.wake(id),
                Message::Stop => run.stopping = true,
            }
        }
        Ok((run, ()))
    }

    fn add(&self, mut run: Box<Run>, id: TaskId, task: Box<dyn Task>) -> StillOurs<()> {
        run.had_task = true;
        let place = run.tasks.insert(Slot::new(id, task));
        let now = Instant::now();
        let (mut run, started) =
            self.call(run, place, (now, false), |task, context| (task.start(context), None))?;
        match started {
            Some(Ok(())) => {
                run.enqueue(id);
                return Ok((run, ()));
            }
            Some(Err(error)) => (run.settings.on_panic)(&format!("it could not start: {error}")),
            None => {}
        }
        if let Some(slot) = run.tasks.remove(place) {
            (run, ()) = self.end(run, slot, drop)?;
        }
        // Ends the loop if the only task of an `exit_when_empty` reactor could not start.
        run.stopping |= run.finished();
        Ok((run, ()))
    }

    /// Calls [`Task::stirs`] of the tasks that are due, and makes those ready that return `true`.
    fn sweep(&self, mut run: Box<Run>, now: Instant) -> StillOurs<()> {
        while let Some(due @ (period, (id, place))) = run.due.pop_front() {
            let Some(slot) = run.tasks.at(place) else { continue };
            if slot.id != id || slot.sweep != Some(period) {
                continue;
            }
            run.sweeps.keep(due, now);
            if run.tasks.at(place).is_some_and(|slot| slot.queued) {
                continue;
            }
            // A task that panics here has a step; if it panics in that, too, it is dropped.
            let stirs;
            (run, stirs) = self.call(run, place, (now, false), |task, _| (task.stirs(), None))?;
            if stirs.unwrap_or(true) {
                run.enqueue(id);
            }
        }
        Ok((run, ()))
    }

    /// Polls every task that was ready when the round began. Returns whether any of them had work.
    fn round(&self, mut run: Box<Run>, now: Instant) -> StillOurs<bool> {
        let mut worked = false;
        for _ in 0..run.ready.len() {
            let Some(place) = run.ready.pop_front() else { break };
            let Some(slot) = run.tasks.at(place) else { continue };
            slot.queued = false;
            let shared = run.share.is_shared(place, now);
            let step;
            (run, step) = self.call(run, place, (now, shared), |task, context| {
                let step = task.poll(context);
                (step, Some(step))
            })?;
            let step = step.unwrap_or(Step::Done);
            worked |= matches!(step, Step::Busy | Step::Behind | Step::Done | Step::Leave);
            if step == Step::Busy {
                run.share.worked(place, now);
            }
            if let Some(slot) = run.apply(place, step) {
                (run, ()) = match step {
                    Step::Leave => self.end(run, slot, |task| task.leave()),
                    _ => self.end(run, slot, drop),
                }?;
            }
        }
        Ok((run, worked))
    }

    /// Calls into the task at `place`, with the reactor parked meanwhile. Returns `None` if the
    /// task panicked. `act` also returns the step if the call is one.
    fn call<T>(
        &self,
        mut run: Box<Run>,
        place: usize,
        (now, shared): (Instant, bool),
        act: impl FnOnce(&mut dyn Task, &mut Context<'_>) -> (T, Option<Step>),
    ) -> StillOurs<Option<T>> {
        let Some(mut body) = run.tasks.at(place).and_then(|slot| slot.body.take()) else {
            return Ok((run, None));
        };
        let poll_budget = run.polling.budget();
        run.called = Some(place);
        let parked = Seat::park(self.seat.as_deref(), run, body.id);
        let Body { id, task, watched, events } = &mut *body;
        let (id, alone, watches) = (*id, self.alone, &*self.watches);
        let mut context = Context { id, now, poll_budget, shared, alone, events, watched, watches };
        // A task that panics in `start` or a step is dropped, so nothing can observe its broken
        // invariants; after a panic in `stirs` only its own next step can. The context's calls do
        // not panic half-way.
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| act(&mut **task, &mut context)));
        let outcome = report(&*self.settings.on_panic, outcome);
        let Some(mut run) = parked.back() else {
            let panicked = outcome.is_none();
            let step = outcome.and_then(|(_, step)| step);
            let step = if panicked { Some(Step::Done) } else { step };
            return Err(Box::new(Lost::new(self.seat.as_deref(), &self.settings, body, step)));
        };
        run.called = None;
        if let Some((_, Some(_))) = outcome {
            body.events.clear();
        }
        if let Some(slot) = run.tasks.at(place) {
            slot.body = Some(body);
        }
        Ok((run, outcome.map(|(value, _)| value)))
    }

    /// Stops watching a task's descriptors and passes the task to `last`, with the reactor parked
    /// meanwhile.
    fn end(&self, run: Box<Run>, slot: Slot, last: impl FnOnce(Box<dyn Task>)) -> StillOurs<()> {
        let Some(body) = slot.body else { return Ok((run, ())) };
        for (_, key) in &body.watched {
            self.watches.forget(*key);
        }
        let parked = Seat::park(self.seat.as_deref(), run, body.id);
        // A destructor may panic, too.
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| last(body.task)));
        report(&*self.settings.on_panic, outcome);
        match parked.back() {
            Some(run) => Ok((run, ())),
            None => Err(Box::new(Lost::nothing())),
        }
    }
}

/// Reports a panic to `on_panic`. Returns `None` if there was one.
fn report<T>(on_panic: &dyn Fn(&str), outcome: std::thread::Result<T>) -> Option<T> {
    outcome
        .map_err(|panic| {
            let text = panic
                .downcast_ref::<&str>()
                .copied()
                .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
                .unwrap_or("(no text)");
            on_panic(&format!("it panicked: {text}"));
        })
        .ok()
}

/// Runs a reactor on this thread until it ends, or until it goes on in another thread because a
/// task sleeps in this one.
pub(crate) fn drive(run: Box<Run>) {
    // A reactor with a single task needs no seat: nothing else waits while that task sleeps.
    let seat = (!run.is_for_one_task()).then(Seat::taken);
    if let Some(seat) = &seat {
        watchdog::watch(seat);
    }
    Worker::new(&run, seat).run(run);
}

/// Pins this thread to `cpu`, if given.
pub(crate) fn pin(cpu: Option<usize>) -> std::io::Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}
