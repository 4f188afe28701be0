//! One connection: another engine, a tenant, and their streams.
//!
//! What the engine asks of its streams is in `streams`, what the other side says in `incoming`, what is sent in
//! `outgoing` (and there which stream is next), what is due by the clock in `time`.

mod broken;
mod incoming;
mod outgoing;
mod streams;
mod time;

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::coalescing::Coalescing;
use crate::frames::Frames;
use crate::handshake::Handshake;
use crate::links::{Event, Network, StreamId};
use crate::logs::Logs;
use crate::receiver::Receiver;
use crate::sender::Sender;
use crate::settings::Settings;
use crate::stream::Stream;

pub(crate) use broken::Broken;

/// What a connection sees of its engine.
pub(crate) struct Around<'a> {
    pub(crate) now: Instant,
    pub(crate) settings: &'a Settings,
    pub(crate) events: &'a mut VecDeque<Event>,
    pub(crate) logs: &'a mut Logs,
}

/// What a connection did.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Report {
    /// The other engine; empty during a handshake that it began.
    pub engine: String,
    /// The tenant; as above.
    pub tenant: String,
    /// Streams.
    pub streams: usize,
    /// Bytes given to the socket: records, with all that belongs to them.
    pub sent: u64,
    /// Bytes taken from it.
    pub received: u64,
    /// Generation of the key that is sealed under: how often it was replaced.
    pub generation: u32,
    /// Time that the engine's core was busy with it.
    pub busy: Duration,
}

enum State {
    /// Between two others.
    None,
    /// The socket is not connected yet.
    Connecting(Box<Handshake>),
    Handshake(Box<Handshake>),
    /// Records go.
    Up(Box<Sender>),
}

impl State {
    fn connected(&mut self) {
        *self = match std::mem::replace(self, Self::None) {
            Self::Connecting(handshake) => Self::Handshake(handshake),
            other => other,
        };
    }
}

/// What its socket is to be watched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interest {
    pub(crate) read: bool,
    pub(crate) write: bool,
}

pub(crate) struct Connection {
    key: u32,
    pub(crate) socket: OwnedFd,
    state: State,
    /// There since the handshake is done.
    receiver: Option<Receiver>,
    coalescing: Coalescing,
    pub(crate) engine: Option<usize>,
    /// Whose address it came from, if the other side began it.
    pub(crate) from: Option<Network>,
    pub(crate) tenant: String,
    since: Instant,
    frames: Frames,
    streams: HashMap<u32, Stream>,
    /// Number of the next stream that this side opens.
    next: u32,
    /// Number of the last one that the other side opened.
    last: u32,
    /// Bytes that a stream may send at once, over there.
    window: u32,
    hot: VecDeque<u32>,
    /// Those that nothing was found of for a while.
    cooling: Vec<u32>,
    resting: VecDeque<(Instant, u32)>,
    /// Streams that this side asks for, and when they are given up.
    asking: VecDeque<(Instant, u32)>,
    /// Streams that the other side asked for and the owner has not answered, also those that are no more.
    unanswered: HashSet<u32>,
    /// When something was heard last, when a ping was sent, since when there are no streams.
    heard: Instant,
    pinged: Instant,
    emptied: Instant,
    /// The other side opens no stream here any more; this one does not.
    away: bool,
    leaving: bool,
    /// Its tenant has sent enough until then.
    pub(crate) held: Option<Instant>,
    pub(crate) busy: Duration,
    pub(crate) interest: Option<Interest>,
}

impl Connection {
    /// A socket that connects, or is connected, and what begins there. `connects`: this side did.
    pub(crate) fn new(
        key: u32,
        socket: OwnedFd,
        handshake: Handshake,
        connects: Option<(usize, &str)>,
        now: Instant,
    ) -> Self {
        let Some((engine, tenant)) = connects else {
            return Self::of(key, socket, State::Handshake(handshake.into()), 2, now);
        };
        let connecting = State::Connecting(handshake.into());
        let this = Self::of(key, socket, connecting, 1, now);
        Self { engine: Some(engine), tenant: tenant.into(), ..this }
    }

    fn of(key: u32, socket: OwnedFd, state: State, next: u32, now: Instant) -> Self {
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
            busy: Duration::ZERO,
            interest: None,
        }
    }

    /// One whose handshake is done, with a peer that is never heard.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn for_tests(socket: OwnedFd, settings: &Settings, now: Instant) -> Self {
        let secret = slipway_warp::Secret::derive(&[7; 32], &[]);
        let sealer = slipway_warp::Sealer::new(slipway_warp::Cipher::Aes128Gcm, &secret);
        let opener = slipway_warp::Opener::new(slipway_warp::Cipher::Aes128Gcm, &secret);
        let sender = Sender::new(sealer, settings.record, settings.rekey);
        let up = Self::of(0, socket, State::Up(sender.into()), 2, now);
        Self { receiver: Some(Receiver::new(opener, &[])), window: settings.window, ..up }
    }

    /// Bytes that wait beside FIFOs.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn held(&self) -> usize {
        self.streams.values().map(Stream::held).sum()
    }

    fn id(&self, number: u32) -> StreamId {
        StreamId::new(self.key, number)
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(self.state, State::Up(_))
    }

    /// Whether this side began it.
    pub(crate) fn is_own(&self) -> bool {
        self.next % 2 == 1
    }

    pub(crate) fn interest(&self) -> Interest {
        match &self.state {
            State::Connecting(_) => Interest { read: false, write: true },
            State::Handshake(handshake) => Interest { read: true, write: handshake.wants_write() },
            State::Up(sender) => Interest { read: true, write: sender.blocked },
            State::None => Interest { read: false, write: false },
        }
    }

    pub(crate) fn report(&self, settings: &Settings) -> Report {
        let engine = self.engine.and_then(|number| settings.engine.get(number));
        let mut report = Report {
            engine: engine.map(|peer| peer.name.clone()).unwrap_or_default(),
            tenant: self.tenant.clone(),
            streams: self.streams.len(),
            busy: self.busy,
            ..Report::default()
        };
        if let (State::Up(sender), Some(receiver)) = (&self.state, &self.receiver) {
            (report.sent, report.received) = (sender.bytes, receiver.bytes);
            report.generation = sender.generation();
        }
        report
    }

    /// Whether there may be something to send, and the socket takes it.
    pub(crate) fn wants_to_send(&self, writable: bool) -> bool {
        let State::Up(sender) = &self.state else { return false };
        let free = (!sender.blocked || writable) && self.held.is_none();
        free && (!self.hot.is_empty() || !self.frames.is_empty() || sender.is_due())
    }

    /// Whether the socket took no more.
    pub(crate) fn is_blocked(&self) -> bool {
        matches!(&self.state, State::Up(sender) if sender.blocked)
    }
}
