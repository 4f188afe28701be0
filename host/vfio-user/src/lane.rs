//! A task for a lane: a part of a function that another reactor polls.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use slipway_pci::{Lane, TurnLength};
use slipway_reactor::{Bell, Context, Handle, Interest, Step, Task};

use crate::control::{Shared, TaskGuard};
use crate::pace::Pace;

const BELL: u32 = 0;
const FIRST_WAKE: u32 = 1;

/// The place of a function's lane; see [`Endpoint::spread`](crate::Endpoint::spread).
pub struct LaneHome {
    /// The reactor that polls the lane.
    pub reactor: Handle,
    /// Duplicates of the wake descriptors of the lane's backends: when one is readable, the lane is
    /// polled.
    pub wakes: Vec<OwnedFd>,
}

/// The state that a lane's task shares with its endpoint.
pub(crate) struct Door {
    bell: Bell,
    /// The function has ended.
    ended: AtomicBool,
}

impl Door {
    pub(crate) fn new() -> std::io::Result<Arc<Self>> {
        Ok(Arc::new(Self { bell: Bell::new()?, ended: AtomicBool::new(false) }))
    }
}

impl Wake for Door {
    fn wake(self: Arc<Self>) {
        self.bell.ring();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.bell.ring();
    }
}

/// The lanes of an endpoint. Dropping this ends them.
#[derive(Default)]
pub(crate) struct Doors(pub(crate) Vec<Arc<Door>>);

impl Doors {
    /// Returns a waker for each lane.
    pub(crate) fn wakers(&self) -> Vec<Waker> {
        self.0.iter().map(|door| Waker::from(door.clone())).collect()
    }
}

impl Drop for Doors {
    fn drop(&mut self) {
        for door in &self.0 {
            door.ended.store(true, Ordering::Release);
            door.bell.ring();
        }
    }
}

/// A waker that has an endpoint poll its function.
pub(crate) struct Home(pub(crate) Arc<Shared>);

impl Wake for Home {
    fn wake(self: Arc<Self>) {
        self.0.poke();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.poke();
    }
}

pub(crate) struct LaneTask {
    lane: Box<dyn Lane>,
    door: Arc<Door>,
    wakes: Vec<OwnedFd>,
    pace: Pace,
    turn: TurnLength,
    sweep_period: Duration,
    /// The lane has ended, except for requests that wait for their medium.
    lingers: bool,
    endpoint: Arc<Shared>,
    _gone: TaskGuard,
}

impl Drop for LaneTask {
    /// Closes the endpoint if the lane ends before its function (it panicked, or could not start):
    /// the lane's queues would stall, and requests on them would wait for ever.
    fn drop(&mut self) {
        if !self.door.ended.load(Ordering::Acquire) {
            self.endpoint.close();
        }
    }
}

impl LaneTask {
    pub(crate) fn new(
        lane: Box<dyn Lane>,
        (door, wakes): (Arc<Door>, Vec<OwnedFd>),
        pace: Pace,
        sweep_period: Duration,
        endpoint: &Arc<Shared>,
    ) -> Self {
        Self {
            lane,
            door,
            wakes,
            pace,
            turn: TurnLength::default(),
            sweep_period,
            lingers: false,
            endpoint: endpoint.clone(),
            _gone: TaskGuard::new(endpoint),
        }
    }

    fn poll_lane(&mut self, now: Instant) -> bool {
        let found = self.lane.poll();
        self.pace.note(found, now)
    }

    /// Tells the lane that it will not be polled, if it has to be told. Returns whether polling
    /// goes on nevertheless.
    fn rest(&mut self, now: Instant) -> bool {
        if !self.pace.is_watching() {
            return false;
        }
        let found = self.lane.rest();
        self.pace.note(found, now) || self.pace.is_watching()
    }

    /// Returns the step that the task requires next, as for an endpoint that has nothing but its
    /// function.
    fn next(&mut self, context: &Context<'_>) -> Step {
        let now = context.now();
        if self.pace.is_busy() {
            return self.pace.busy_step();
        }
        let connected = self.endpoint.live.is_connected();
        if connected && self.pace.is_hot(now, context.poll_budget()) {
            return Step::Looking;
        }
        if self.rest(now) {
            return Step::Busy;
        }
        if !connected || self.pace.cells.is_none() {
            return Step::Idle(self.pace.deadline());
        }
        let sweep = self.pace.next_sweep(now, self.sweep_period);
        if sweep.is_some() {
            return Step::Idle([self.pace.deadline(), sweep].into_iter().flatten().min());
        }
        self.pace.note_doorbells();
        if self.poll_lane(now) {
            return self.pace.busy_step();
        }
        Step::Sweep(self.sweep_period, self.pace.deadline())
    }
}

impl Task for LaneTask {
    fn start(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        if context.is_alone() {
            self.endpoint.live.stalls.fetch_add(1, Ordering::Relaxed);
        }
        context.watch(self.door.bell.as_fd(), Interest::Read, BELL)?;
        for (token, wake) in (FIRST_WAKE..).zip(&self.wakes) {
            context.watch(wake.as_fd(), Interest::Read, token)?;
        }
        Ok(())
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Step {
        if context.events().iter().any(|event| event.token == BELL) {
            // Before the work that the bell announces is looked for.
            self.door.bell.silence();
        }
        if self.door.ended.load(Ordering::Acquire) {
            self.lingers = !self.lane.quiesce();
            return if self.lingers { Step::Leave } else { Step::Done };
        }
        let turn = if context.is_shared() { TurnLength::Short } else { TurnLength::Long };
        if turn != self.turn {
            self.turn = turn;
            self.lane.set_turn(turn);
        }
        // Poll whatever the reason for this step: a poll costs less than finding out.
        self.poll_lane(context.now());
        self.next(context)
    }

    fn stirs(&mut self) -> bool {
        self.pace.stirs()
    }

    fn leave(self: Box<Self>) {
        // A dropped lane waits for its medium, which must not delay the reactor. If no thread can
        // be started to wait on, the reactor's thread waits.
        let last = std::thread::Builder::new().name("closing".into());
        let _ = last.spawn(move || drop(self));
    }
}
