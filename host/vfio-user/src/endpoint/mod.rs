//! The task of an endpoint: a listening socket, a function, and at most one client.
//!
//! | event | `Listening` | `Connected` | `Draining` |
//! |---|---|---|---|
//! | a connection waits | a client is connected: `Connected` | it is accepted and refused | it waits |
//! | the client's socket is ready | | the session has a turn | |
//! | the client ends, or has to | | `Draining` | |
//! | the client needs a thread | | the endpoint moves to one ([`Residence`]) | |
//! | the function is quiet, or late | | | the device is renewed: `Listening` |
//! | a backend wakes, a deadline passes | a poll | a poll, unless a request quiesces | |
//! | [`Control::relocate`] | the endpoint moves | it moves, on its home | it moves, on its home |
//! | [`Control::close`] | it ends, by way of `Ended` | `Draining` | it ends when it has drained |
//!
//! This file has the state, its changes, and the choice of the next step; `turn` has the order in
//! which one step handles all that is ready. Each other module has one part of the endpoint.

mod connected;
mod construction;
mod draining;
mod entrance;
mod facts;
mod listening;
mod ready;
mod residence;
mod turn;
mod wakes;

use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use slipway_reactor::{Context, Handle, Interest, Reactor, Settings, Step, Task};

use crate::control::{Shared, TaskGuard};
use crate::device::Device;
use crate::inspect::Stage;
use crate::keeping::Keeping;
use crate::lane::Doors;
use crate::server::{MAX_HELD, MAX_HELD_BYTES};
use crate::stats::add;
use crate::{Config, Control};
use connected::Connection;
use draining::Draining;
use entrance::Entrance;
use facts::{DoorbellPolling, Facts, Sleep};
use listening::Acceptor;
use ready::{BELL, CLIENT, CONTROL, Ready, UNMASK};
use residence::Residence;
use wakes::Wakes;

/// The pause after an error, before accepting again or renewing the device.
const RETRY: Duration = Duration::from_millis(100);
/// The duration above which a step has probably slept; otherwise the machine is very busy.
const LONG_STEP: Duration = Duration::from_millis(15);
/// The number of connections that are accepted or closed in one step.
const ACCEPTS_PER_STEP: usize = 4;

/// A function behind a socket, as a task for a reactor.
///
/// It serves one client at a time. A client that connects while another is served is disconnected
/// at once: otherwise it would wait for a reply until it gives up. A client that connects during
/// the cleanup after the last one waits in the socket's queue. When a client disconnects, for any
/// reason, interrupts are unrouted, the function is quiesced, its memory is unmapped, the function
/// is reset, and the next client is accepted.
///
/// An endpoint that was made shut ([`Config::shut`]) admits its first client after
/// [`Control::open`].
///
/// The endpoint moves to another reactor when it is told to ([`Control::relocate`]). The
/// descriptors that it watches are level-triggered and it has a step as soon as it has arrived, so
/// it misses nothing that happens during the move.
///
/// If a step sleeps in a page fault on a client's memory, the reactor goes on without the endpoint,
/// which has a thread of its own from then on ([`slipway_reactor::Context::is_alone`]). It keeps
/// that thread, since the next client's memory may be of the same kind.
pub struct Endpoint {
    config: Arc<Config>,
    state: EndpointState,
    device: Device,
    wakes: Wakes,
    entrance: Entrance,
    home: Handle,
    residence: Residence,
    /// The state for a successor, while no session has it.
    kept: Option<Box<Keeping>>,
    /// The time at which the current step began.
    began: Instant,
    shared: Arc<Shared>,
    /// The lanes' entrances. Declared after the function, for which the lanes work.
    lanes: Doors,
    _gone: TaskGuard,
}

enum EndpointState {
    Listening,
    Connected(Connection),
    /// Cleaning up after a client.
    Draining(Draining),
    /// The endpoint has ended, except for requests that the function still holds.
    Ended,
}

impl Endpoint {
    /// Returns a handle to the endpoint for other threads.
    pub fn control(&self) -> Control {
        Control(self.shared.clone())
    }

    /// Accepts the connections that wait at the socket.
    fn accept(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        for _ in 0..ACCEPTS_PER_STEP {
            let (things, bytes) = (self.device.bin.held(), self.device.bin.held_bytes());
            if things > MAX_HELD || bytes > MAX_HELD_BYTES {
                return Err(std::io::Error::other("too much of earlier clients cannot be closed"));
            }
            let Some((socket, peer)) = self.entrance.listener.accept()? else { return Ok(()) };
            self.adopt_admission();
            if self.config.admits(peer.uid) && matches!(self.state, EndpointState::Listening) {
                let (config, live) = (&self.config, &self.shared.live);
                let (device, kept) = (&mut self.device, &mut self.kept);
                let mut acceptor = Acceptor { config, device, kept, live };
                if let Some(connection) = acceptor.connect((socket, peer), context)? {
                    self.state = EndpointState::Connected(connection);
                }
            } else {
                add(&self.shared.live.refused, 1);
            }
        }
        Ok(())
    }

    /// Returns whether the client has hung up but the endpoint was not told yet: epoll_wait(2)
    /// looks at one descriptor after the other, and the next client may connect between the two
    /// looks.
    fn client_leaves(&self) -> bool {
        let EndpointState::Connected(connection) = &self.state else { return false };
        connection.is_hung_up()
    }

    fn disconnect(&mut self, why: &str, context: &mut Context<'_>) {
        let EndpointState::Connected(connection) = &mut self.state else { return };
        // The session or the endpoint has the state for a successor, never both: the session of a
        // client that is kept, or that may resume a held function, takes it from the endpoint.
        if let Some(mut kept) = connection.end().or_else(|| self.kept.take()) {
            if !self.device.is_held() {
                kept.disconnect();
            }
            self.kept = Some(kept);
        }
        // Before the connection is closed: the duplicate that is watched must not be the last one.
        context.unwatch(CLIENT);
        self.device.unroute();
        self.shared.live.disconnected(why);
        let draining = Draining::new(context.now(), self.config.reply_deadline);
        self.state = EndpointState::Draining(draining);
    }

    /// Answers the client that needs a thread of its own: this is that thread if `moved`, or it
    /// could not be started.
    fn settle(&mut self, moved: bool, context: &mut Context<'_>) {
        let EndpointState::Connected(connection) = &mut self.state else { return };
        if moved {
            self.shared.live.moved();
        }
        if let Err(end) = connection.settle(&mut self.device, moved) {
            self.disconnect(&end.to_string(), context);
        }
    }

    /// Returns whether the only work is to poll the function for a client that rings mapped
    /// doorbells: no message is to be read or answered, and no client is connecting or
    /// disconnecting.
    ///
    /// Events are checked separately: closing and poking are events, and so is room for output,
    /// which only a message creates.
    fn is_only_served(&self) -> bool {
        let EndpointState::Connected(connection) = &self.state else { return false };
        self.device.mapped.is_some()
            && connection.is_quiet()
            && self.entrance.retry_at.is_none()
            && self.entrance.watched
            && self.device.runs()
    }

    /// Watches the descriptors that the state requires.
    fn watch(&mut self, context: &mut Context<'_>) {
        if self.device.take_unmasking_changed() {
            match self.device.unmasking.routed() {
                // A failure means that no descriptor is left; unmasking by message still works.
                Some(file) => drop(context.watch(file.as_fd(), Interest::Read, UNMASK)),
                None => context.unwatch(UNMASK),
            }
        }
        if self.device.take_bell_changed() {
            match self.device.bell().cloned() {
                // Without a descriptor for it, the client's events would be lost.
                Some(bell) if context.watch(bell.as_fd(), Interest::Read, BELL).is_err() => {
                    self.disconnect("no descriptor is left to watch the client's eventfd", context);
                }
                Some(_) => {}
                None => context.unwatch(BELL),
            }
        }
        self.wakes.watch(self.device.runs(), context);
        self.entrance.watch(self.admits(), context);
        if let EndpointState::Connected(connection) = &mut self.state {
            connection.watch(context);
        }
    }

    /// Admits from now on the client that the endpoint was opened for last.
    fn adopt_admission(&mut self) {
        if let Some(admission) = self.shared.take_admission() {
            self.config = Arc::new(self.config.admitting(admission));
        }
    }

    /// Opens the entrance of an endpoint that was shut, once its control has had the socket listen.
    fn open_entrance(&mut self, context: &mut Context<'_>) {
        let may_open = !self.entrance.is_open && self.entrance.retry_at.is_none();
        if !may_open || self.shared.is_shut() {
            return;
        }
        self.adopt_admission();
        if self.entrance.open(context).is_err() {
            self.entrance.retry_at = Some(context.now() + RETRY);
        }
    }

    /// Returns what the endpoint does now.
    fn stage(&self) -> Stage {
        match &self.state {
            EndpointState::Listening if self.device.is_held() => Stage::Held,
            EndpointState::Listening if !self.entrance.is_open => Stage::Shut,
            EndpointState::Listening => Stage::Listening,
            EndpointState::Connected(connection) => connection.stage(&self.device),
            EndpointState::Draining(_) => Stage::Draining,
            EndpointState::Ended => Stage::Ended,
        }
    }

    /// Returns whether the state admits connections: while a client is connected, others are
    /// accepted and disconnected.
    fn admits(&self) -> bool {
        self.entrance.is_open
            && matches!(self.state, EndpointState::Listening | EndpointState::Connected(_))
    }

    /// Does the last step. A function that still holds requests may wait for its medium when it is
    /// dropped, which must not delay the reactor.
    fn end(&mut self) -> Step {
        if self.device.function.quiesce() {
            return Step::Done;
        }
        self.state = EndpointState::Ended;
        Step::Leave
    }

    /// Returns the step that the endpoint requires next. Polls the function before it sleeps.
    fn next(&mut self, context: &Context<'_>) -> Step {
        let now = context.now();
        let mut facts = Facts { quiescing: !self.device.runs(), ..Facts::default() };
        let mut connected = false;
        match &self.state {
            EndpointState::Listening | EndpointState::Ended => {}
            EndpointState::Connected(connection) => {
                connection.add_to(&mut facts);
                connected = true;
            }
            EndpointState::Draining(draining) => return draining.next(now),
        }
        let pace = &self.device.pace;
        facts.busy = facts.busy.or_else(|| pace.is_busy().then(|| pace.busy_step()));
        facts.hot = connected && pace.is_hot(now, context.poll_budget());
        if let Some(step) = facts.at_once() {
            return step;
        }
        let is_polled = !facts.quiescing;
        let Some(looks) = self.last_look(connected && is_polled, now) else { return Step::Busy };
        let connection = match &self.state {
            EndpointState::Connected(connection) => Some(connection),
            _ => None,
        };
        // The last poll may have waited for the client's memory, and kept a message that came
        // meanwhile. No event would end the sleep for it.
        if !facts.pending && connection.is_some_and(|connection| connection.has_kept()) {
            return Step::Busy;
        }
        let handshake = connection.and_then(|connection| connection.handshake(&self.config));
        let deadline = self.device.pace.deadline().filter(|_| is_polled);
        let (pending, retry) = (facts.pending, self.entrance.retry_at);
        Sleep { pending, looks, deadline, handshake, retry }.step(now)
    }

    /// Prepares a sleep of the endpoint. Tells the function that polling stops, and polls it a last
    /// time if only changes of its doorbells are noticed from then on. Returns how the doorbells
    /// are looked at during the sleep, or `None` if there is work, so that there is no sleep.
    fn last_look(&mut self, may_poll: bool, now: Instant) -> Option<DoorbellPolling> {
        if !may_poll {
            return Some(DoorbellPolling::None);
        }
        if self.device.rest(now) {
            return None;
        }
        if self.device.mapped.is_none() {
            return Some(DoorbellPolling::None);
        }
        let period = self.config.sweep_period;
        if let Some(at) = self.device.pace.next_sweep(now, period) {
            return Some(DoorbellPolling::At(at));
        }
        self.device.pace.note_doorbells();
        (!self.device.poll(now)).then_some(DoorbellPolling::Sweep(period))
    }
}

impl Task for Endpoint {
    fn start(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        if context.is_alone() {
            self.shared.live.stalls.fetch_add(1, Ordering::Relaxed);
        }
        context.watch(self.shared.bell(), Interest::Bell, CONTROL)?;
        if self.entrance.is_open {
            self.entrance.open(context)?;
        }
        self.device.note_unmasking();
        self.device.note_bell();
        self.wakes.arrive(context)?;
        if let EndpointState::Connected(connection) = &mut self.state {
            connection.arrive(context)?;
        }
        let moving = matches!(self.residence, Residence::MovingForClient { .. });
        let moved = moving && !self.shared.move_failed.swap(false, Ordering::AcqRel);
        self.residence = self.residence.arrived(moved, context.is_alone());
        if moving {
            self.settle(moved, context);
        }
        Ok(())
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Step {
        let now = context.now();
        self.began = now;
        self.device.share(context.is_shared());
        if context.events().is_empty() && self.is_only_served() {
            self.device.poll(now);
            return self.next(context);
        }
        match self.turn(Ready::new(context), context) {
            ControlFlow::Continue(()) => self.next(context),
            ControlFlow::Break(last) => last,
        }
    }

    fn stirs(&mut self) -> bool {
        self.device.pace.stirs()
    }

    fn leave(mut self: Box<Self>) {
        if matches!(self.state, EndpointState::Ended) {
            // If no thread can be started to wait on, the reactor's thread waits.
            let last = std::thread::Builder::new().name("closing".into());
            let _ = last.spawn(move || drop(self));
            return;
        }
        let Residence::MovingForClient { slept } = &mut self.residence else {
            // If the home reactor has ended, the endpoint is dropped, as it would be there.
            let home = self.home.clone();
            let _ = home.add(self);
            return;
        };
        if self.began.elapsed() > LONG_STEP {
            *slept = true;
            self.shared.live.stalls.fetch_add(1, Ordering::Relaxed);
        }
        let (home, shared) = (self.home.clone(), self.shared.clone());
        let settings = Settings { name: "vfio-user".into(), ..Settings::default() };
        if let Err((_, task)) = Reactor::detached(settings, self) {
            // The endpoint is not on a thread of its own now, so it may have to move to one later.
            shared.move_failed.store(true, Ordering::Release);
            let _ = home.add(task);
        }
    }
}
