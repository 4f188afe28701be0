//! The loop of a reactor's thread.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};

use crate::context::{BELL, Watch, Watches};
use crate::mailbox::{Mailbox, Message};
use crate::polling::Polling;
use crate::share::Share;
use crate::sweep::Sweeps;
use crate::{Context, Event, Settings, Step, Task, TaskId};

/// Events taken from the kernel at a time.
const EVENTS_PER_WAIT: usize = 128;
/// Rounds of a single task that find nothing take less time than reading the clock: that is read
/// with every such number of them.
const ROUNDS_PER_READING: u32 = 8;
/// Time between two looks at the kernel while tasks are busy: a look costs a system call, a round
/// may cost far less. It is also how much later a busy reactor sees an event.
const LOOK_PERIOD: Duration = Duration::from_micros(20);

struct Slot {
    id: TaskId,
    task: Box<dyn Task>,
    watches: Vec<Watch>,
    events: Vec<Event>,
    deadline: Option<Instant>,
    /// How often it is asked whether it stirs.
    sweep: Option<Duration>,
    /// In `ready` already.
    queued: bool,
}

/// Tasks at places of their own, so that a step needs no search and moves nothing.
#[derive(Default)]
struct Tasks {
    places: Vec<Option<Slot>>,
    free: Vec<usize>,
    by_id: HashMap<TaskId, usize>,
}

impl Tasks {
    fn insert(&mut self, slot: Slot) -> usize {
        let id = slot.id;
        let place = self.free.pop().unwrap_or(self.places.len());
        if place == self.places.len() {
            self.places.push(None);
        }
        self.places[place] = Some(slot);
        self.by_id.insert(id, place);
        place
    }

    fn remove(&mut self, place: usize) -> Option<Slot> {
        let slot = self.places.get_mut(place)?.take()?;
        self.by_id.remove(&slot.id);
        self.free.push(place);
        Some(slot)
    }

    fn at(&mut self, place: usize) -> Option<&mut Slot> {
        self.places.get_mut(place)?.as_mut()
    }

    fn find(&mut self, id: TaskId) -> Option<(usize, &mut Slot)> {
        let place = *self.by_id.get(&id)?;
        Some((place, self.at(place)?))
    }

    fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }
}

pub(crate) struct Run {
    settings: Settings,
    mailbox: Arc<Mailbox>,
    watches: Watches,
    tasks: Tasks,
    /// Places of the tasks to be polled, each once.
    ready: VecDeque<usize>,
    deadlines: BTreeSet<(Instant, TaskId)>,
    polling: Polling,
    sweeps: Sweeps,
    share: Share,
    /// When there was work last.
    last_work: Instant,
    /// How long the thread slept, until work shows that the sleep is over.
    slept: Option<Duration>,
    had_task: bool,
    stopping: bool,
}

impl Run {
    pub(crate) fn new(settings: Settings, mailbox: Arc<Mailbox>) -> std::io::Result<Self> {
        let watches = Watches::new(mailbox.bell().as_fd())?;
        Ok(Self {
            polling: Polling::new(settings.poll_budget),
            sweeps: Sweeps::default(),
            share: Share::default(),
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
        })
    }

    pub(crate) fn run(mut self) {
        let mut last_look = self.last_work;
        let (mut now, mut rounds, mut worked) = (self.last_work, 0, false);
        while !self.stopping {
            if rounds == 0 || self.ready.len() != 1 {
                let before = std::mem::replace(&mut now, Instant::now());
                if std::mem::take(&mut worked) {
                    self.mailbox.worked(now.duration_since(before));
                }
                rounds = ROUNDS_PER_READING;
                self.expire(now);
            }
            rounds -= 1;
            if self.ready.is_empty() {
                self.wait(now);
                rounds = 0;
                continue;
            }
            if self.round(now) {
                self.worked(now);
                worked = true;
                rounds = 0;
            }
            if now.duration_since(last_look) >= LOOK_PERIOD {
                last_look = now;
                if self.look(Some(Duration::ZERO)) {
                    self.worked(now);
                }
            }
            if self.finished() {
                break;
            }
        }
        // Tasks that were sent and never started are dropped with the rest.
        drop(self.mailbox.close());
    }

    /// Looks for events; sleeps when there was no work for long enough.
    fn wait(&mut self, now: Instant) {
        if now.duration_since(self.last_work) < self.polling.budget() {
            if self.look(Some(Duration::ZERO)) {
                self.worked(now);
            }
            return;
        }
        let found = self.look(self.until_deadline(now));
        let woken = Instant::now();
        // Several sleeps until there is work, because of deadlines, are one.
        let slept = self.slept.unwrap_or_default() + woken.duration_since(now);
        self.slept = Some(slept);
        if found {
            self.worked(woken);
        }
    }

    /// There was work at `now`.
    fn worked(&mut self, now: Instant) {
        self.last_work = now;
        if let Some(slept) = self.slept.take() {
            self.polling.slept(slept);
        }
    }

    /// Whether the last task has ended and the reactor shall end with it.
    fn finished(&self) -> bool {
        self.settings.exit_when_empty
            && self.had_task
            && self.tasks.is_empty()
            && self.mailbox.close_if_empty()
    }

    fn until_deadline(&self, now: Instant) -> Option<Duration> {
        let next = self.deadlines.first().map(|(at, _)| *at).into_iter().chain(self.sweeps.next());
        next.min().map(|at| at.saturating_duration_since(now))
    }

    /// Makes tasks ready whose time has come.
    fn expire(&mut self, now: Instant) {
        while let Some((_, id)) = self.deadlines.first().copied().filter(|(at, _)| *at <= now) {
            self.deadlines.pop_first();
            if let Some((_, slot)) = self.tasks.find(id) {
                slot.deadline = None;
            }
            self.enqueue(id);
        }
        if self.sweeps.next().is_some_and(|at| at <= now) {
            self.sweep(now);
        }
    }

    /// Makes tasks ready that stir.
    fn sweep(&mut self, now: Instant) {
        let Self { sweeps, tasks, ready, settings, .. } = self;
        sweeps.run(now, |period, (id, place)| {
            let Some(slot) = tasks.at(place) else { return false };
            if slot.id != id || slot.sweep != Some(period) {
                return false;
            }
            if !slot.queued {
                let task = &mut slot.task;
                // A task that panics here has a step, in which it is dropped if it does so again.
                let stirs = std::panic::catch_unwind(AssertUnwindSafe(|| task.stirs()));
                slot.queued = report(&*settings.on_panic, stirs).unwrap_or(true);
                if slot.queued {
                    ready.push_back(place);
                }
            }
            true
        });
    }

    /// Asks the kernel for events, for at most `timeout` (None: for ever). Whether there were any.
    fn look(&mut self, timeout: Option<Duration>) -> bool {
        let timeout = timeout.map(|time| Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: time.subsec_nanos().into(),
        });
        let mut buffer = [MaybeUninit::<epoll::Event>::uninit(); EVENTS_PER_WAIT];
        let Ok((events, _)) = epoll::wait(&self.watches.epoll, &mut buffer, timeout.as_ref())
        else {
            return false; // interrupted by a signal
        };
        let found = !events.is_empty();
        for event in events.iter() {
            let (key, flags) = (event.data.u64(), event.flags);
            if key == BELL {
                self.read_mail();
            } else if let Some((id, token)) = self.watches.owner(key) {
                self.deliver(id, token, flags);
            }
        }
        found
    }

    fn deliver(&mut self, id: TaskId, token: u32, flags: epoll::EventFlags) {
        use epoll::EventFlags as F;
        let Some((_, slot)) = self.tasks.find(id) else { return };
        let broken = F::ERR | F::HUP;
        let event = Event {
            token,
            readable: flags.intersects(F::IN | F::RDHUP | broken),
            writable: flags.intersects(F::OUT | broken),
        };
        // A busy task is looked at several times between two of its steps.
        match slot.events.iter_mut().find(|old| old.token == token) {
            Some(old) => *old = event,
            None => slot.events.push(event),
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

    fn read_mail(&mut self) {
        for message in self.mailbox.take() {
            match message {
                Message::Add(id, task) => self.add(id, task),
                Message::Wake(id) => self.enqueue(id),
                Message::Stop => self.stopping = true,
            }
        }
    }

    fn add(&mut self, id: TaskId, task: Box<dyn Task>) {
        self.had_task = true;
        let (watches, events) = (Vec::new(), Vec::new());
        let mut slot =
            Slot { id, task, watches, events, deadline: None, sweep: None, queued: false };
        let now = Instant::now();
        let how =
            How { settings: &self.settings, poll_budget: self.polling.budget(), shared: false };
        let started =
            call(how, &mut self.watches, now, &mut slot, |task, context| task.start(context));
        let place = self.tasks.insert(slot);
        match started {
            Some(Ok(())) => return self.enqueue(id),
            Some(Err(error)) => (self.settings.on_panic)(&format!("it could not start: {error}")),
            None => {}
        }
        self.remove(place, drop);
        // Ends the loop's wait when the only task of an `exit_when_empty` reactor could not start.
        self.stopping |= self.finished();
    }

    /// One step for every task that was ready when the round began. Whether any of them had work.
    fn round(&mut self, now: Instant) -> bool {
        let mut worked = false;
        for _ in 0..self.ready.len() {
            let Some(place) = self.ready.pop_front() else { break };
            let Some(slot) = self.tasks.at(place) else { continue };
            slot.queued = false;
            let how = How {
                settings: &self.settings,
                poll_budget: self.polling.budget(),
                shared: self.share.is_shared(place, now),
            };
            let step = call(how, &mut self.watches, now, slot, |task, context| task.poll(context));
            slot.events.clear();
            let step = step.unwrap_or(Step::Done);
            worked |= matches!(step, Step::Busy | Step::Behind | Step::Done | Step::Leave);
            if step == Step::Busy {
                self.share.worked(place, now);
            }
            self.settle(place, step);
        }
        worked
    }

    fn settle(&mut self, place: usize, step: Step) {
        let Some(slot) = self.tasks.at(place) else { return };
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
            old.map(|old| self.deadlines.remove(&(old, id)));
            wanted.map(|new| self.deadlines.insert((new, id)));
        }
        match step {
            Step::Busy | Step::Behind | Step::Looking => {
                slot.queued = true;
                self.ready.push_back(place);
            }
            Step::Idle(_) | Step::Sweep(..) => {}
            Step::Done => self.remove(place, drop),
            Step::Leave => self.remove(place, |task| task.leave()),
        }
    }

    /// Forgets a task and its descriptors and hands the task to `last`.
    fn remove(&mut self, place: usize, last: impl FnOnce(Box<dyn Task>)) {
        if let Some(slot) = self.tasks.remove(place) {
            self.forget(slot, last);
        }
    }

    /// Forgets a task's descriptors and hands the task to `last`.
    fn forget(&mut self, slot: Slot, last: impl FnOnce(Box<dyn Task>)) {
        for watch in slot.watches {
            watch.forget(&mut self.watches);
        }
        let on_panic = Arc::clone(&self.settings.on_panic);
        // A destructor may panic as well as a step.
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| last(slot.task)));
        report(&*on_panic, outcome);
    }
}

/// What a call's context says of the reactor.
struct How<'a> {
    settings: &'a Settings,
    poll_budget: Duration,
    shared: bool,
}

/// Calls into a task. None: it panicked.
fn call<T>(
    How { settings, poll_budget, shared }: How<'_>,
    watches: &mut Watches,
    now: Instant,
    slot: &mut Slot,
    call: impl FnOnce(&mut dyn Task, &mut Context<'_>) -> T,
) -> Option<T> {
    let mut context = Context {
        id: slot.id,
        now,
        poll_budget,
        shared,
        events: &slot.events,
        own: &mut slot.watches,
        watches,
    };
    // The task is dropped after a panic and never looked at again, so nothing can observe a
    // broken invariant of its; the context's calls do not panic half-way.
    let task = &mut *slot.task;
    let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| call(task, &mut context)));
    report(&*settings.on_panic, outcome)
}

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
