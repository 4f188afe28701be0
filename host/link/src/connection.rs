//! One connection: another engine, a tenant, and their streams.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use slipway_ring::cross;
use slipway_sgiov_spec::link::{Frame, Hello, Kind, Open};
use slipway_warp::TransformError;

use crate::frames::Frames;
use crate::handshake::{Handshake, HandshakeError, Session, connected, errno};
use crate::links::{Ended, Event, StreamId};
use crate::logs::Logs;
use crate::receiver::{Received, Receiver};
use crate::sender::Sender;
use crate::settings::Settings;
use crate::stream::{End, Found, Phase, Stream};

/// Looks at a stream that find nothing before it is to tell by itself.
const LOOKS: u8 = 64;
/// Frames that may wait to be sent: a peer that asks and does not listen gets no further.
const WAITING: usize = 1 << 18;
/// Credit that a peer may grant in all.
const CREDIT: u64 = 1 << 40;
/// After so long without a byte an empty FIFO gives up its memory.
const REST: Duration = Duration::from_secs(1);

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("connection broken: {0}")]
    Io(#[from] Errno),
    #[error("connection broken: {0}")]
    Record(#[from] TransformError),
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("connection broken: a frame that cannot be")]
    Frame,
    #[error("connection broken: more bytes than were granted")]
    Credit,
    #[error("connection broken: frames and nobody who listens to the answers")]
    Flood,
    #[error("not a word any more")]
    Silent,
    #[error("the other side closed the connection")]
    Closed,
    /// Nobody needs it any more.
    #[error("not needed any more")]
    Idle,
}

impl Broken {
    /// What a program is told that was about to connect.
    pub(crate) fn errno(&self) -> u32 {
        let told = match self {
            Self::Handshake(error) => return errno(error),
            Self::Silent => Errno::TIMEDOUT,
            Self::Io(error) => *error,
            _ => Errno::CONNRESET,
        };
        told.raw_os_error().unsigned_abs()
    }
}

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

/// What came of serving a stream.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Served {
    Something,
    Nothing,
    /// There is no room in the records.
    Full,
    /// The stream is no more.
    Gone,
}

pub(crate) struct Connection {
    key: u32,
    pub(crate) socket: OwnedFd,
    state: State,
    /// There since the handshake is done.
    receiver: Option<Receiver>,
    pub(crate) engine: Option<usize>,
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
            engine: None,
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

    // What the owner asks for.

    /// Opens a stream. None: there are as many as there may be, or no numbers left.
    pub(crate) fn open(&mut self, open: Open, around: &Around<'_>) -> Option<StreamId> {
        let number = self.next;
        if self.streams.len() >= around.settings.streams {
            return None;
        }
        self.next = number.checked_add(2)?;
        self.occupy(around.now);
        let stream = Stream::new(Phase::Asking, self.window, around.settings.window);
        self.streams.insert(number, stream);
        self.frames.open(number, open);
        Some(self.id(number))
    }

    /// A stream comes to a connection that may have been silent for long.
    fn occupy(&mut self, now: Instant) {
        if self.streams.is_empty() {
            (self.heard, self.pinged) = (now, now);
        }
    }

    /// Gives the end back when there is no such stream any more.
    pub(crate) fn attach(&mut self, number: u32, end: End) -> Result<(), End> {
        let Some(stream) = self.streams.get_mut(&number) else { return Err(end) };
        stream.attach(end);
        if stream.phase == Phase::Asked {
            stream.phase = Phase::Open;
            self.frames.put(Kind::Accepted, number, 0);
        }
        self.heat(number);
        Ok(())
    }

    pub(crate) fn refuse(&mut self, number: u32, errno: u32, now: Instant) {
        if self.streams.get(&number).is_some_and(|stream| stream.phase == Phase::Asked) {
            self.frames.put(Kind::Refused, number, errno.clamp(1, 4095).into());
            self.forget(number, now);
        }
    }

    /// Looks at the stream in the turns to come.
    pub(crate) fn heat(&mut self, number: u32) {
        let Some(stream) = self.streams.get_mut(&number) else { return };
        stream.idle = 0;
        if !stream.hot {
            stream.hot = true;
            self.hot.push_back(number);
        }
    }

    /// The local program has let go of the stream.
    pub(crate) fn leave(&mut self, number: u32, around: &mut Around<'_>) {
        let Some(stream) = self.streams.get_mut(&number) else { return };
        stream.left = true;
        // As TCP: who goes without having read all breaks off.
        if stream.phase != Phase::Open || stream.is_unread() {
            self.break_off(number, around);
        } else {
            self.heat(number);
        }
    }

    /// Ends the stream here and there.
    pub(crate) fn break_off(&mut self, number: u32, around: &mut Around<'_>) {
        let Some(stream) = self.streams.get(&number) else { return };
        match stream.phase {
            Phase::Asked => {
                let errno = Errno::CONNREFUSED.raw_os_error().unsigned_abs();
                self.frames.put(Kind::Refused, number, errno.into());
            }
            _ => self.frames.put(Kind::Reset, number, 0),
        }
        self.drop_stream(number, Ended::Reset, around);
    }

    /// Ends the stream here.
    fn drop_stream(&mut self, number: u32, ended: Ended, around: &mut Around<'_>) {
        if let Some(stream) = self.forget(number, around.now) {
            if ended != Ended::Finished {
                stream.reset();
            }
            let (attached, region) = (stream.is_attached(), stream.region());
            let stream = self.id(number);
            around.events.push_back(Event::Ended { stream, ended, attached, region });
        }
    }

    fn forget(&mut self, number: u32, now: Instant) -> Option<Stream> {
        let stream = self.streams.remove(&number);
        if self.streams.is_empty() {
            self.emptied = now;
        }
        stream
    }

    /// The end of all its streams.
    pub(crate) fn end(&mut self, broken: &Broken, around: &mut Around<'_>) {
        let numbers: Vec<u32> = self.streams.keys().copied().collect();
        for number in numbers {
            let asking = self.streams.get(&number).is_some_and(|s| s.phase == Phase::Asking);
            let ended = if asking { Ended::Refused(broken.errno()) } else { Ended::Reset };
            self.drop_stream(number, ended, around);
        }
    }

    // A turn.

    /// Does what there is to do, up to `budget` bytes in each direction. Whether there was something.
    pub(crate) fn turn(
        &mut self,
        readable: bool,
        writable: bool,
        budget: usize,
        around: &mut Around<'_>,
    ) -> Result<bool, Broken> {
        if !self.is_up() {
            return if readable || writable { self.shake_hands(around) } else { Ok(false) };
        }
        let mut worked = false;
        if readable {
            worked |= self.receive(budget, around)?;
        }
        let State::Up(sender) = &self.state else { return Ok(worked) };
        if sender.blocked && !writable || self.held.is_some() {
            return Ok(worked);
        }
        Ok(self.send(budget, around)? || worked)
    }

    fn shake_hands(&mut self, around: &mut Around<'_>) -> Result<bool, Broken> {
        let settings = around.settings;
        let (State::Connecting(handshake) | State::Handshake(handshake)) = &mut self.state else {
            return Ok(false);
        };
        connected(self.socket.as_fd()).map_err(HandshakeError::Io)?;
        let judge = |hello: &Hello| {
            let peer = settings.engine_named(hello.engine.as_str());
            let peer = peer.and_then(|number| settings.engine.get(number));
            peer.is_some_and(|peer| peer.serves(hello.tenant.as_str()))
        };
        match handshake.step(self.socket.as_fd(), &judge)? {
            Some(session) => self.begin(session, around)?,
            None => self.state.connected(),
        }
        Ok(true)
    }

    /// The handshake is done.
    fn begin(&mut self, session: Session, around: &mut Around<'_>) -> Result<(), Broken> {
        let Session { hello, sealer, opener, rest } = session;
        let engine = around.settings.engine_named(hello.engine.as_str());
        if self.engine.is_some() && self.engine != engine {
            return Err(HandshakeError::Name(hello.engine.as_str().into()).into());
        }
        self.engine = engine;
        self.tenant = hello.tenant.as_str().into();
        self.window = hello.window;
        for stream in self.streams.values_mut() {
            stream.credit = hello.window.into();
        }
        (self.heard, self.pinged, self.emptied) = (around.now, around.now, around.now);
        let sender = Sender::new(sealer, around.settings.record, around.settings.rekey);
        let receiver = Receiver::new(opener, &rest);
        (self.state, self.receiver) = (State::Up(sender.into()), Some(receiver));
        // What came with the handshake.
        self.dispatch(around)?;
        Ok(())
    }

    fn receive(&mut self, budget: usize, around: &mut Around<'_>) -> Result<bool, Broken> {
        let (mut worked, mut taken) = (false, 0);
        loop {
            let Some(receiver) = &mut self.receiver else { return Ok(worked) };
            let before = receiver.bytes;
            match receiver.receive(self.socket.as_fd())? {
                Received::Nothing => return Ok(worked),
                Received::End if self.streams.is_empty() => return Err(Broken::Idle),
                Received::End => return Err(Broken::Closed),
                Received::Some => {}
            }
            taken += (receiver.bytes - before) as usize;
            (worked, self.heard) = (true, around.now);
            self.dispatch(around)?;
            if taken >= budget {
                return Ok(true);
            }
        }
    }

    /// All frames of all records that are there.
    fn dispatch(&mut self, around: &mut Around<'_>) -> Result<(), Broken> {
        // Taken out, so that its bytes can be lent while streams and frames change.
        let Some(mut receiver) = self.receiver.take() else { return Ok(()) };
        let done = self.dispatch_all(&mut receiver, around);
        self.receiver = Some(receiver);
        done
    }

    fn dispatch_all(
        &mut self,
        receiver: &mut Receiver,
        around: &mut Around<'_>,
    ) -> Result<(), Broken> {
        while let Some(mut payload) = receiver.next()? {
            while !payload.is_empty() {
                let (frame, body, rest) = Frame::decode(payload).ok_or(Broken::Frame)?;
                self.frame(frame, body, around)?;
                payload = rest;
            }
            if self.frames.len() > WAITING {
                return Err(Broken::Flood);
            }
        }
        Ok(())
    }

    /// What a frame of the other side says.
    pub(crate) fn frame(
        &mut self,
        frame: Frame,
        body: &[u8],
        around: &mut Around<'_>,
    ) -> Result<(), Broken> {
        match frame.kind {
            Kind::Ping => self.frames.put(Kind::Pong, 0, frame.value),
            Kind::Pong => {}
            Kind::GoAway => self.away = true,
            Kind::Open => self.asked(frame.stream, body, around)?,
            _ if !self.streams.contains_key(&frame.stream) => return self.late(frame.stream),
            Kind::Accepted | Kind::Refused => self.answered(frame, around)?,
            Kind::Reset => {
                let asking =
                    self.streams.get(&frame.stream).is_some_and(|s| s.phase == Phase::Asking);
                let errno = Errno::CONNRESET.raw_os_error().unsigned_abs();
                let ended = if asking { Ended::Refused(errno) } else { Ended::Reset };
                self.drop_stream(frame.stream, ended, around);
            }
            Kind::Data | Kind::Credit | Kind::Fin => self.flow(frame, body, around)?,
        }
        Ok(())
    }

    /// A frame for a stream that is not there: it was, or the other side lies.
    fn late(&self, number: u32) -> Result<(), Broken> {
        let own = number % 2 == self.next % 2;
        let was = if own { number < self.next } else { number <= self.last };
        if was { Ok(()) } else { Err(Broken::Frame) }
    }

    fn asked(&mut self, number: u32, body: &[u8], around: &mut Around<'_>) -> Result<(), Broken> {
        let theirs = number % 2 != self.next % 2 && number > self.last;
        let open = Open::decode(body).filter(|_| theirs).ok_or(Broken::Frame)?;
        self.last = number;
        if self.streams.len() >= around.settings.streams {
            let errno = Errno::NOBUFS.raw_os_error().unsigned_abs();
            self.frames.put(Kind::Refused, number, errno.into());
            return Ok(());
        }
        self.occupy(around.now);
        let stream = Stream::new(Phase::Asked, self.window, around.settings.window);
        self.streams.insert(number, stream);
        let engine = self.engine.and_then(|engine| around.settings.engine.get(engine));
        around.events.push_back(Event::Asked {
            stream: self.id(number),
            engine: engine.map(|peer| peer.name.clone()).unwrap_or_default(),
            tenant: self.tenant.clone(),
            source: open.source,
            destination: open.destination,
        });
        Ok(())
    }

    fn answered(&mut self, frame: Frame, around: &mut Around<'_>) -> Result<(), Broken> {
        let stream = self.streams.get_mut(&frame.stream).ok_or(Broken::Frame)?;
        if stream.phase != Phase::Asking {
            return Err(Broken::Frame);
        }
        if frame.kind == Kind::Refused {
            let errno = u32::try_from(frame.value).unwrap_or(0);
            self.drop_stream(frame.stream, Ended::Refused(errno), around);
        } else {
            stream.phase = Phase::Open;
            around.events.push_back(Event::Opened(self.id(frame.stream)));
            self.heat(frame.stream);
        }
        Ok(())
    }

    fn flow(&mut self, frame: Frame, body: &[u8], around: &mut Around<'_>) -> Result<(), Broken> {
        let stream = self.streams.get_mut(&frame.stream).ok_or(Broken::Frame)?;
        if stream.phase != Phase::Open || stream.ended && frame.kind != Kind::Credit {
            return Err(Broken::Frame);
        }
        match frame.kind {
            Kind::Credit => {
                stream.credit += frame.value;
                if stream.credit > CREDIT {
                    return Err(Broken::Frame);
                }
            }
            Kind::Fin => stream.ended = true,
            // As TCP: who sends to a program that is gone learns of it.
            _ if stream.left => {
                self.break_off(frame.stream, around);
                return Ok(());
            }
            _ => match stream.push(body, around.settings.fifo) {
                Ok(true) => {}
                Ok(false) => return Err(Broken::Credit),
                Err(error) => self.fail(frame.stream, error, around),
            },
        }
        self.heat(frame.stream);
        Ok(())
    }

    /// The local program spoiled its FIFO, or broke it off.
    fn fail(&mut self, number: u32, error: cross::Error, around: &mut Around<'_>) {
        if error == cross::Error::Spoiled {
            let what = format!("tenant {}: {error}", self.tenant);
            around.logs.warn(around.now, &around.settings.name, &what);
        }
        self.break_off(number, around);
    }

    /// Fills records with what streams have, seals and sends them.
    fn send(&mut self, budget: usize, around: &mut Around<'_>) -> Result<bool, Broken> {
        let (mut worked, mut sent) = (false, 0);
        loop {
            let some = self.fill(around)?;
            let State::Up(sender) = &mut self.state else { return Ok(worked) };
            let all = sender.put(&mut self.frames)?;
            sender.seal()?;
            let count = sender.send(self.socket.as_fd())?;
            sent += count;
            worked |= some || count > 0;
            let more = some || !all;
            if !more || sender.is_due() || sent >= budget {
                return Ok(worked);
            }
        }
    }

    /// Serves each hot stream once, as far as there is room. Whether there was something.
    fn fill(&mut self, around: &mut Around<'_>) -> Result<bool, Broken> {
        let mut some = false;
        for _ in 0..self.hot.len() {
            let Some(number) = self.hot.pop_front() else { break };
            match self.serve(number, around)? {
                Served::Something => {
                    some = true;
                    self.hot.push_back(number);
                }
                Served::Nothing => self.cool(number),
                Served::Full => {
                    self.hot.push_front(number);
                    return Ok(true);
                }
                Served::Gone => some = true,
            }
        }
        if self.wish(around) {
            cross::heavy();
            self.settle(around);
        }
        Ok(some)
    }

    fn serve(&mut self, number: u32, around: &mut Around<'_>) -> Result<Served, Broken> {
        let State::Up(sender) = &mut self.state else { return Ok(Served::Nothing) };
        let Some(stream) = self.streams.get_mut(&number) else { return Ok(Served::Gone) };
        if stream.phase != Phase::Open {
            return Ok(Served::Nothing);
        }
        let frames = &mut self.frames;
        let served = serve(stream, number, sender, frames, around.settings);
        match served? {
            Ok(_) if stream.is_over() => {
                self.drop_stream(number, Ended::Finished, around);
                Ok(Served::Gone)
            }
            Ok(_) if stream.is_stuck() => {
                let what = format!("tenant {}: no memory left for a stream", self.tenant);
                around.logs.warn(around.now, &around.settings.name, &what);
                self.break_off(number, around);
                Ok(Served::Gone)
            }
            Ok(Served::Something) => {
                stream.idle = 0;
                Ok(Served::Something)
            }
            Ok(other) => Ok(other),
            Err(error) => {
                self.fail(number, error, around);
                Ok(Served::Gone)
            }
        }
    }

    /// A look found nothing: the stream is looked at again, or tells by itself from now on.
    fn cool(&mut self, number: u32) {
        let Some(stream) = self.streams.get_mut(&number) else { return };
        stream.idle = stream.idle.saturating_add(1);
        if stream.idle <= LOOKS { self.hot.push_back(number) } else { self.cooling.push(number) }
    }

    /// Has those streams ask to be told that nothing was found of for a while; one barrier is for all.
    fn wish(&mut self, around: &mut Around<'_>) -> bool {
        for at in 0..self.cooling.len() {
            let number = self.cooling[at];
            let wished = self.streams.get_mut(&number).map(Stream::wish);
            if let Some(Err(error)) = wished {
                self.fail(number, error, around);
            }
        }
        !self.cooling.is_empty()
    }

    /// After the barrier: those that something is there of are hot still.
    fn settle(&mut self, around: &mut Around<'_>) {
        for number in std::mem::take(&mut self.cooling) {
            let Some(stream) = self.streams.get_mut(&number) else { continue };
            match stream.settle() {
                Ok(true) => self.hot.push_back(number),
                Ok(false) => {
                    stream.hot = false;
                    if !stream.resting && stream.has_region() {
                        stream.resting = true;
                        self.resting.push_back((around.now + REST, number));
                    }
                }
                Err(error) => self.fail(number, error, around),
            }
        }
    }

    /// Whether nothing can be sent, whatever streams have.
    fn is_held_up(&self) -> bool {
        !matches!(&self.state, State::Up(sender) if !sender.blocked) || self.held.is_some()
    }

    /// Bytes given to the socket.
    pub(crate) fn sent(&self) -> u64 {
        if let State::Up(sender) = &self.state { sender.bytes } else { 0 }
    }

    /// Has all streams ask to be told. True: a barrier is due, and [`Connection::rested`].
    pub(crate) fn rest(&mut self, around: &mut Around<'_>) -> bool {
        if self.is_held_up() {
            return false;
        }
        self.cooling.extend(self.hot.drain(..));
        self.wish(around)
    }

    /// Whether nothing is left to be done now.
    pub(crate) fn rested(&mut self, around: &mut Around<'_>) -> bool {
        if self.is_held_up() {
            return true;
        }
        self.settle(around);
        self.hot.is_empty() && self.frames.is_empty()
    }

    // Time.

    /// Does what is due by the clock.
    pub(crate) fn tend(&mut self, around: &mut Around<'_>) -> Result<(), Broken> {
        let (now, settings) = (around.now, around.settings);
        if !self.is_up() {
            let late = now >= self.since + settings.handshake();
            return if late {
                Err(HandshakeError::Io(Errno::TIMEDOUT.into()).into())
            } else {
                Ok(())
            };
        }
        while let Some((when, number)) = self.resting.front().copied()
            && when <= now
        {
            self.resting.pop_front();
            self.trim(number, now);
        }
        if self.streams.is_empty() {
            return self.part(now, settings);
        }
        let (silence, ping) = (settings.silence(), settings.silence() / 3);
        if now >= self.heard + silence {
            return Err(Broken::Silent);
        }
        if now >= self.heard.max(self.pinged) + ping {
            self.pinged = now;
            self.frames.put(Kind::Ping, 0, 0);
        }
        Ok(())
    }

    /// Without streams: a connection that was not used for long is left, and ends when the other side leaves it
    /// too. (A stream of its own may be on its way.)
    fn part(&mut self, now: Instant, settings: &Settings) -> Result<(), Broken> {
        let due = now >= self.emptied + settings.linger();
        if self.away || due && self.leaving {
            return Err(Broken::Idle);
        }
        if due {
            (self.leaving, self.emptied) = (true, now);
            self.frames.put(Kind::GoAway, 0, 0);
        }
        Ok(())
    }

    /// Whether streams may be opened here.
    pub(crate) fn is_open(&self) -> bool {
        !self.away && !self.leaving
    }

    fn trim(&mut self, number: u32, now: Instant) {
        let Some(stream) = self.streams.get_mut(&number) else { return };
        stream.resting = false;
        if !stream.hot {
            stream.trim();
            if stream.has_region() {
                stream.resting = true;
                self.resting.push_back((now + REST, number));
            }
        }
    }

    /// When [`Connection::tend`] has something to do.
    pub(crate) fn deadline(&self, settings: &Settings) -> Option<Instant> {
        if !self.is_up() {
            return Some(self.since + settings.handshake());
        }
        let alive = match self.streams.is_empty() {
            true if self.away => self.emptied,
            true => self.emptied + settings.linger(),
            false => (self.heard.max(self.pinged) + settings.silence() / 3)
                .min(self.heard + settings.silence()),
        };
        let resting = self.resting.front().map(|(when, _)| *when);
        [Some(alive), resting, self.held].into_iter().flatten().min()
    }
}

/// Passes on what came for `stream`, grants what it has room for, and sends what it has.
fn serve(
    stream: &mut Stream,
    number: u32,
    sender: &mut Sender,
    frames: &mut Frames,
    settings: &Settings,
) -> Result<Result<Served, cross::Error>, TransformError> {
    let passed = match receive_side(stream, number, frames, settings) {
        Ok(true) => Served::Something,
        Ok(false) => Served::Nothing,
        Err(error) => return Ok(Err(error)),
    };
    if stream.finished {
        return Ok(Ok(passed));
    }
    match stream.look() {
        Ok(Found::Bytes(_)) if stream.credit > 0 => {}
        Ok(Found::Bytes(_) | Found::Nothing) => return Ok(Ok(passed)),
        Ok(Found::End) => {
            stream.finished = true;
            frames.put(Kind::Fin, number, 0);
            return Ok(Ok(Served::Something));
        }
        Ok(Found::Reset) => return Ok(Err(cross::Error::Reset)),
        Err(error) => return Ok(Err(error)),
    }
    if !sender.put(frames)? {
        return Ok(Ok(Served::Full));
    }
    let most = usize::try_from(stream.credit).unwrap_or(usize::MAX);
    let Some(count) = sender.data(number, most, |into| stream.pull(into))? else {
        return Ok(Ok(Served::Full));
    };
    Ok(count.map(|count| if count > 0 { Served::Something } else { passed }))
}

fn receive_side(
    stream: &mut Stream,
    number: u32,
    frames: &mut Frames,
    settings: &Settings,
) -> Result<bool, cross::Error> {
    let passed = stream.pass(settings.fifo)?;
    let more = stream.grant(settings.window)?;
    if more > 0 {
        frames.put(Kind::Credit, number, more);
    }
    Ok(passed || more > 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// What a hostile engine says after an honest beginning, and what becomes of it.
    fn after_open(frames: &[(Kind, u32, u64, &[u8])]) -> Result<usize, Broken> {
        let settings = Settings::for_tests();
        let now = Instant::now();
        let (mut events, mut logs) = (VecDeque::new(), Logs::new(now));
        let (socket, _other) = UnixStream::pair().unwrap();
        let mut connection = Connection::for_tests(socket.into(), &settings, now);
        let mut around = Around { now, settings: &settings, events: &mut events, logs: &mut logs };
        let nobody = slipway_sgiov_spec::Address::ANY;
        let open = Open { source: nobody, destination: nobody }.encode();
        let frame = |kind, stream, value| Frame { kind, stream, value };
        connection.frame(frame(Kind::Open, 5, 0), &open, &mut around).unwrap();
        connection.open(Open { source: nobody, destination: nobody }, &around).unwrap();
        connection.frame(frame(Kind::Accepted, 2, 0), &[], &mut around).unwrap();
        for (kind, stream, value, body) in frames {
            connection.frame(frame(*kind, *stream, *value), body, &mut around)?;
        }
        Ok(connection.held())
    }

    #[test]
    fn what_an_engine_must_not_say_ends_the_connection() {
        let open: &[u8] = &[0; 48];
        let window = Settings::for_tests().window as usize;
        for frames in [
            // A number of this side's, one used before, one that never was.
            &[(Kind::Open, 6, 0, open)][..],
            &[(Kind::Open, 3, 0, open)],
            &[(Kind::Open, 5, 0, open)],
            &[(Kind::Data, 7, 1, &[1])],
            &[(Kind::Reset, 4, 0, &[])],
            // To a stream that it opened and that nobody accepted, and an answer from the wrong side.
            &[(Kind::Data, 5, 1, &[1])],
            &[(Kind::Credit, 5, 1, &[])],
            &[(Kind::Accepted, 5, 0, &[])],
            &[(Kind::Accepted, 2, 0, &[])],
            &[(Kind::Refused, 2, 111, &[])],
            // After its end; more credit than there is anything for; more bytes than credit.
            &[(Kind::Fin, 2, 0, &[]), (Kind::Data, 2, 1, &[1])],
            &[(Kind::Fin, 2, 0, &[]), (Kind::Fin, 2, 0, &[])],
            &[(Kind::Credit, 2, 1 << 40, &[])],
            &[(Kind::Data, 2, 1, &vec![1; window + 1])],
            &[(Kind::Data, 2, 1, &vec![1; window]), (Kind::Data, 2, 1, &[1])],
        ] {
            assert!(after_open(frames).is_err(), "{:?}", &frames[0].0);
        }
        assert_eq!(after_open(&[(Kind::Data, 2, 1, &vec![1; window])]).unwrap(), window);
        // Last words may cross.
        assert!(after_open(&[(Kind::Reset, 2, 0, &[]), (Kind::Data, 2, 1, &[1])]).is_ok());
        assert!(after_open(&[(Kind::Open, 9, 0, open), (Kind::Credit, 7, 1, &[])]).is_ok());
    }
}
