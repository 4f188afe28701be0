//! The task of an endpoint: a listening socket, a function, and at most one client.
//!
//! Over 500 lines: the states of one task, each with its steps.

mod connection;
mod entrance;
mod ready;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

use slipway_pci::Function;
use slipway_peer::{Foreign, Peer};
use slipway_reactor::{Context, Handle, Interest, Reactor, Settings, Step, Task};

use crate::channel::Channel;
use crate::control::{Gone, Shared};
use crate::device::Device;
use crate::keeping::Keeping;
use crate::lane::{Door, Doors, Home, LaneHome, LaneTask};
use crate::listener::Listener;
use crate::run_state::RunState;
use crate::server::{MAX_HELD, MAX_HELD_BYTES, Session, SessionTurn};
use crate::stats::{ClientInfo, add};
use crate::{Config, Control, EndpointParts, kept, slots};
use connection::Connection;
use entrance::{Entrance, listen};
use ready::{BELL, CLIENT, CONTROL, FIRST_WAKE, Ready, UNMASK};
use slipway_vfio_user_wire::Wire;

/// The interval at which a function that does not become quiet is asked again.
const RECHECK: Duration = Duration::from_millis(1);
/// The pause after an error, before accepting again or renewing the device.
const RETRY: Duration = Duration::from_millis(100);
/// The reason for which clients are disconnected if interrupts would have to be written to their
/// eventfds, a write that may wait for ever.
const NO_INTERRUPTS: &str = "interrupts cannot be delivered: the kernel has no asynchronous I/O \
    context and no io_uring left";
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
/// An endpoint that slept in a step, in a page fault on its client's memory, has a thread of its
/// own from then on ([`slipway_reactor::Context::is_alone`]), and keeps it: its next client may do
/// the same.
pub struct Endpoint {
    config: Arc<Config>,
    state: EndpointState,
    device: Device,
    wakes: Vec<OwnedFd>,
    /// The reactor watches `wakes`: it does while the function is polled, which clears them.
    wakes_watched: bool,
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
    _gone: Gone,
}

enum EndpointState {
    Listening,
    Connected(Connection),
    /// Cleaning up after a client.
    Draining {
        deadline: Instant,
        retry_at: Instant,
        /// The client had a thread of its own.
        private: bool,
    },
    /// The endpoint has ended, except for requests that the function still holds.
    Ended,
}

/// The reactor that the endpoint is on.
#[derive(Clone, Copy)]
enum Residence {
    /// Its home, or a reactor of its own for as long as its client needs one.
    Returning,
    /// On the way to a reactor of its own, for its client.
    Moving {
        /// The endpoint slept in the step in which it left, so it stays on the new reactor.
        slept: bool,
    },
    /// A reactor of its own, for good.
    Staying,
}

impl Endpoint {
    /// Binds the socket at once; clients are served once the endpoint is added to a reactor.
    ///
    /// `home` is that reactor: the endpoint returns to it from a thread of its own. `wakes` are
    /// duplicates of the backends' wake descriptors: when one is readable the function is polled,
    /// which clears it.
    ///
    /// # Errors
    /// The socket cannot be bound (the text holds its path), or the function's doorbells do not fit
    /// its doorbell registers.
    pub fn new(
        config: Config,
        parts: EndpointParts,
        function: Box<dyn Function>,
        wakes: Vec<OwnedFd>,
        home: &Handle,
    ) -> std::io::Result<Self> {
        let mut parts = parts;
        let kept = parts.kept.take();
        let device = Device::new(parts, function)?;
        let (listener, kept) = listen(&config, kept, &device.bin)?;
        let around = (wakes, home);
        let mut endpoint = Self::with(config, device, listener, around)?;
        if let Some((parts, keeping)) = kept {
            endpoint.resume(*parts, keeping)?;
        }
        Ok(endpoint)
    }

    /// Makes an endpoint on a Unix socket that another party made, named and listens on. The
    /// socket's path in `config` is ignored.
    ///
    /// # Errors
    /// `socket` is no such socket, or the function's doorbells do not fit its doorbell registers.
    pub fn on(
        socket: OwnedFd,
        config: Config,
        parts: EndpointParts,
        function: Box<dyn Function>,
        home: &Handle,
    ) -> std::io::Result<Self> {
        let listener = Listener::given(socket, &parts.bin)?;
        Self::with(config, Device::new(parts, function)?, listener, (Vec::new(), home))
    }

    fn with(
        config: Config,
        device: Device,
        listener: Listener,
        (wakes, home): (Vec<OwnedFd>, &Handle),
    ) -> std::io::Result<Self> {
        let path = config.location.socket();
        let shut = listener.shut()?.map(|socket| (socket, path));
        let is_open = shut.is_none();
        let shared = Arc::new(Shared::new(device.pace.progress_counter(), &device.bin, shut)?);
        device.sink.failure.tell(Waker::from(Arc::new(Home(shared.clone()))));
        Ok(Self {
            config: Arc::new(config),
            state: EndpointState::Listening,
            device,
            wakes,
            wakes_watched: false,
            entrance: Entrance { listener, is_open, watched: is_open, retry_at: None },
            home: home.clone(),
            residence: Residence::Returning,
            began: Instant::now(),
            kept: None,
            lanes: Doors::default(),
            _gone: Gone::new(&shared),
            shared,
        })
    }

    /// Continues with the client that a predecessor had, if there is one.
    fn resume(&mut self, mut parts: kept::Parts, mut keeping: Keeping) -> std::io::Result<()> {
        let socket = parts.found.remove(&slots::CLIENT);
        let (Some(socket), Some(peer)) = (socket, keeping.client()) else {
            if keeping.holds() {
                self.device.run = RunState::Held;
                // The predecessor may have been killed before it had cleared everything.
                keeping.release();
            }
            self.kept = Some(Box::new(keeping));
            return Ok(());
        };
        let wire = Wire::new(socket, &self.device.bin, self.config.max_queued_bytes);
        let channel = Channel::new(wire, self.config.remote_deadline);
        let live = self.shared.live.clone();
        live.connected(ClientInfo { pid: peer.pid, uid: peer.uid, private: false });
        let around = (&mut self.device, &mut parts);
        let session = Session::resume_kept(channel, self.config.clone(), live, keeping, around);
        let session = session.map_err(|end| std::io::Error::other(end.to_string()))?;
        self.device.pace.kick();
        self.state = EndpointState::Connected(Connection::new(session, Instant::now()));
        Ok(())
    }

    /// Has other reactors poll the function's lanes, if it has lanes: one lane for each home, as
    /// far as there are lanes. Call it before the endpoint is added to its reactor. The lanes end
    /// with the endpoint, wherever the endpoint is then. A client of such an endpoint cannot have
    /// message-only memory above [`Config::remote_threshold`], for which all of the function would
    /// have to move.
    ///
    /// # Errors
    /// No descriptors are left, or a reactor has ended. The endpoint cannot be used then.
    pub fn spread(&mut self, homes: Vec<LaneHome>) -> std::io::Result<()> {
        let doors = homes.iter().map(|_| Door::new());
        self.lanes = Doors(doors.collect::<Result<_, _>>()?);
        let home = Waker::from(Arc::new(Home(self.shared.clone())));
        let lanes = self.device.function.take_lanes(home, self.lanes.wakers());
        self.device.has_lanes = !lanes.is_empty();
        for ((lane, home), door) in lanes.into_iter().zip(homes).zip(&self.lanes.0) {
            let (pace, period) = (self.device.pace.beside(), self.config.sweep_period);
            let entrance = (door.clone(), home.wakes);
            let task = LaneTask::new(lane, entrance, pace, period, &self.shared);
            home.reactor.add(Box::new(task)).map_err(std::io::Error::other)?;
        }
        Ok(())
    }

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
            if self.config.admits(peer.uid) && matches!(self.state, EndpointState::Listening) {
                self.connect(socket, peer, context)?;
            } else {
                add(&self.shared.live.refused, 1);
            }
        }
        Ok(())
    }

    fn connect(
        &mut self,
        socket: Foreign,
        peer: Peer,
        context: &mut Context<'_>,
    ) -> std::io::Result<()> {
        if !slipway_peer::eventfd::can_raise() {
            add(&self.shared.live.refused, 1);
            self.shared.live.disconnected(NO_INTERRUPTS);
            return Ok(());
        }
        // The failure was that of an earlier client.
        let _ = self.device.sink.failure.take();
        if let Some(kept) = self.kept.as_mut().filter(|_| !self.device.is_held()) {
            kept.connect(&socket, peer)?;
        }
        context.watch(socket.as_fd(), Interest::Read, CLIENT)?;
        let wire = Wire::new(socket, &self.device.bin, self.config.max_queued_bytes);
        let channel = Channel::new(wire, self.config.remote_deadline);
        let live = self.shared.live.clone();
        live.connected(ClientInfo { pid: peer.pid, uid: peer.uid, private: false });
        let mut session = Session::new(channel, self.config.clone(), live);
        // An endpoint that has served a client returns home first, so this changes nothing.
        let _ = session.settle_on_thread(&mut self.device, false);
        if self.device.is_held() {
            session.released = self.kept.take_if(|kept| kept.may_resume(peer.uid));
        } else {
            session.kept = self.kept.take();
        }
        self.state = EndpointState::Connected(Connection::new(session, context.now()));
        Ok(())
    }

    /// Returns whether the client has hung up but the endpoint was not told yet: epoll_wait(2)
    /// looks at one descriptor after the other, and the next client may connect between the two
    /// looks.
    fn client_leaves(&self) -> bool {
        let EndpointState::Connected(connection) = &self.state else { return false };
        connection.session.channel.with(|wire| wire.is_hung_up())
    }

    fn disconnect(&mut self, why: &str, context: &mut Context<'_>) {
        let EndpointState::Connected(Connection { session, private, .. }) = &mut self.state else {
            return;
        };
        let private = *private;
        session.channel.hang_up();
        if let Some(mut kept) = session.kept.take().or(session.released.take()).or(self.kept.take())
        {
            if !self.device.is_held() {
                kept.disconnect();
            }
            self.kept = Some(kept);
        }
        // Before the connection is closed: the duplicate that is watched must not be the last one.
        context.unwatch(CLIENT);
        self.device.unroute();
        self.shared.live.disconnected(why);
        let now = context.now();
        let deadline = now + self.config.reply_deadline;
        self.state = EndpointState::Draining { deadline, retry_at: now, private };
    }

    /// Serves the client. Returns false if the client must move to a thread of its own.
    fn serve(&mut self, ready: Ready, context: &mut Context<'_>) -> bool {
        let now = context.now();
        let EndpointState::Connected(Connection { session, since, more, private, .. }) =
            &mut self.state
        else {
            return true;
        };
        if session.is_pending() && ready.client {
            // The socket is not watched for input now, so this is a hang-up or an error.
            self.disconnect("the client hung up while a request waited", context);
            return true;
        }
        let late = now.duration_since(*since) >= self.config.handshake_deadline;
        if late && !session.is_negotiated() {
            self.disconnect("the client did not negotiate in time", context);
            return true;
        }
        let kept = *private && session.channel.has_kept();
        if !(ready.client || ready.output || *more || kept || session.is_pending()) {
            return true;
        }
        match session.turn(&mut self.device, now) {
            Ok(SessionTurn::Move) => return false,
            Ok(turn) => *more = turn == SessionTurn::More,
            Err(end) => self.disconnect(&end.to_string(), context),
        }
        true
    }

    /// Takes the new home that the endpoint was told to move to, if any. Returns whether to move
    /// there now.
    fn relocates(&mut self, context: &Context<'_>) -> bool {
        let Some(home) = self.shared.take_home() else { return false };
        self.home = home;
        // On a thread of its own, the endpoint moves when its client disconnects, or never.
        !self.is_private() && !self.stays(context) && !self.shared.is_closing()
    }

    /// Returns whether the endpoint has a thread of its own for good.
    fn stays(&self, context: &Context<'_>) -> bool {
        context.is_alone() || matches!(self.residence, Residence::Staying)
    }

    /// Returns whether the client, or the one that is being cleaned up after, has a thread of its
    /// own.
    fn is_private(&self) -> bool {
        match &self.state {
            EndpointState::Connected(connection) => connection.private,
            EndpointState::Draining { private, .. } => *private,
            EndpointState::Listening | EndpointState::Ended => false,
        }
    }

    /// Answers the client that needs a thread of its own: this is that thread if `private`, or it
    /// could not be started.
    fn settle(&mut self, private: bool, context: &mut Context<'_>) {
        let EndpointState::Connected(connection) = &mut self.state else { return };
        if private {
            self.shared.live.moved();
        }
        (connection.more, connection.private) = (true, private);
        if let Err(end) = connection.session.settle_on_thread(&mut self.device, private) {
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
        let EndpointState::Connected(Connection { session, more, private, .. }) = &self.state
        else {
            return false;
        };
        self.device.mapped.is_some()
            && !more
            && !private
            && self.entrance.retry_at.is_none()
            && self.entrance.watched
            && session.is_negotiated()
            && !session.is_pending()
            && !session.is_quiescing()
            && self.device.runs()
    }

    /// Polls the function if there is a reason to.
    fn poll_device(&mut self, ready: Ready, now: Instant) {
        let wanted = match &self.state {
            _ if !self.device.runs() => false,
            EndpointState::Connected(connection) if connection.session.is_quiescing() => false,
            EndpointState::Connected(_) => {
                ready.wake || self.device.pace.is_unannounced() || self.device.pace.is_due(now)
            }
            EndpointState::Listening => ready.wake || self.device.pace.is_due(now),
            EndpointState::Draining { .. } | EndpointState::Ended => false,
        };
        if wanted {
            self.device.pass_event();
            self.device.poll(now);
        }
    }

    /// Cleans up after the last client. Returns `None` until that is done, then whether that client
    /// had a thread of its own.
    fn drain(&mut self, context: &mut Context<'_>) -> Option<bool> {
        let now = context.now();
        let EndpointState::Draining { deadline, retry_at, private } = &mut self.state else {
            return None;
        };
        if now < *retry_at {
            return None;
        }
        if !self.device.is_held() && !self.device.function.quiesce() && now < *deadline {
            return None;
        }
        let private = *private;
        if self.device.renew().is_err() {
            // There is no memory for new doorbells, and the old client could still ring the old
            // ones.
            *retry_at = now + RETRY;
            return None;
        }
        self.shared.live.mapped(&self.device.map);
        self.state = EndpointState::Listening;
        Some(private)
    }

    /// Unmasks the pin for the client, after the poll that may have deasserted it.
    fn unmask_pin(&mut self, context: &mut Context<'_>) {
        if !self.device.unmask_pin() {
            // Watching the eventfd further would only keep this thread busy.
            context.unwatch(UNMASK);
        }
    }

    /// Watches the backends' descriptors while the function is polled, or becomes quiet. One that
    /// stays readable would keep the thread busy otherwise.
    fn watch_wakes(&mut self, context: &mut Context<'_>) {
        let runs = self.device.runs();
        if runs != self.wakes_watched {
            self.wakes_watched = runs;
            let wanted = if runs { Interest::Read } else { Interest::None };
            for (token, _) in (FIRST_WAKE..).zip(&self.wakes) {
                // It was watched before, so changing the interest does not fail.
                let _ = context.rewatch(token, wanted);
            }
        }
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
        self.watch_wakes(context);
        self.entrance.watch(self.admits(), context);
        if let EndpointState::Connected(connection) = &mut self.state {
            connection.watch(context);
        }
    }

    /// Opens the entrance of an endpoint that was shut, once its control has had the socket listen.
    fn open_entrance(&mut self, context: &mut Context<'_>) {
        let may_open = !self.entrance.is_open && self.entrance.retry_at.is_none();
        if !may_open || self.shared.is_shut() {
            return;
        }
        if let Some(admission) = self.shared.take_admission() {
            self.config = Arc::new(self.config.admitting(admission));
        }
        if self.entrance.open(context).is_err() {
            self.entrance.retry_at = Some(context.now() + RETRY);
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

    /// Returns the step that the endpoint requires next.
    fn next(&mut self, context: &Context<'_>) -> Step {
        let now = context.now();
        let (pending, quiescing, more, handshake) = match &self.state {
            EndpointState::Listening | EndpointState::Ended => (false, false, false, None),
            EndpointState::Connected(Connection { session, since, more, .. }) => {
                let handshake =
                    (!session.is_negotiated()).then(|| *since + self.config.handshake_deadline);
                (session.is_pending(), session.is_quiescing(), *more, handshake)
            }
            EndpointState::Draining { retry_at, .. } => {
                return Step::Idle(Some((*retry_at).max(now + RECHECK)));
            }
        };
        let quiescing = quiescing || !self.device.runs();
        let connected = matches!(self.state, EndpointState::Connected(_));
        let hot = connected && self.device.pace.is_hot(now, context.poll_budget());
        if !quiescing && more && !pending {
            return Step::Busy;
        }
        if !quiescing && self.device.pace.is_busy() {
            return self.device.pace.busy_step();
        }
        if !quiescing && hot {
            return Step::Looking;
        }
        if connected && !quiescing && self.device.rest(now) {
            return Step::Busy;
        }
        let period = self.config.sweep_period;
        let mapped = connected && !quiescing && self.device.mapped.is_some();
        let sweep = if mapped { self.device.pace.next_sweep(now, period) } else { None };
        let sleeps = mapped && sweep.is_none();
        if sleeps {
            self.device.pace.note_doorbells();
            if self.device.poll(now) {
                return Step::Busy;
            }
        }
        let recheck = pending.then(|| now + RECHECK);
        let retry = self.entrance.retry_at;
        let deadline = self.device.pace.deadline().filter(|_| !quiescing);
        let times = [deadline, sweep, recheck, handshake, retry];
        let until = times.into_iter().flatten().min();
        if sleeps { Step::Sweep(period, until) } else { Step::Idle(until) }
    }
}

impl Task for Endpoint {
    fn start(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        if context.is_alone() {
            self.shared.live.stalls.fetch_add(1, Ordering::Relaxed);
        }
        context.watch(self.shared.bell(), Interest::Read, CONTROL)?;
        if self.entrance.is_open {
            self.entrance.open(context)?;
        }
        self.device.note_unmasking();
        self.device.note_bell();
        for (token, wake) in (FIRST_WAKE..).zip(&self.wakes) {
            context.watch(wake.as_fd(), Interest::Read, token)?;
        }
        self.wakes_watched = true;
        if let EndpointState::Connected(connection) = &mut self.state {
            connection.arrive(context)?;
            connection.more = true;
        }
        if let Residence::Moving { slept } = self.residence {
            let moved = !self.shared.move_failed.swap(false, Ordering::AcqRel);
            let stays = moved && slept;
            self.residence = if stays { Residence::Staying } else { Residence::Returning };
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
        let ready = Ready::new(context);
        if ready.control {
            self.shared.silence();
            if self.shared.take_poke() {
                self.device.pace.kick();
            }
            if self.relocates(context) {
                return Step::Leave;
            }
        }
        if self.device.sink.failure.take() {
            self.disconnect(NO_INTERRUPTS, context);
        }
        if self.shared.is_closing() {
            self.disconnect("the endpoint was closed", context);
            if matches!(self.state, EndpointState::Listening) {
                return self.end();
            }
        }
        // The client comes first: a new connection is refused only if the old client is really
        // still connected.
        if !self.serve(ready, context) {
            if !self.stays(context) {
                self.residence = Residence::Moving { slept: false };
                return Step::Leave;
            }
            self.settle(true, context);
        }
        // Before the poll that looks for the event's reason.
        if ready.bell {
            self.device.take_event();
        }
        self.poll_device(ready, now);
        if ready.unmask {
            self.unmask_pin(context);
        }
        if let Some(private) = self.drain(context) {
            if self.shared.is_closing() {
                return self.end();
            }
            if private && !self.stays(context) {
                return Step::Leave;
            }
        }
        self.entrance.pause_ends(now);
        self.open_entrance(context);
        let accepts = self.admits() && self.entrance.retry_at.is_none();
        if accepts && ready.listener && !self.client_leaves() && self.accept(context).is_err() {
            self.entrance.retry_at = Some(now + RETRY);
        }
        self.watch(context);
        self.next(context)
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
        let Residence::Moving { slept } = &mut self.residence else {
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
