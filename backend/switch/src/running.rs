//! The turns of a switch's ports, and the sleep of its task.
//!
//! A port is *awake*, that is, it has turns, or *armed*, that is, it wakes the switch when frames
//! come. A port that has found nothing for the reactor's poll budget is armed on its own, so a
//! thousand silent ports cost a busy one nothing. A port that was woken for something else than
//! frames, as one that was just attached, is armed at once: the reactor would poll it in vain. When
//! no port is awake the task is idle.
//!
//! # No wake-up is lost
//! [`Port::arm`] looks once more after it has asked for a wake-up, and a port in which it found
//! something stays awake. Later frames are announced by the port's descriptor, which epoll reports
//! as long as it is readable, or through its [`Waker`], whose message stays in the inbox until the
//! task has read it. The inbox is emptied at the beginning of every step, and a thread that posts
//! to it wakes the task afterwards. A port that is there and whose descriptor cannot be watched (no
//! descriptor is left to the process) stays awake until it can.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slipway_reactor::{Context, Interest, Step};

use crate::inspect::{PORTS, PortView, QueuesView, SwitchView};
use crate::switch::PortTurn;
use crate::waker::{Wake, Waker};
use crate::{AttachError, BURST, BadConfig, LinkSetting, Port, PortConfig, PortIndex, Switch};

/// Turns of ports in one step of the task; other tasks of the reactor wait meanwhile.
const TURNS: usize = 4;
/// The largest number of frames in a turn while other tasks share the reactor.
const SHORT: usize = 16;
/// The time between two removals of stations that were silent for long.
const AGEING: Duration = Duration::from_secs(30);

/// The switch as a job sees it, together with its task's state of the ports.
pub struct Owner<'a, 'c> {
    running: &'a mut Running,
    context: &'a mut Context<'c>,
}

impl<'a, 'c> Owner<'a, 'c> {
    pub(crate) fn new(running: &'a mut Running, context: &'a mut Context<'c>) -> Self {
        Self { running, context }
    }

    /// Returns the switch. Ports must be attached, detached and configured through
    /// [`Owner::attach`], [`Owner::detach`] and [`Owner::configure`], so that the task learns of
    /// it.
    pub fn switch(&mut self) -> &mut Switch {
        &mut self.running.switch
    }

    /// Returns views of the ports whose names `wanted` accepts.
    pub fn inspect(&mut self, wanted: impl Fn(&str) -> bool) -> SwitchView {
        let mut view = SwitchView::default();
        let indices: Vec<PortIndex> = self.switch().ports().collect();
        for index in indices {
            let config = self.running.switch.config(index);
            if config.is_none_or(|config| !wanted(&config.name)) {
                continue;
            }
            match view.ports.len() {
                PORTS.. => view.more_ports += 1,
                _ => view.ports.extend(self.inspect_port(index)),
            }
        }
        view
    }

    fn inspect_port(&mut self, index: PortIndex) -> Option<PortView> {
        let state = self.running.states.get(usize::from(index)).copied().unwrap_or_default();
        let switch = &mut self.running.switch;
        let config = switch.config(index)?;
        let (name, down) = (config.name.clone(), config.link == LinkSetting::Down);
        let port = switch.port_mut(index)?;
        let (up, mut queues) = (port.is_up() && !down, QueuesView::default());
        port.inspect(&mut queues);
        let is_stalled = switch.stalled_until(index).is_some();
        let stats = switch.stats(index)?;
        Some(PortView {
            index,
            name,
            up,
            turn: if is_stalled { "stalled" } else { state.turn.name() }.to_owned(),
            frames_in: stats.frames_in,
            frames_out: stats.frames_out,
            dropped_in: stats.dropped_in.iter().sum(),
            dropped_out: stats.dropped_out.iter().sum(),
            queues,
        })
    }

    /// Attaches a port.
    ///
    /// # Errors
    /// [`AttachError`]; the port is dropped.
    pub fn attach(
        &mut self,
        port: Box<dyn Port>,
        config: PortConfig,
    ) -> Result<PortIndex, AttachError> {
        let index = self.running.switch.attach(port, config).map_err(|(error, _)| error)?;
        if let Err(error) = self.running.begin(index, self.context) {
            drop(self.detach(index));
            return Err(AttachError::Watch(error));
        }
        Ok(index)
    }

    /// Replaces a port, as [`Switch::replace`] does. Returns the former port. If the descriptor of
    /// the new one cannot be watched, the port stays awake until it can.
    ///
    /// # Errors
    /// [`BadConfig::NoSuchPort`]; the new port is dropped.
    pub fn replace(
        &mut self,
        index: PortIndex,
        port: Box<dyn Port>,
    ) -> Result<Box<dyn Port>, BadConfig> {
        let former = self.running.switch.replace(index, port).map_err(|(error, _)| error)?;
        self.forget(index);
        let _ = self.running.begin(index, self.context);
        Ok(former)
    }

    /// Changes a port's settings. A port that its former rate held back may send at once.
    ///
    /// # Errors
    /// [`BadConfig`]; the port then keeps its former settings.
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
    /// [`BadConfig::NoSuchPort`] if there is no such port.
    pub fn detach(&mut self, index: PortIndex) -> Result<Box<dyn Port>, BadConfig> {
        let port = self.running.switch.detach(index)?;
        self.forget(index);
        Ok(port)
    }

    fn forget(&mut self, index: PortIndex) {
        self.context.unwatch(u32::from(index));
        if let Some(state) = self.running.states.get_mut(usize::from(index)) {
            *state = PortState::default();
        }
        self.running.awake.retain(|awake| *awake != index);
        self.running.held.retain(|(_, held)| *held != index);
    }
}

/// The state of a port's descriptor, which wakes the switch.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Watch {
    /// The port has no descriptor.
    #[default]
    Unneeded,
    Watched,
    /// The descriptor could not be watched: the port stays awake, and tries again.
    Failed,
}

/// When a port has its next turn.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum WakeState {
    /// When it is woken.
    #[default]
    Armed,
    /// Soon: the port is in [`Running::awake`].
    Awake,
    /// When it may send again: the port is in [`Running::held`].
    Held,
}

impl WakeState {
    fn name(self) -> &'static str {
        match self {
            Self::Armed => "armed",
            Self::Awake => "awake",
            Self::Held => "held",
        }
    }
}

/// The task's state of a port.
#[derive(Clone, Copy, Default)]
struct PortState {
    turn: WakeState,
    watch: Watch,
    /// The time at which the port last had frames.
    last: Option<Instant>,
}

/// A switch with the turns of its ports.
pub(crate) struct Running {
    switch: Switch,
    states: Vec<PortState>,
    awake: VecDeque<PortIndex>,
    /// The ports that may not send yet, each with the time from which it may.
    held: Vec<(Instant, PortIndex)>,
    /// The way from ports to the task.
    waking: Arc<dyn Wake>,
    /// The origin of the switch's clock.
    begin: Instant,
    aged: Instant,
}

impl Running {
    /// Begins with a switch and the ports that it has already.
    pub fn new(switch: Switch, waking: Arc<dyn Wake>, context: &mut Context<'_>) -> Self {
        let (states, awake, held) = (Vec::new(), VecDeque::new(), Vec::new());
        let now = context.now();
        let mut running = Self { switch, states, awake, held, waking, begin: now, aged: now };
        let ports: Vec<PortIndex> = running.switch.ports().collect();
        for index in ports {
            // After an error the port stays awake, and its descriptor is watched later.
            let _ = running.begin(index, context);
        }
        running
    }

    /// Begins with a new port: passes it a waker, watches its descriptor, and gives it its first
    /// turn. The port stays awake after an error.
    fn begin(&mut self, index: PortIndex, context: &mut Context<'_>) -> std::io::Result<()> {
        let count = self.states.len().max(usize::from(index) + 1);
        self.states.resize(count, PortState::default());
        let Some(port) = self.switch.port_mut(index) else { return Ok(()) };
        port.attached(Waker::new(self.waking.clone(), index));
        self.states[usize::from(index)] = PortState::default();
        let watched = self.watch(index, Interest::Read, context);
        self.wake(index);
        watched
    }

    /// Watches a port's descriptor, if it has one. The port stays awake after an error.
    fn watch(
        &mut self,
        index: PortIndex,
        interest: Interest,
        context: &mut Context<'_>,
    ) -> std::io::Result<()> {
        let descriptor = self.switch.port_mut(index).and_then(|port| port.descriptor());
        let watched =
            descriptor.map(|descriptor| context.watch(descriptor, interest, u32::from(index)));
        self.states[usize::from(index)].watch = match &watched {
            None => Watch::Unneeded,
            Some(Ok(())) => Watch::Watched,
            Some(Err(_)) => Watch::Failed,
        };
        watched.unwrap_or(Ok(()))
    }

    /// Watches all ports' descriptors again, and gives each port a turn.
    pub fn watch_again(&mut self, context: &mut Context<'_>) {
        for at in 0..self.states.len() {
            let index = at as PortIndex;
            let is_held = self.states[at].turn == WakeState::Held;
            let interest = if is_held { Interest::None } else { Interest::Read };
            let _ = self.watch(index, interest, context);
            self.wake(index);
        }
    }

    /// Gives a port a turn soon. A held port only attends to its peer's other work.
    pub fn wake(&mut self, index: PortIndex) {
        let Some(state) = self.states.get_mut(usize::from(index)) else { return };
        match state.turn {
            WakeState::Held => self.switch.attend(index),
            WakeState::Awake => {}
            WakeState::Armed => {
                (state.turn, state.last) = (WakeState::Awake, None);
                self.awake.push_back(index);
            }
        }
    }

    /// Begins a step: measures what the thread waits for from here. The inbox is read in the step.
    pub fn begin_step(&mut self) {
        self.switch.begin_step(self.begin);
    }

    /// Notes that the step has done what no port's peer asked for, which is not measured.
    pub fn disown(&mut self) {
        self.switch.disown();
    }

    /// Gives awake ports their turns, does the work that is due, and ends the step.
    pub fn step(&mut self, context: &mut Context<'_>) -> Step {
        let now = context.now();
        for event in context.events() {
            // An event's token is the port's number.
            self.wake(event.token as PortIndex);
        }
        self.resume(now, context);
        self.expire(now);
        let limit = if context.is_shared() { SHORT } else { BURST };
        let (mut worked, mut behind) = (false, false);
        for _ in 0..self.awake.len().min(TURNS) {
            let Some(index) = self.awake.pop_front() else { break };
            match self.switch.turn(index, limit, now - self.begin) {
                PortTurn::Idle => self.rest(index, context),
                PortTurn::Held(until) => self.hold(index, self.begin + until, context),
                done => {
                    (worked, behind) = (true, behind || done == PortTurn::More);
                    self.states[usize::from(index)].last = Some(now);
                    self.awake.push_back(index);
                }
            }
        }
        self.switch.end_step();
        match (self.awake.is_empty(), worked) {
            (true, _) => Step::Idle(self.next()),
            (false, true) if behind => Step::Behind,
            (false, true) => Step::Busy,
            (false, false) => Step::Looking,
        }
    }

    /// Keeps a port that found nothing awake for a while if it had frames since it was woken, and
    /// arms it then.
    fn rest(&mut self, index: PortIndex, context: &mut Context<'_>) {
        self.unwatch_removed(index, context);
        let last = self.states[usize::from(index)].last;
        if last.is_some_and(|last| context.now() - last < context.poll_budget())
            || self.is_unheard(index, context)
            || self.switch.arm(index)
        {
            self.awake.push_back(index);
        } else {
            self.states[usize::from(index)].turn = WakeState::Armed;
        }
    }

    /// Returns whether a port's descriptor is not watched although it has one. Tries to watch it
    /// first, once in a poll budget.
    fn is_unheard(&mut self, index: PortIndex, context: &mut Context<'_>) -> bool {
        let state = &mut self.states[usize::from(index)];
        if state.watch != Watch::Failed {
            return false;
        }
        state.last = Some(context.now());
        self.watch(index, Interest::Read, context).is_err()
    }

    /// Stops watching a port that has no descriptor any more.
    fn unwatch_removed(&mut self, index: PortIndex, context: &mut Context<'_>) {
        let state = &mut self.states[usize::from(index)];
        if state.watch == Watch::Watched
            && self.switch.port_mut(index).is_some_and(|port| port.descriptor().is_none())
        {
            state.watch = Watch::Unneeded;
            context.unwatch(u32::from(index));
        }
    }

    /// Holds a port that may not send before `until`; its descriptor is not watched meanwhile. What
    /// the port was woken for, other than frames, does not wait as long.
    fn hold(&mut self, index: PortIndex, until: Instant, context: &mut Context<'_>) {
        let state = &mut self.states[usize::from(index)];
        state.turn = WakeState::Held;
        self.held.push((until, index));
        if state.watch == Watch::Watched {
            // If this fails, the descriptor wakes a task that has nothing to do.
            let _ = context.rewatch(u32::from(index), Interest::None);
        }
        self.switch.attend(index);
    }

    /// Does the ports' timed work that is due, and wakes ports that have frames from their peers. A
    /// port in which no frame waits costs nothing until its next turn or delivery.
    fn expire(&mut self, now: Instant) {
        let mut at = 0;
        while let Some(&index) = self.switch.waiting().get(at) {
            let Some(due) = self.due(index) else {
                self.switch.nothing_waits(at);
                continue;
            };
            if due <= now && self.switch.tick(index, now - self.begin) {
                self.wake(index);
            }
            at += 1;
        }
    }

    /// Returns the time of a port's next timed work. The frames from the peer of a held port do not
    /// count: it has a turn when it is held no more.
    fn due(&mut self, index: PortIndex) -> Option<Instant> {
        let inward =
            !self.states.get(usize::from(index)).is_some_and(|state| state.turn == WakeState::Held);
        self.switch.due(index, inward).map(|due| self.begin + due)
    }

    /// Returns the time of the next work that no wake-up announces.
    fn next(&mut self) -> Option<Instant> {
        let held = self.held.iter().map(|(until, _)| *until).min();
        let waiting = 0..self.switch.waiting().len();
        let due = waiting.filter_map(|at| self.due(self.switch.waiting()[at]));
        due.min().into_iter().chain(held).min()
    }

    /// Wakes the ports that may send again, and forgets silent stations now and then.
    fn resume(&mut self, now: Instant, context: &mut Context<'_>) {
        while let Some(at) = self.held.iter().position(|(until, _)| *until <= now) {
            let (_, index) = self.held.swap_remove(at);
            let state = &mut self.states[usize::from(index)];
            state.turn = WakeState::Armed;
            if state.watch == Watch::Watched
                && context.rewatch(u32::from(index), Interest::Read).is_err()
            {
                state.watch = Watch::Failed;
            }
            self.wake(index);
        }
        if now - self.aged > AGEING {
            self.aged = now;
            self.switch.age(now - self.begin);
        }
    }
}
