//! The loop of a reactor's thread.
//!
//! A [`Worker`] is a thread that runs a reactor, and parks it in its seat for the length of each
//! call into a task. A worker that does not find it there afterwards has lost it: the call slept,
//! and another thread went on with everything but the called task (`seat`).
//!
//! [`Worker::go_round`] is the loop. All calls into tasks go through [`Worker::call`], which tells
//! the two cases apart, but for the last call ([`Worker::end`]).

use std::mem::MaybeUninit;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use super::Run;
use crate::context::{BELL, Watches};
use crate::mailbox::Message;
use crate::polling::EventChecks;
use crate::seat::{Fate, Lost, Seat};
use crate::tasks::{Body, Slot};
use crate::{Context, Settings, Step, Task, TaskId, watchdog};

/// Maximum number of events taken from the kernel at a time.
const EVENTS_PER_WAIT: usize = 128;
/// Number of rounds of a single ready task without work per reading of the clock: such a round
/// takes less time than the reading.
const ROUNDS_PER_READING: u32 = 8;

/// The reactor and a call's result, or `Err` if the call slept and another thread has the reactor
/// by now.
///
/// The functions below take the reactor by value and return it with their result, as in
/// `(run, found) = self.take_events(run, timeout)?`: so a thread that has lost its reactor cannot
/// use it, and `?` leads out of its loop.
type StillOurs<T> = Result<(Box<Run>, T), Box<Lost>>;

/// A call to make into a task.
#[derive(Clone, Copy)]
struct CallSite {
    /// Place of the task.
    place: usize,
    now: Instant,
    /// Value of [`Context::is_shared`].
    shared: bool,
}

/// The time as the loop knows it, and what is due by it.
struct Pace {
    /// Time of the last reading of the clock.
    now: Instant,
    /// Number of rounds until the next reading.
    rounds_left: u32,
    /// Set if there was work since the last reading.
    has_worked: bool,
    checks: EventChecks,
}

impl Pace {
    /// Begins at `now`, with the reading of the clock due.
    fn new(now: Instant, self_polling: bool) -> Self {
        let checks = EventChecks::new(now, self_polling);
        Self { now, rounds_left: 0, has_worked: false, checks }
    }

    /// Returns whether to read the clock before a round of `ready` tasks.
    fn is_reading_due(&self, ready: usize) -> bool {
        self.rounds_left == 0 || ready != 1
    }

    /// Reads the clock. Returns the time since the last reading if there was work meanwhile.
    fn read_clock(&mut self) -> Option<Duration> {
        let before = std::mem::replace(&mut self.now, Instant::now());
        self.rounds_left = ROUNDS_PER_READING;
        std::mem::take(&mut self.has_worked).then(|| self.now.duration_since(before))
    }

    /// Notes a round with work, which takes longer than the reading of the clock.
    fn worked(&mut self) {
        self.has_worked = true;
        self.rounds_left = 0;
    }
}

/// A thread that runs a reactor.
struct Worker {
    seat: Option<Arc<Seat>>,
    settings: Arc<Settings>,
    watches: Arc<Watches>,
    alone: bool,
}

impl Worker {
    /// Returns the worker for the thread that will run `run`. Without a seat the reactor stalls
    /// while a call sleeps.
    fn new(run: &Run, seat: Option<Arc<Seat>>) -> Self {
        let (settings, watches) = (run.settings.clone(), run.watches.clone());
        Self { seat, settings, watches, alone: run.alone }
    }

    /// Runs the reactor until it ends. If another thread took it over, runs the task that was left
    /// behind here.
    fn run(self, run: Box<Run>) {
        match self.go_round(run) {
            // Drops tasks that were sent and never started.
            Ok((run, ())) => drop(run.mailbox.close()),
            Err(lost) => lost.go_on(&self.watches),
        }
    }

    /// Runs rounds of all ready tasks until the reactor ends.
    fn go_round(&self, mut run: Box<Run>) -> StillOurs<()> {
        let mut pace = Pace::new(run.last_work, self.settings.self_polling);
        // Messages that the reactor's previous thread left unhandled.
        (run, ()) = self.handle_mail(run)?;
        while !run.stopping {
            if pace.is_reading_due(run.ready.len()) {
                if let Some(busy) = pace.read_clock() {
                    run.mailbox.worked(busy);
                }
                run.expire(pace.now);
                if !run.due.is_empty() {
                    (run, ()) = self.sweep(run, pace.now)?;
                }
            }
            pace.rounds_left -= 1;
            if run.ready.is_empty() {
                (run, ()) = self.check_or_sleep(run, pace.now)?;
                pace.rounds_left = 0;
                continue;
            }
            let had_work;
            (run, had_work) = self.round(run, pace.now)?;
            if had_work {
                run.worked(pace.now);
                pace.worked();
            }
            if pace.checks.is_due(pace.now, had_work) {
                (run, ()) = self.check(run, &mut pace)?;
            }
            if run.finished() {
                break;
            }
        }
        Ok((run, ()))
    }

    /// Checks for events while tasks are ready.
    fn check(&self, run: Box<Run>, pace: &mut Pace) -> StillOurs<()> {
        let (mut run, found) = self.take_events(run, Some(Duration::ZERO))?;
        pace.checks.checked(pace.now, found);
        // A check takes longer than the reading of the clock.
        pace.rounds_left = 0;
        if found {
            run.worked(pace.now);
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
    /// Waits for them for at most `timeout` (`None`: for ever; zero: not at all). Returns whether a
    /// descriptor of a task was ready. Messages of other threads and bells do not count, as no
    /// other follows them as a rule: what their tasks do is work if the tasks say so. If the kernel
    /// cannot wait, the reactor stops.
    fn take_events(&self, mut run: Box<Run>, timeout: Option<Duration>) -> StillOurs<bool> {
        let mut buffer = [MaybeUninit::<epoll::Event>::uninit(); EVENTS_PER_WAIT];
        let waited = epoll::wait(&self.watches.epoll, &mut buffer, timespec(timeout).as_ref());
        let slept = timeout != Some(Duration::ZERO);
        if slept && let Some(seat) = &self.seat {
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
        let (mut mail, mut found) = (false, false);
        for event in events.iter() {
            let (key, flags) = (event.data.u64(), event.flags);
            if key == BELL {
                mail = true;
            } else if let Some((id, token, is_bell)) = self.watches.owner(key) {
                found |= !is_bell;
                run.deliver(id, token, flags);
            }
        }
        if mail {
            run.mail.extend(run.mailbox.take());
            (run, ()) = self.handle_mail(run)?;
        }
        Ok((run, found))
    }

    /// Handles all messages that were taken from the mailbox.
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

    /// Adds a task and starts it.
    fn add(&self, mut run: Box<Run>, id: TaskId, task: Box<dyn Task>) -> StillOurs<()> {
        run.had_task = true;
        let place = run.tasks.insert(Slot::new(id, task));
        let site = CallSite { place, now: Instant::now(), shared: false };
        let (mut run, started) =
            self.call(run, site, |task, context| task.start(context), |_| Fate::GoesOn)?;
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
            let site = CallSite { place, now, shared: false };
            let stirs;
            (run, stirs) = self.call(run, site, |task, _| task.stirs(), |_| Fate::GoesOn)?;
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
            let site = CallSite { place, now, shared: run.share.is_shared(place, now) };
            let step;
            (run, step) = self.call(run, site, poll, |step| Fate::after(*step))?;
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

    /// Calls into the task at a site by `act`, with the reactor parked meanwhile. Returns `None` if
    /// the task panicked. If another thread took the reactor over, `fate` turns the call's result
    /// into what becomes of the task here; a task that panicked ends.
    fn call<T>(
        &self,
        mut run: Box<Run>,
        site: CallSite,
        act: impl FnOnce(&mut dyn Task, &mut Context<'_>) -> T,
        fate: impl FnOnce(&T) -> Fate,
    ) -> StillOurs<Option<T>> {
        let CallSite { place, now, shared } = site;
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
            let fate = outcome.as_ref().map_or(Fate::Ends, fate);
            return Err(Box::new(Lost::new(self.seat.as_deref(), &self.settings, body, fate)));
        };
        run.called = None;
        if let Some(slot) = run.tasks.at(place) {
            slot.body = Some(body);
        }
        Ok((run, outcome))
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

/// Has the task take its step.
fn poll(task: &mut dyn Task, context: &mut Context<'_>) -> Step {
    let step = task.poll(context);
    context.events.clear();
    step
}

/// Returns `time` as the kernel takes it.
fn timespec(time: Option<Duration>) -> Option<Timespec> {
    time.map(|time| Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    })
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

/// Runs one task that was left behind, which keeps its number, in the new reactor `run`, which ends
/// with it.
pub(crate) fn drive_alone(mut run: Box<Run>, id: TaskId, task: Box<dyn Task>) {
    run.alone = true;
    let worker = Worker::new(&run, None);
    if let Ok((run, ())) = worker.add(run, id, task) {
        worker.run(run);
    }
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

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use super::*;
    use crate::Interest;
    use crate::mailbox::Mailbox;

    /// A task that waits for a descriptor.
    struct Waits(OwnedFd, Interest);

    impl Task for Waits {
        fn start(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
            context.watch(self.0.as_fd(), self.1, 7)
        }

        fn poll(&mut self, _: &mut Context<'_>) -> Step {
            Step::Idle(None)
        }
    }

    /// Takes the events that there are. Returns whether there was one of a task.
    fn look(worker: &Worker, run: Box<Run>) -> (Box<Run>, bool) {
        let Ok(looked) = worker.take_events(run, Some(Duration::ZERO)) else {
            panic!("the reactor is lost")
        };
        looked
    }

    /// A reactor that polled after each message would do so in vain: a VF that is taken is one.
    #[test]
    fn a_message_is_no_work_by_itself_and_a_ready_descriptor_is() {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let run = Run::new(Arc::default(), Arc::clone(&mailbox), None).unwrap();
        let worker = Worker::new(&run, None);
        let [(reader, writer), (bell, ringer)] = [(); 2].map(|()| rustix::pipe::pipe().unwrap());
        let (id, of_bell) = (TaskId(1), TaskId(2));
        for (id, waits) in
            [(id, Waits(reader, Interest::Read)), (of_bell, Waits(bell, Interest::Bell))]
        {
            mailbox.push(Message::Add(id, Box::new(waits))).unwrap();
        }
        let (run, found) = look(&worker, run);
        assert_eq!((found, run.ready.len()), (false, 2));
        rustix::io::write(&ringer, b"x").unwrap();
        let (mut run, found) = look(&worker, run);
        let rung = run.tasks.find(of_bell).and_then(|(_, slot)| slot.body.as_ref());
        assert!(!found && rung.is_some_and(|body| body.events.len() == 1));
        mailbox.push(Message::Wake(id)).unwrap();
        let (run, found) = look(&worker, run);
        assert!(!found);
        rustix::io::write(&writer, b"x").unwrap();
        mailbox.push(Message::Wake(id)).unwrap();
        let (_run, found) = look(&worker, run);
        assert!(found);
    }
}
