//! A switch on a reactor: when its ports have their turns, and when it sleeps.
//!
//! A port is *awake*, which means that it has turns, or *armed*: it tells when there is something. A port
//! that has found nothing for as long as the reactor polls before it sleeps is armed, each for itself,
//! so a thousand silent ports cost their neighbour nothing. When no port is awake the task is idle.
//!
//! # No wake-up is lost
//! [`Port::arm`] looks once more after it has asked to be told, and a port in which it found something
//! stays awake. What comes after that is told: by the port's descriptor, which epoll reports for as long
//! as it is readable, or through its [`Waker`], whose message stays in the inbox until the task has read
//! it; the inbox is emptied at the beginning of every step, and whoever posts to it wakes the task after.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use slipway_reactor::{Context, Interest, Step, Stopped, Task, TaskId};

use crate::switch::Turn;
use crate::{BURST, BadConfig, Port, PortConfig, PortIndex, Switch};

/// Turns of ports in one step of the task: its neighbours on the reactor wait meanwhile.
const TURNS: usize = 4;
/// Frames of a turn while neighbours wait who have little to do.
const SHORT: usize = 16;
/// Time between two looks for stations that were silent for long.
const AGEING: Duration = Duration::from_secs(30);

type Job = Box<dyn FnOnce(&mut Owner<'_, '_>) + Send>;

enum Message {
    Wake(PortIndex),
    Job(Job),
    Stop,
}

#[derive(Default)]
struct Inbox {
    /// Whether messages wait. Written under the lock only.
    waiting: AtomicBool,
    post: Mutex<Post>,
}

#[derive(Default)]
struct Post {
    messages: Vec<Message>,
    closed: bool,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Post> {
        // The vector is changed in single calls: a panic leaves it whole.
        self.post.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, message: Message) -> Result<(), Stopped> {
        let mut post = self.lock();
        if post.closed {
            return Err(Stopped);
        }
        post.messages.push(message);
        self.waiting.store(true, Ordering::Release);
        Ok(())
    }

    fn take(&self) -> Vec<Message> {
        let mut post = self.lock();
        self.waiting.store(false, Ordering::Relaxed);
        std::mem::take(&mut post.messages)
    }
}

/// How other threads reach a switch. Cheap to clone; outlives it harmlessly.
#[derive(Clone)]
pub struct Handle {
    inbox: Arc<Inbox>,
    reactor: slipway_reactor::Handle,
    task: TaskId,
}

impl Handle {
    /// Has the switch's thread run `job` soon. Jobs run in the order in which they were given; they are
    /// short and wait for nothing. An answer goes wherever the job sends it.
    ///
    /// # Errors
    /// [`Stopped`]: the switch is gone, and so is the job.
    pub fn run(
        &self,
        job: impl FnOnce(&mut Owner<'_, '_>) + Send + 'static,
    ) -> Result<(), Stopped> {
        self.post(Message::Job(Box::new(job)))
    }

    /// Runs `job` as [`Handle::run`] does and waits for what it returns.
    ///
    /// # Errors
    /// [`Stopped`].
    pub fn call<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Owner<'_, '_>) -> R + Send + 'static,
    ) -> Result<R, Stopped> {
        let (answer, result) = std::sync::mpsc::sync_channel(1);
        self.run(move |owner| drop(answer.send(job(owner))))?;
        result.recv().map_err(|_| Stopped)
    }

    /// Ends the switch and drops its ports.
    pub fn stop(&self) {
        // A switch that is gone has ended.
        let _ = self.post(Message::Stop);
    }

    fn post(&self, message: Message) -> Result<(), Stopped> {
        self.inbox.push(message)?;
        self.reactor.wake(self.task)
    }
}

/// Tells the switch that one of its ports has something; see [`Port::attached`]. Any thread may.
#[derive(Clone)]
pub struct Waker {
    handle: Handle,
    port: PortIndex,
}

impl Waker {
    /// The port gets a turn.
    pub fn wake(&self) {
        // A switch that is gone needs no telling.
        let _ = self.handle.post(Message::Wake(self.port));
    }
}

/// The switch as a job sees it, and what its task has to know of its ports.
pub struct Owner<'a, 'c> {
    running: &'a mut Running,
    context: &'a mut Context<'c>,
}

impl Owner<'_, '_> {
    /// The switch. Ports come, go and change through [`Owner::attach`], [`Owner::detach`] and
    /// [`Owner::configure`], so that the task knows of them.
    pub fn switch(&mut self) -> &mut Switch {
        &mut self.running.switch
    }

    /// Attaches a port.
    ///
    /// # Errors
    /// [`BadConfig`]. The port is dropped.
    pub fn attach(
        &mut self,
        port: Box<dyn Port>,
        config: PortConfig,
    ) -> Result<PortIndex, BadConfig> {
        let index = self.running.switch.attach(port, config).map_err(|(error, _)| error)?;
        self.running.begin(index, self.context);
        Ok(index)
    }

    /// Puts another port in a port's place, as [`Switch::replace`] does. Gives the former one.
    ///
    /// # Errors
    /// [`BadConfig::NoSuchPort`]. The new port is dropped.
    pub fn replace(
        &mut self,
        index: PortIndex,
        port: Box<dyn Port>,
    ) -> Result<Box<dyn Port>, BadConfig> {
        let former = self.running.switch.replace(index, port).map_err(|(error, _)| error)?;
        self.forget(index);
        self.running.begin(index, self.context);
        Ok(former)
    }

    /// Changes a port's settings. One that its former rate held back sends at once.
    ///
    /// # Errors
    /// [`BadConfig`]; it then has its former ones.
    pub fn configure(&mut self, index: PortIndex, config: PortConfig) -> Result<(), BadConfig> {
        self.running.switch.configure(index, config)?;
        let now = self.context.now();
        let held = self.running.held.iter_mut().filter(|(_, held)| *held == index);
        held.for_each(|(until, _)| *until = now);
        Ok(())
    }

    /// Detaches a port.
    ///
    /// # Errors
    /// [`BadConfig::NoSuchPort`].
    pub fn detach(&mut self, index: PortIndex) -> Result<Box<dyn Port>, BadConfig> {
        let port = self.running.switch.detach(index)?;
        self.forget(index);
        Ok(port)
    }

    fn forget(&mut self, index: PortIndex) {
        self.context.unwatch(u32::from(index));
        self.running.places[usize::from(index)] = Place::default();
        self.running.awake.retain(|awake| *awake != index);
        self.running.held.retain(|(_, held)| *held != index);
    }
}

/// What the task knows of a port.
#[derive(Clone, Copy, Default)]
struct Place {
    awake: bool,
    /// It has a descriptor that is watched.
    watched: bool,
    /// Its rate does not let it send at present.
    held: bool,
    /// When it had frames last.
    last: Option<Instant>,
}

struct Running {
    switch: Switch,
    places: Vec<Place>,
    awake: VecDeque<PortIndex>,
    /// Ports that may not send before a time.
    held: Vec<(Instant, PortIndex)>,
    handle: Handle,
    /// The switch's clock begins here.
    begin: Instant,
    aged: Instant,
}

/// A switch as a task of a reactor.
struct SwitchTask {
    /// Until the first step.
    fresh: Option<Switch>,
    running: Option<Running>,
    inbox: Arc<Inbox>,
    reactor: slipway_reactor::Handle,
}

/// Gives `switch` to a reactor; it stays there until [`Handle::stop`], or until the reactor ends.
///
/// # Errors
/// [`Stopped`]: the reactor has ended.
pub fn spawn(reactor: &slipway_reactor::Handle, switch: Switch) -> Result<Handle, Stopped> {
    let inbox = Arc::new(Inbox::default());
    let task = SwitchTask {
        fresh: Some(switch),
        running: None,
        inbox: Arc::clone(&inbox),
        reactor: reactor.clone(),
    };
    let task = reactor.add(Box::new(task))?;
    Ok(Handle { inbox, reactor: reactor.clone(), task })
}

impl Task for SwitchTask {
    fn start(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        if let Some(running) = &mut self.running {
            // It slept in a step and has a thread of its own now.
            running.watch_again(context);
            return Ok(());
        }
        let (inbox, reactor) = (Arc::clone(&self.inbox), self.reactor.clone());
        let handle = Handle { inbox, reactor, task: context.id() };
        self.running = self.fresh.take().map(|switch| Running::new(switch, handle, context.now()));
        Ok(())
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Step {
        let Some(running) = &mut self.running else { return Step::Done };
        if self.inbox.waiting.load(Ordering::Relaxed) && !running.read(self.inbox.take(), context) {
            return Step::Done;
        }
        running.step(context)
    }
}

impl Drop for SwitchTask {
    fn drop(&mut self) {
        let messages = {
            let mut post = self.inbox.lock();
            post.closed = true;
            std::mem::take(&mut post.messages)
        };
        // Who waits for an answer finds no port any more.
        (self.fresh, self.running) = (None, None);
        // Outside the lock: whoever waits for an answer may post again.
        drop(messages);
    }
}

impl Running {
    fn new(switch: Switch, handle: Handle, now: Instant) -> Self {
        let (places, awake, held) = (Vec::new(), VecDeque::new(), Vec::new());
        Self { switch, places, awake, held, handle, begin: now, aged: now }
    }

    /// False: the switch is to end.
    fn read(&mut self, messages: Vec<Message>, context: &mut Context<'_>) -> bool {
        for message in messages {
            match message {
                Message::Wake(port) => self.wake(port),
                Message::Job(job) => job(&mut Owner { running: self, context }),
                Message::Stop => return false,
            }
        }
        true
    }

    /// A port is new: it learns how to wake the switch, and has its first turn.
    fn begin(&mut self, index: PortIndex, context: &mut Context<'_>) {
        let places = self.places.len().max(usize::from(index) + 1);
        self.places.resize(places, Place::default());
        let Some(port) = self.switch.port_mut(index) else { return };
        port.attached(Waker { handle: self.handle.clone(), port: index });
        let watched = port.descriptor().is_some_and(|descriptor| {
            context.watch(descriptor, Interest::Read, u32::from(index)).is_ok()
        });
        self.places[usize::from(index)] = Place { watched, ..Place::default() };
        self.wake(index);
    }

    /// Watches all ports' descriptors anew, and has each port have a turn.
    fn watch_again(&mut self, context: &mut Context<'_>) {
        for at in 0..self.places.len() {
            let index = at as PortIndex;
            let interest = if self.places[at].held { Interest::None } else { Interest::Read };
            let descriptor = self.switch.port_mut(index).and_then(|port| port.descriptor());
            self.places[at].watched = descriptor.is_some_and(|descriptor| {
                context.watch(descriptor, interest, u32::from(index)).is_ok()
            });
            self.wake(index);
        }
    }

    fn wake(&mut self, index: PortIndex) {
        let Some(place) = self.places.get_mut(usize::from(index)) else { return };
        if place.held {
            self.switch.attend(index);
        } else if !place.awake {
            place.awake = true;
            place.last = None;
            self.awake.push_back(index);
        }
    }

    fn step(&mut self, context: &mut Context<'_>) -> Step {
        let now = context.now();
        for event in context.events() {
            // Tokens are ports' numbers.
            self.wake(event.token as PortIndex);
        }
        self.resume(now, context);
        self.expire(now);
        let limit = if context.is_shared() { SHORT } else { BURST };
        let (mut worked, mut behind) = (false, false);
        for _ in 0..self.awake.len().min(TURNS) {
            let Some(index) = self.awake.pop_front() else { break };
            match self.switch.turn(index, limit, now - self.begin) {
                Turn::Idle => self.rest(index, context),
                Turn::Held(until) => self.hold(index, self.begin + until, context),
                done => {
                    (worked, behind) = (true, behind || done == Turn::More);
                    self.places[usize::from(index)].last = Some(now);
                    self.awake.push_back(index);
                }
            }
        }
        match (self.awake.is_empty(), worked) {
            (true, _) => Step::Idle(self.next()),
            (false, true) if behind => Step::Behind,
            (false, true) => Step::Busy,
            (false, false) => Step::Looking,
        }
    }

    /// A port found nothing: it stays awake for a while, or is armed.
    fn rest(&mut self, index: PortIndex, context: &mut Context<'_>) {
        self.forget_descriptor(index, context);
        let place = &mut self.places[usize::from(index)];
        let last = *place.last.get_or_insert(context.now());
        if context.now() - last < context.poll_budget() || self.switch.arm(index) {
            self.awake.push_back(index);
        } else {
            self.places[usize::from(index)].awake = false;
        }
    }

    /// A port that has no descriptor any more is not woken by it.
    fn forget_descriptor(&mut self, index: PortIndex, context: &mut Context<'_>) {
        let place = &mut self.places[usize::from(index)];
        if place.watched
            && self.switch.port_mut(index).is_some_and(|port| port.descriptor().is_none())
        {
            place.watched = false;
            context.unwatch(u32::from(index));
        }
    }

    /// A port may not send before `until`: until then its descriptor is nobody's business.
    fn hold(&mut self, index: PortIndex, until: Instant, context: &mut Context<'_>) {
        let place = &mut self.places[usize::from(index)];
        (place.awake, place.held) = (false, true);
        self.held.push((until, index));
        if place.watched {
            let _ = context.rewatch(u32::from(index), Interest::None);
        }
    }

    /// Has ports do what they do by time; those that have frames from their peers are woken.
    fn expire(&mut self, now: Instant) {
        for at in 0..self.switch.timed().len() {
            let index = self.switch.timed()[at];
            let due = self.due(index);
            if due.is_some_and(|due| due <= now) && self.switch.tick(index, now - self.begin) {
                self.wake(index);
            }
        }
    }

    /// When a port does something by time. One that may not send has no frame from its peer before it may.
    fn due(&mut self, index: PortIndex) -> Option<Instant> {
        let inward = !self.places.get(usize::from(index)).is_some_and(|place| place.held);
        self.switch.due(index, inward).map(|due| self.begin + due)
    }

    /// When something is to be done that nobody wakes the switch for.
    fn next(&mut self) -> Option<Instant> {
        let held = self.held.iter().map(|(until, _)| *until).min();
        let due = (0..self.switch.timed().len()).filter_map(|at| self.due(self.switch.timed()[at]));
        due.min().into_iter().chain(held).min()
    }

    /// Wakes the ports that may send again, and forgets silent stations now and then.
    fn resume(&mut self, now: Instant, context: &mut Context<'_>) {
        while let Some(at) = self.held.iter().position(|(until, _)| *until <= now) {
            let (_, index) = self.held.swap_remove(at);
            let place = &mut self.places[usize::from(index)];
            place.held = false;
            if place.watched {
                let _ = context.rewatch(u32::from(index), Interest::Read);
            }
            self.wake(index);
        }
        if now - self.aged > AGEING {
            self.aged = now;
            self.switch.age(now - self.begin);
        }
    }
}
