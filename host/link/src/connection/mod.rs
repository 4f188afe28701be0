//! One connection: another engine, a tenant, and their streams.
//!
//! The module `streams` has the engine's operations on streams, `incoming` the handling of the
//! peer's frames, `outgoing` the sending and the choice of the next stream, `time` the timers.

mod broken;
mod incoming;
mod outgoing;
mod streams;
mod time;

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::coalescing::Coalescing;
use crate::event::{Event, StreamId};
use crate::frames::Frames;
use crate::handshake::Handshake;
use crate::logs::Logs;
use crate::receiver::Receiver;
use crate::sender::Sender;
use crate::settings::Settings;
use crate::socket::Network;
use crate::stream::Stream;

pub(crate) use broken::Broken;

/// The parts of its engine that a connection uses.
pub(crate) struct Around<'a> {
    pub(crate) now: Instant,
    pub(crate) settings: &'a Settings,
    pub(crate) events: &'a mut VecDeque<Event>,
    pub(crate) logs: &'a mut Logs,
}

/// Counters of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Report {
    /// The other engine; empty during a handshake that it began.
    pub engine: String,
    /// The tenant; empty during a handshake that the other engine began.
    pub tenant: String,
    /// Streams.
    pub streams: usize,
    /// Bytes given to the socket: records with headers and tags.
    pub sent: u64,
    /// Bytes taken from the socket.
    pub received: u64,
    /// Generation of the key that is sealed under: how often it was replaced.
    pub generation: u32,
    /// Time that the engine's core was busy with this connection.
    pub busy: Duration,
}

enum ConnectionState {
    /// Placeholder while one state is replaced by another.
    None,
    /// The socket is not connected yet.
    Connecting(Box<Handshake>),
    Handshake(Box<Handshake>),
    /// The handshake is done, and records flow.
    Up(Box<Sender>),
}

impl ConnectionState {
    /// Goes on from `Connecting` to `Handshake`; other states stay.
    fn connected(&mut self) {
        *self = match std::mem::replace(self, Self::None) {
            Self::Connecting(handshake) => Self::Handshake(handshake),
            other => other,
        };
    }
}

/// The events that epoll should watch for on a connection's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interest {
    pub(crate) read: bool,
    pub(crate) write: bool,
}

pub(crate) struct Connection {
    key: u32,
    pub(crate) socket: OwnedFd,
    state: ConnectionState,
    /// `Some` once the handshake is done.
    receiver: Option<Receiver>,
    coalescing: Coalescing,
    pub(crate) engine: Option<usize>,
    /// The address that the peer connected from, if the peer began the connection.
    pub(crate) from: Option<Network>,
    pub(crate) tenant: String,
    since: Instant,
    frames: Frames,
    streams: HashMap<u32, Stream>,
    /// Number of the next stream that this side opens.
    next: u32,
    /// Number of the last stream that the other side opened.
    last: u32,
    /// Initial credit of a stream: bytes that the peer accepts before it grants more.
    window: u32,
    /// Streams that are polled in each turn.
    hot: VecDeque<u32>,
    /// Streams that had nothing to do for a while and are about to stop being polled.
    cooling: Vec<u32>,
    resting: VecDeque<(Instant, u32)>,
    /// Streams that this side asks for, and when they are given up.
    asking: VecDeque<(Instant, u32)>,
    /// Streams that the other side asked for and the owner has not answered, including ended ones.
    unanswered: HashSet<u32>,
    /// The last time that something was received, the last ping, and the time since when there are
    /// no streams.
    heard: Instant,
    pinged: Instant,
    emptied: Instant,
    /// The peer opens no stream here any more (`away`); this side opens none (`leaving`).
    away: bool,
    leaving: bool,
    /// The connection must not send before this time: its tenant has sent enough, or its way is
    /// busy.
    pub(crate) held: Option<Instant>,
    /// The connection neither receives nor sends before this time: memory of its tenant's programs
    /// made the carrier sleep. If set, `held` is no earlier.
    pub(crate) left_out: Option<Instant>,
    pub(crate) busy: Duration,
    pub(crate) interest: Option<Interest>,
}

impl Connection {
    /// Makes a connection of a socket and its handshake. `connects` is the engine and the tenant if
    /// this side connects, `None` if it accepted.
    pub(crate) fn new(
        key: u32,
        socket: OwnedFd,
        handshake: Handshake,
        connects: Option<(usize, &str)>,
        now: Instant,
    ) -> Self {
        let Some((engine, tenant)) = connects else {
            return Self::of(key, socket, ConnectionState::Handshake(handshake.into()), 2, now);
        };
        let connecting = ConnectionState::Connecting(handshake.into());
        let this = Self::of(key, socket, connecting, 1, now);
        Self { engine: Some(engine), tenant: tenant.into(), ..this }
    }

    /// Makes a connection in `state` without a peer or a tenant. Its first own stream is `next`:
    /// odd if this side began the connection.
    fn of(key: u32, socket: OwnedFd, state: ConnectionState, next: u32, now: Instant) -> Self {
        Self {
            key,
            socket,
            state,
            receiver: None,
            coalescing: Coalescing::new(now),
            engine: None,
            from: None,
            tenant: String::new(),
            since: now,
            frames: Frames::default(),
            streams: HashMap::new(),
            next,
            last: 0,
            window: 0,
            hot: VecDeque::new(),
            cooling: Vec::new(),
            resting: VecDeque::new(),
            asking: VecDeque::new(),
            unanswered: HashSet::new(),
            heard: now,
            pinged: now,
            emptied: now,
            away: false,
            leaving: false,
            held: None,
            left_out: None,
            busy: Duration::ZERO,
            interest: None,
        }
    }

    /// Makes a connection whose handshake is done, with a peer that never sends.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn for_tests(socket: OwnedFd, settings: &Settings, now: Instant) -> Self {
        let secret = slipway_warp::Secret::derive(&[7; 32], &[]);
        let sealer = slipway_warp::Sealer::new(slipway_warp::Cipher::Aes128Gcm, &secret);
        let opener = slipway_warp::Opener::new(slipway_warp::Cipher::Aes128Gcm, &secret);
        let sender = Sender::new(sealer, settings.record, settings.rekey);
        let up = Self::of(0, socket, ConnectionState::Up(sender.into()), 2, now);
        Self { receiver: Some(Receiver::new(opener, &[])), window: settings.window, ..up }
    }

    /// Returns the bytes that wait beside FIFOs.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn held(&self) -> usize {
        self.streams.values().map(Stream::held).sum()
    }

    /// Returns the id of stream `number` outside of this connection.
    fn id(&self, number: u32) -> StreamId {
        StreamId::new(self.key, number)
    }

    /// Returns whether the handshake is done.
    pub(crate) fn is_up(&self) -> bool {
        matches!(self.state, ConnectionState::Up(_))
    }

    /// Returns whether this side began the connection.
    pub(crate) fn is_own(&self) -> bool {
        self.next % 2 == 1
    }

    /// Returns the events of the socket that are of use in the present state.
    pub(crate) fn interest(&self) -> Interest {
        match &self.state {
            ConnectionState::Connecting(_) => Interest { read: false, write: true },
            ConnectionState::Handshake(handshake) => {
                Interest { read: true, write: handshake.wants_write() }
            }
            ConnectionState::Up(_) if self.left_out.is_some() => {
                Interest { read: false, write: false }
            }
            // A connection that must not send now is not told that its socket takes bytes again:
            // it would leave the event as it is, and the thread would not sleep.
            ConnectionState::Up(sender) => {
                Interest { read: true, write: sender.blocked && self.held.is_none() }
            }
            ConnectionState::None => Interest { read: false, write: false },
        }
    }

    /// Returns the connection's counters.
    pub(crate) fn report(&self, settings: &Settings) -> Report {
        let engine = self.engine.and_then(|number| settings.engine.get(number));
        let mut report = Report {
            engine: engine.map(|peer| peer.name.clone()).unwrap_or_default(),
            tenant: self.tenant.clone(),
            streams: self.streams.len(),
            busy: self.busy,
            ..Report::default()
        };
        if let (ConnectionState::Up(sender), Some(receiver)) = (&self.state, &self.receiver) {
            (report.sent, report.received) = (sender.bytes, receiver.bytes);
            report.generation = sender.generation();
        }
        report
    }

    /// Returns whether there may be something to send and the socket takes it.
    pub(crate) fn wants_to_send(&self, writable: bool) -> bool {
        let ConnectionState::Up(sender) = &self.state else { return false };
        let free = (!sender.blocked || writable) && self.held.is_none();
        free && (!self.hot.is_empty() || !self.frames.is_empty() || sender.is_due())
    }

    /// Returns whether the socket's send buffer is full.
    pub(crate) fn is_blocked(&self) -> bool {
        matches!(&self.state, ConnectionState::Up(sender) if sender.blocked)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use slipway_sgiov_spec::Address;
    use slipway_sgiov_spec::link::Open;

    use super::*;

    /// The socket of a connection that must not send yet takes bytes again.
    #[test]
    fn a_held_connection_is_not_woken_to_send() {
        let (now, (socket, _other)) = (Instant::now(), UnixStream::pair().unwrap());
        let mut connection = Connection::for_tests(socket.into(), &Settings::for_tests(), now);
        if let ConnectionState::Up(sender) = &mut connection.state {
            sender.blocked = true;
        }
        assert_eq!(connection.interest(), Interest { read: true, write: true });
        connection.held = Some(now);
        assert!(!connection.wants_to_send(true));
        assert_eq!(connection.interest(), Interest { read: true, write: false });
    }

    /// The connection is left out for longer than either side may be silent.
    #[test]
    fn a_connection_that_is_left_out_shows_life_and_waits_for_none() {
        let (begun, (socket, _other)) = (Instant::now(), UnixStream::pair().unwrap());
        // Less than the time after which a stream without an answer is given up.
        let settings = Settings { silence_ms: 1000, ..Settings::for_tests() };
        let mut connection = Connection::for_tests(socket.into(), &settings, begun);
        let (mut events, mut logs) = (VecDeque::new(), Logs::new(begun));
        let (events, logs) = (&mut events, &mut logs);
        let mut around = Around { now: begun, settings: &settings, events, logs };
        let open = Open { source: Address::ANY, destination: Address::ANY };
        connection.open(open, &around).unwrap();
        around.now = begun + settings.silence();
        connection.left_out = Some(around.now + settings.silence());
        connection.tend(&mut around).unwrap();
        assert!(connection.sent() > 0, "the other side hears nothing");
        connection.left_out = None;
        connection.tend(&mut around).unwrap();
    }
}
