//! All connections of an engine.
//!
//! Over 500 lines: the engine's connections share one epoll, one schedule and one set of limits.

use std::collections::{HashMap, VecDeque};
use std::io::Error;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::SocketFlags;
use slipway_rate::{Bucket, Rate};
use slipway_ring::cross;
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::link::{self, Hello, Name, Open};
use slipway_warp::share::Ticket;

use crate::backoff::Backoff;
use crate::connection::{Around, Broken, Connection, Interest, Report};
use crate::error::LinksError;
use crate::event::{Ended, Event, StreamId};
use crate::handshake::{Handshake, HandshakeError, errno};
use crate::identity::Identity;
use crate::logs::Logs;
use crate::renewal::Renewal;
use crate::settings::{Cipher, Settings};
use crate::shares::{Direction, Job, Served, Shares, View};
use crate::socket::{self, Network};
use crate::stream::End;

/// The listener's number in epoll; connections have their own numbers.
const LISTENER: u64 = u64::MAX;
/// Events taken at a time.
const EVENTS: usize = 64;
/// Incoming connections that may be in their handshake.
const STRANGERS: usize = 64;
/// Incoming connections that may be in their handshake from one address that is no engine's (one
/// IPv6 network of 64 bits).
const STRANGERS_OF_ONE: usize = 8;
/// Connections with one engine for one tenant that one side began.
const OF_ONE: usize = 4;
/// Pause after accept(2) has failed, for want of descriptors most likely.
const PAUSE: Duration = Duration::from_millis(100);
/// Connections that are accepted in a turn.
const ARRIVALS: usize = 16;
/// Bytes after which a quantum is over: those of one recv(2), or of one look at each stream.
const QUANTUM: usize = 1;
/// Received bytes of a quantum from which on the socket has more, most likely.
const FULL: u64 = 64 << 10;
/// The most quanta before the kernel and the programs are polled again.
const QUANTA: usize = 1024;
/// Spins of the processor, some tenths of a microsecond in all: longer than a store waits for its
/// cache line.
const PAUSES: usize = 16;

/// Links to other engines. Used by one thread.
pub struct Links {
    settings: Settings,
    identity: Identity,
    listener: Option<OwnedFd>,
    /// The listener is not watched until this time.
    paused: Option<Instant>,
    epoll: OwnedFd,
    connections: HashMap<u32, Connection>,
    /// Keys of `connections`, in the order of turns.
    order: VecDeque<u32>,
    next: u32,
    backoffs: Vec<Backoff>,
    /// The choice of the next connection.
    shares: Shares,
    /// Limits on what tenants send.
    rates: HashMap<String, Bucket>,
    /// The time that rates and shares count from.
    begin: Instant,
    events: VecDeque<Event>,
    logs: Logs,
}

impl Links {
    /// Reads certificates and key, and listens where the settings say.
    ///
    /// # Errors
    /// [`LinksError`].
    pub fn new(settings: Settings) -> Result<Self, LinksError> {
        settings.check()?;
        let identity = Identity::load(&settings)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::from)?;
        let listener =
            settings.listen.map(socket::listen).transpose().map_err(LinksError::Listen)?;
        if let Some(listener) = &listener {
            let data = epoll::EventData::new_u64(LISTENER);
            epoll::add(&epoll, listener, data, epoll::EventFlags::IN).map_err(Error::from)?;
        }
        Ok(Self {
            backoffs: settings.engine.iter().map(|_| Backoff::default()).collect(),
            logs: Logs::new(Instant::now()),
            shares: Shares::new(&settings),
            settings,
            identity,
            listener,
            paused: None,
            epoll,
            connections: HashMap::new(),
            order: VecDeque::new(),
            next: 0,
            rates: HashMap::new(),
            begin: Instant::now(),
            events: VecDeque::new(),
        })
    }

    /// Returns the settings in use.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the address where the engine listens, with the port that the kernel chose if the
    /// settings left it open.
    pub fn local(&self) -> Option<SocketAddr> {
        let name = rustix::net::getsockname(self.listener.as_ref()?).ok()?;
        SocketAddr::try_from(name).ok()
    }

    /// Sets another address where an engine listens from now on.
    pub fn relocate(&mut self, engine: &str, at: SocketAddr) {
        if let Some(peer) = self.settings.engine.iter_mut().find(|peer| peer.name == engine) {
            peer.at = at;
        }
    }

    /// Sets a tenant's weight among those that want the same resource: 1 by default, 0.001 to 1000.
    pub fn set_weight(&mut self, tenant: &str, weight: f64) {
        let weight = if weight.is_finite() { weight.clamp(0.001, 1000.0) } else { 1.0 };
        self.shares.set_weight(tenant, weight);
    }

    /// Limits the bytes per second that a tenant may send to all other engines together; there is
    /// no limit by default.
    pub fn set_rate(&mut self, tenant: &str, per_second: u64) {
        self.rates.insert(tenant.into(), Bucket::new(Rate { per_second, burst: 0 }));
        self.shares.set_cap(tenant, per_second);
    }

    /// Uses other settings and certificates from now on. Established connections go on, except that
    /// the streams of a connection are reset if its engine is not in the settings any more, or does
    /// not serve its tenant.
    pub fn renew(&mut self, renewal: Renewal, now: Instant) {
        let Renewal { settings, identity, shares } = renewal;
        let old = std::mem::replace(&mut self.settings, settings);
        self.identity = identity;
        self.backoffs = self.settings.engine.iter().map(|_| Backoff::default()).collect();
        self.shares = Shares::new(&self.settings);
        self.rates.clear();
        for share in shares {
            self.set_weight(&share.tenant, share.weight);
            share.rate.into_iter().for_each(|rate| self.set_rate(&share.tenant, rate));
        }
        let mut dropped = Vec::new();
        for (key, connection) in &mut self.connections {
            // Connections still in handshake have no known peer; their handshake is checked against
            // the new settings.
            let Some(engine) = connection.engine.and_then(|number| old.engine.get(number)) else {
                continue;
            };
            let number = self.settings.engine_named(&engine.name);
            let peer = number.and_then(|number| self.settings.engine.get(number));
            connection.engine = number;
            if !peer.is_some_and(|peer| peer.serves(&connection.tenant)) {
                dropped.push((*key, engine.name.clone()));
            }
        }
        for (key, connection) in &self.connections {
            if let Some(way) = connection.engine.filter(|_| connection.is_up()) {
                self.shares.join(*key, &connection.tenant, way);
                // The former queue is lost: queue both directions again.
                self.shares.want(*key, Direction::In);
                self.shares.want(*key, Direction::Out);
            }
        }
        for (key, name) in dropped {
            self.logs.warn(now, &name, &Broken::Dropped);
            self.end(key, &Broken::Dropped, now);
        }
        self.order.retain(|key| self.connections.contains_key(key));
    }

    /// Returns the descriptor that is readable when [`Links::turn`] has something to do.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Takes the next event.
    pub fn event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Returns the tenants' shares of the core and of the ways to other engines.
    pub fn shares(&self, now: Instant) -> View {
        self.shares.view(self.since_begin(now))
    }

    fn since_begin(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.begin)
    }

    /// Returns the counters of all connections.
    pub fn reports(&self) -> Vec<Report> {
        let known = self.order.iter().filter_map(|key| self.connections.get(key));
        known.map(|connection| connection.report(&self.settings)).collect()
    }

    // Streams.

    /// Opens a stream to a program at another engine. [`Event::Opened`] or [`Event::Ended`]
    /// follows.
    ///
    /// # Errors
    /// An error number of errno(3): `EHOSTUNREACH` if no engine has the address; for a short time
    /// after a failed attempt to reach that engine, the error of that attempt; `ENOBUFS` if there
    /// are too many streams or connections.
    pub fn open(
        &mut self,
        tenant: &str,
        source: Address,
        destination: Address,
        now: Instant,
    ) -> Result<StreamId, u32> {
        let engine = self.settings.engine_of(tenant, destination.ip);
        let engine = engine.ok_or(raw(Errno::HOSTUNREACH))?;
        let key = match self.connection_to(engine, tenant) {
            Some(key) => key,
            None => self.connect(engine, tenant, now)?,
        };
        let (around, connections, _) = self.around(now);
        let open = Open { source, destination };
        let connection = connections.get_mut(&key).ok_or(raw(Errno::HOSTUNREACH))?;
        connection.open(open, &around).ok_or(raw(Errno::NOBUFS))
    }

    /// Joins a stream with a local FIFO. Until [`Event::Ended`], nobody else may use the engine's
    /// side of that FIFO.
    pub fn attach(&mut self, stream: StreamId, end: End) {
        let connection = self.connections.get_mut(&stream.connection());
        let late = match connection {
            Some(connection) => connection.attach(stream.number(), end).err(),
            None => Some(end),
        };
        if let Some(end) = late {
            end.reset();
            let (ended, attached, region) = (Ended::Reset, true, None);
            self.events.push_back(Event::Ended { stream, ended, attached, region });
        }
    }

    /// Refuses the stream of [`Event::Asked`] with an error number of errno(3).
    pub fn refuse(&mut self, stream: StreamId, errno: u32, now: Instant) {
        if let Some(connection) = self.connections.get_mut(&stream.connection()) {
            connection.refuse(stream.number(), errno, now);
        }
    }

    /// Handles the local program's signal that its FIFO has changed.
    #[inline]
    pub fn stir(&mut self, stream: StreamId) {
        if let Some(connection) = self.connections.get_mut(&stream.connection()) {
            connection.heat(stream.number());
        }
    }

    /// Handles that the local program has closed its last descriptor and finished its FIFO, or
    /// never will. Bytes that the program has written are still sent. If it has left bytes unread,
    /// the stream is reset.
    pub fn leave(&mut self, stream: StreamId, now: Instant) {
        let (mut around, connections, _) = self.around(now);
        if let Some(connection) = connections.get_mut(&stream.connection()) {
            connection.leave(stream.number(), &mut around);
        }
    }

    /// Resets a stream on both sides.
    pub fn reset(&mut self, stream: StreamId, now: Instant) {
        let (mut around, connections, _) = self.around(now);
        if let Some(connection) = connections.get_mut(&stream.connection()) {
            connection.break_off(stream.number(), &mut around);
        }
    }

    // Connections.

    fn connection_to(&self, engine: usize, tenant: &str) -> Option<u32> {
        let fits = |connection: &Connection| {
            connection.engine == Some(engine) && connection.tenant == tenant && connection.is_open()
        };
        self.order.iter().copied().find(|key| self.connections.get(key).is_some_and(fits))
    }

    /// Returns the connections with an engine for a tenant that this side (`own`) or the other one
    /// began, the oldest first.
    fn of_one(&self, engine: usize, tenant: &str, own: bool) -> Vec<u32> {
        let fits = |connection: &Connection| {
            let whose = (connection.engine, connection.is_own());
            whose == (Some(engine), own) && connection.tenant == tenant
        };
        let all = self.connections.iter().filter(|(_, connection)| fits(connection));
        let mut all: Vec<u32> = all.map(|(key, _)| *key).collect();
        all.sort_unstable();
        all
    }

    fn hello(&self, tenant: &str) -> Option<Hello> {
        let cipher = match self.settings.cipher {
            Cipher::Aes128Gcm => link::Cipher::Aes128Gcm,
            Cipher::Aes256Gcm => link::Cipher::Aes256Gcm,
        };
        let (engine, tenant) = (Name::new(&self.settings.name)?, Name::new(tenant)?);
        Some(Hello { status: 0, window: self.settings.window, cipher, engine, tenant })
    }

    fn connect(&mut self, engine: usize, tenant: &str, now: Instant) -> Result<u32, u32> {
        if let Some(errno) = self.backoffs.get(engine).and_then(|backoff| backoff.errno(now)) {
            return Err(errno);
        }
        // Those that are open would have been used: the others are closing, as the other side
        // wishes.
        if self.of_one(engine, tenant, true).len() >= OF_ONE {
            return Err(raw(Errno::NOBUFS));
        }
        let at = self.settings.engine.get(engine).map(|peer| peer.at);
        let socket = at.ok_or(HandshakeError::Hello).and_then(|at| Ok(socket::connect(at)?));
        match socket.and_then(|socket| self.adopt(engine, tenant, socket, now)) {
            Ok(key) => Ok(key),
            Err(error) => {
                let errno = errno(&error);
                self.failed(Some(engine), &error.into(), now);
                Err(errno)
            }
        }
    }

    /// Makes a socket that is, or is about to be, connected to `engine` the way there for `tenant`.
    fn adopt(
        &mut self,
        engine: usize,
        tenant: &str,
        socket: OwnedFd,
        now: Instant,
    ) -> Result<u32, HandshakeError> {
        let hello = self.hello(tenant).ok_or(HandshakeError::NoName(tenant.into()))?;
        let name = self.settings.engine.get(engine).map(|peer| peer.name.clone());
        let name = name.unwrap_or_default();
        let handshake = Handshake::connect(&self.identity, &name, hello)?;
        let connects = Some((engine, tenant));
        let connection = Connection::new(self.next, socket, handshake, connects, now);
        Ok(self.add(connection)?)
    }

    /// Adopts `socket` as if this engine had connected to `engine` with it: a socket pair, in
    /// tests.
    ///
    /// # Errors
    /// There is no such engine, or the handshake cannot begin.
    pub fn connect_by(
        &mut self,
        engine: &str,
        tenant: &str,
        socket: OwnedFd,
        now: Instant,
    ) -> std::io::Result<()> {
        let number = self.settings.engine_named(engine).ok_or(Errno::HOSTUNREACH)?;
        self.adopt(number, tenant, socket, now).map(drop).map_err(Error::other)
    }

    /// Adopts `socket` as if another engine had connected with it: a socket pair, in tests.
    ///
    /// # Errors
    /// The handshake cannot begin.
    pub fn accept_by(&mut self, socket: OwnedFd, now: Instant) -> std::io::Result<()> {
        self.accept_from(socket, None, now)
    }

    fn accept_from(
        &mut self,
        socket: OwnedFd,
        from: Option<Network>,
        now: Instant,
    ) -> std::io::Result<()> {
        // The tenant is a placeholder: the handshake takes it over from the other side.
        let hello = self.hello("-").ok_or(Errno::INVAL)?;
        let handshake = Handshake::accept(&self.identity, hello).map_err(Error::other)?;
        let mut connection = Connection::new(self.next, socket, handshake, None, now);
        connection.from = from;
        self.add(connection).map(drop)
    }

    fn add(&mut self, mut connection: Connection) -> std::io::Result<u32> {
        let key = self.next;
        self.next = key.checked_add(1).ok_or(Errno::NOBUFS)?;
        rustix::io::ioctl_fionbio(&connection.socket, true)?;
        let interest = connection.interest();
        let data = epoll::EventData::new_u64(key.into());
        epoll::add(&self.epoll, &connection.socket, data, flags(interest))?;
        connection.interest = Some(interest);
        self.connections.insert(key, connection);
        self.order.push_back(key);
        Ok(key)
    }

    /// Accepts connections. Returns whether there were any.
    fn accept(&mut self, now: Instant) -> bool {
        let mut some = false;
        for _ in 0..ARRIVALS {
            let Some(listener) = &self.listener else { return some };
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let (socket, from) = match rustix::net::acceptfrom_with(listener, flags) {
                Ok(there) => there,
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return some,
                Err(_) => {
                    // The connection that waits in the backlog would keep the thread from sleeping.
                    self.paused = Some(now + PAUSE);
                    self.listen_for(epoll::EventFlags::empty());
                    return some;
                }
            };
            some = true;
            let from = from.and_then(|from| SocketAddr::try_from(from).ok()).map(|from| from.ip());
            if !from.is_none_or(|from| self.has_room_for(from)) {
                continue;
            }
            self.make_room(now);
            // Small messages must not wait for large ones.
            let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
            if let Err(error) = self.accept_from(socket, from.map(socket::network), now) {
                self.logs.warn(now, "", &error);
            }
        }
        some
    }

    fn listen_for(&self, flags: epoll::EventFlags) {
        if let Some(listener) = &self.listener {
            let data = epoll::EventData::new_u64(LISTENER);
            // Changing the watched events needs no memory.
            let _ = epoll::modify(&self.epoll, listener, data, flags);
        }
    }

    /// Returns the incoming connections that are in their handshake, the oldest first.
    fn strangers(&self) -> impl Iterator<Item = (u32, Option<Network>)> + '_ {
        let all = self.connections.iter().filter(|(_, one)| one.engine.is_none());
        let mut all: Vec<_> = all.map(|(key, one)| (*key, one.from)).collect();
        all.sort_unstable_by_key(|(key, _)| *key);
        all.into_iter()
    }

    /// Returns whether an address may have one more connection in handshake. The address of an
    /// engine may have as many as it has tenants.
    fn has_room_for(&self, from: IpAddr) -> bool {
        // A socket for both versions reports an IPv4 address in IPv6's form.
        let from = from.to_canonical();
        let is_engines =
            self.settings.engine.iter().any(|peer| peer.at.ip().to_canonical() == from);
        let own =
            self.strangers().filter(|(_, other)| *other == Some(socket::network(from))).count();
        is_engines || own < STRANGERS_OF_ONE
    }

    /// Ends the oldest connection in handshake if there are too many, so that there is always room
    /// for one more. Connections from addresses of no engine go first.
    fn make_room(&mut self, now: Instant) {
        let all: Vec<_> = self.strangers().collect();
        if all.len() < STRANGERS {
            return;
        }
        let engines: Vec<_> =
            self.settings.engine.iter().map(|peer| Some(socket::network(peer.at.ip()))).collect();
        let other = all.iter().find(|(_, from)| !engines.contains(from));
        if let Some((key, _)) = other.or(all.first()).copied() {
            self.end(key, &HandshakeError::Crowded.into(), now);
        }
    }

    fn around(
        &mut self,
        now: Instant,
    ) -> (Around<'_>, &mut HashMap<u32, Connection>, &mut VecDeque<u32>) {
        let Self { settings, events, logs, connections, order, .. } = self;
        (Around { now, settings, events, logs }, connections, order)
    }

    // Turns.

    /// Serves the connections that have something to do, as their tenants' shares say. Returns
    /// whether there was anything: if so, there may be more.
    pub fn turn(&mut self, now: Instant) -> bool {
        if self.paused.take_if(|until| *until <= now).is_some() {
            self.listen_for(epoll::EventFlags::IN);
        }
        let mut ready = [(0, false, false); EVENTS];
        let count = self.ready(&mut ready);
        let mut worked = false;
        if ready[..count].iter().any(|(key, ..)| *key == LISTENER) {
            worked |= self.accept(now);
        }
        self.order.rotate_left(usize::from(!self.order.is_empty()));
        for at in 0..self.order.len() {
            let Some(key) = self.order.get(at).copied() else { break };
            let found = ready[..count].iter().find(|(number, ..)| *number == u64::from(key));
            let (readable, writable) = found.map_or((false, false), |(_, r, w)| (*r, *w));
            worked |= self.prepare(key, readable, writable, now);
        }
        worked |= self.share(now);
        for at in 0..self.order.len() {
            let Some(key) = self.order.get(at).copied() else { break };
            self.hold(key, now);
            self.watch(key);
        }
        self.order.retain(|key| self.connections.contains_key(key));
        worked
    }

    fn ready(&self, ready: &mut [(u64, bool, bool); EVENTS]) -> usize {
        let none = epoll::EventFlags::empty();
        let mut events = [epoll::Event { flags: none, data: epoll::EventData::new_u64(0) }; EVENTS];
        let at_once = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let count = epoll::wait(&self.epoll, &mut events, Some(&at_once)).unwrap_or(0);
        let failed = epoll::EventFlags::ERR | epoll::EventFlags::HUP;
        for (to, event) in ready.iter_mut().zip(&events[..count]) {
            let flags = event.flags;
            let read = flags.intersects(failed | epoll::EventFlags::IN);
            let write = flags.intersects(failed | epoll::EventFlags::OUT);
            *to = (event.data.u64(), read, write);
        }
        count
    }

    /// Queues the directions in which a connection has something to do, and does the work that is
    /// not scheduled by shares: the handshake, and timers.
    fn prepare(&mut self, key: u32, readable: bool, writable: bool, now: Instant) -> bool {
        self.hold(key, now);
        let (mut around, connections, _) = self.around(now);
        let Some(connection) = connections.get_mut(&key) else { return false };
        let was_up = connection.is_up();
        let shakes = !was_up && (readable || writable);
        let done = if shakes { connection.shake_hands(&mut around) } else { Ok(false) };
        let done = done.and_then(|worked| connection.tend(&mut around).map(|()| worked));
        let (is_up, sends) = (connection.is_up(), connection.wants_to_send(writable));
        let due = connection.is_due(now);
        match done {
            Ok(worked) => {
                if !was_up && is_up {
                    self.is_up(key, now);
                }
                if (readable || due) && is_up {
                    self.shares.want(key, Direction::In);
                }
                if sends {
                    self.shares.want(key, Direction::Out);
                }
                worked
            }
            Err(broken) => {
                self.end(key, &broken, now);
                true
            }
        }
    }

    /// Sets until when a connection may not send: its tenant has sent enough, or its way is busy.
    fn hold(&mut self, key: u32, now: Instant) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        let opens = self.rates.get(&connection.tenant).map(Bucket::opens_at);
        let way = self.shares.held(key, now.saturating_duration_since(self.begin));
        let until = opens.max(way).map(|until| self.begin + until);
        connection.held = until.filter(|until| *until > now);
    }

    /// Serves chosen connections, one quantum after the other. Returns whether there was anything
    /// to do.
    fn share(&mut self, now: Instant) -> bool {
        let (mut worked, mut began) = (false, Instant::now());
        for _ in 0..QUANTA.min(2 * self.order.len() + 2) {
            let Some(turn) = self.shares.next(self.since_begin(began)) else { break };
            // The connection may have waited for its way while its tenant sent elsewhere.
            self.hold(turn.item.connection, began);
            let (some, ended) = self.serve(turn, began, now);
            worked |= some;
            began = ended;
        }
        worked
    }

    /// Serves one quantum, which begins at `began`. Returns whether there was anything to do, and
    /// when the quantum ended.
    fn serve(&mut self, turn: Ticket<Job>, began: Instant, now: Instant) -> (bool, Instant) {
        let Job { connection: key, direction } = turn.item;
        let (mut around, connections, _) = self.around(now);
        let Some(connection) = connections.get_mut(&key) else {
            let at = self.since_begin(began);
            self.shares.done(turn, Served::default(), at);
            return (false, began);
        };
        let moved = |connection: &Connection| match direction {
            Direction::In => connection.received(),
            Direction::Out => connection.sent(),
        };
        let before = moved(connection);
        let done = match direction {
            Direction::In => connection.receive(QUANTUM, &mut around),
            Direction::Out if connection.held.is_some() => Ok(false),
            Direction::Out => connection.send(QUANTUM, &mut around),
        };
        let (bytes, blocked) = (moved(connection) - before, connection.is_blocked());
        let ended = Instant::now();
        let busy = ended.saturating_duration_since(began);
        if *done.as_ref().unwrap_or(&true) {
            connection.busy += busy;
        }
        // Received frames may need answers, and sending may be unfinished: queue it again at once.
        let sends = *done.as_ref().unwrap_or(&false) && connection.wants_to_send(false);
        let more = direction == Direction::In && bytes >= FULL && !connection.coalesces();
        let at = self.since_begin(ended);
        self.shares.done(turn, Served { bytes, busy, blocked }, at);
        if direction == Direction::Out && bytes > 0 {
            self.count(key, bytes, now);
        }
        if sends {
            self.shares.want(key, Direction::Out);
        }
        if more {
            self.shares.want(key, Direction::In);
        }
        let worked = match done {
            Ok(worked) => worked,
            Err(broken) => {
                self.end(key, &broken, now);
                true
            }
        };
        (worked, ended)
    }

    /// Counts bytes that a connection has sent for its tenant's rate.
    fn count(&mut self, key: u32, sent: u64, now: Instant) {
        let tenant = self.connections.get(&key).map(|connection| &connection.tenant);
        if let Some(rate) = tenant.and_then(|tenant| self.rates.get_mut(tenant)) {
            rate.take(sent, now.saturating_duration_since(self.begin));
        }
    }

    fn is_up(&mut self, key: u32, now: Instant) {
        let Some(connection) = self.connections.get(&key) else { return };
        let engine = connection.engine;
        let others = engine.filter(|_| !connection.is_own());
        let others = others.map(|engine| self.of_one(engine, &connection.tenant, false));
        // An engine with too many connections loses the oldest, which is dead, most likely, if the
        // engine has restarted.
        if let Some(oldest) =
            others.filter(|all| all.len() > OF_ONE).and_then(|all| all.first().copied())
        {
            self.end(oldest, &Broken::Many, now);
        }
        let Some(connection) = self.connections.get(&key) else { return };
        if let Some(way) = engine {
            self.shares.join(key, &connection.tenant, way);
        }
        if let Some(backoff) = engine.and_then(|engine| self.backoffs.get_mut(engine)) {
            backoff.reached();
        }
    }

    fn watch(&mut self, key: u32) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        let interest = connection.interest();
        if connection.interest != Some(interest) {
            let data = epoll::EventData::new_u64(key.into());
            // This can fail for want of memory only; the next turn tries again.
            let done = epoll::modify(&self.epoll, &connection.socket, data, flags(interest));
            connection.interest = done.is_ok().then_some(interest);
        }
    }

    /// Ends a connection and its streams.
    fn end(&mut self, key: u32, broken: &Broken, now: Instant) {
        let Some(mut connection) = self.connections.remove(&key) else { return };
        self.shares.part(key, self.since_begin(now));
        let _ = epoll::delete(&self.epoll, &connection.socket);
        let (mut around, ..) = self.around(now);
        connection.end(broken, &mut around);
        match (broken, connection.is_up()) {
            // No failure, or logged already.
            (Broken::Idle | Broken::Dropped, _) => {}
            (_, true) => self.log(connection.engine, broken, now),
            (_, false) => self.failed(connection.engine, broken, now),
        }
    }

    fn failed(&mut self, engine: Option<usize>, broken: &Broken, now: Instant) {
        if let Some(backoff) = engine.and_then(|engine| self.backoffs.get_mut(engine)) {
            backoff.failed(now, broken.errno());
        }
        self.log(engine, broken, now);
    }

    fn log(&mut self, engine: Option<usize>, broken: &Broken, now: Instant) {
        let peer = engine.and_then(|engine| self.settings.engine.get(engine));
        let name = peer.map_or("one that connects", |peer| peer.name.as_str());
        self.logs.warn(now, name, broken);
    }

    /// Asks the programs of all streams to signal when there is something to do. Returns whether
    /// the owner may sleep until [`Links::descriptor`] is readable, a program signals, or
    /// [`Links::deadline`].
    ///
    /// The call has a full barrier of this thread between what the owner did before and what it
    /// looks at afterwards. All other threads pass a barrier (`slipway_ring::cross::heavy`, which
    /// costs as much as some records) only if a stream asks for something that it did not ask for
    /// before.
    pub fn rest(&mut self, now: Instant) -> bool {
        let (mut around, connections, _) = self.around(now);
        let mut due = false;
        for connection in connections.values_mut() {
            due |= connection.rest(&mut around);
        }
        if due {
            cross::heavy();
        } else {
            fence(Ordering::SeqCst);
        }
        let mut asleep = true;
        for connection in connections.values_mut() {
            asleep &= connection.rested(&mut around);
        }
        asleep && self.events.is_empty()
    }

    /// Does what [`Links::rest`] does, without a barrier of other processors, which costs as much
    /// as some records: for an owner that expects a signal soon, and sleeps no longer than a
    /// millisecond. A program that wrote in this very moment may not see that it has to signal: its
    /// stream is polled after the sleep.
    pub fn doze(&mut self, now: Instant) -> bool {
        let (mut around, connections, _) = self.around(now);
        connections.values_mut().for_each(|connection| connection.doze(&mut around));
        fence(Ordering::SeqCst);
        // A write of a program before it could see the wish is visible by now.
        (0..PAUSES).for_each(|_| std::hint::spin_loop());
        let mut asleep = true;
        for connection in connections.values_mut() {
            asleep &= connection.dozes(&mut around);
        }
        asleep && self.events.is_empty()
    }

    /// Returns when a turn is due even if nothing happens.
    pub fn deadline(&self) -> Option<Instant> {
        let all = self.connections.values().filter_map(|one| one.deadline(&self.settings));
        all.chain(self.paused).min()
    }

    /// Returns the longest time that an owner may sleep after [`Links::rest`], if there is a limit.
    pub fn until_deadline(&self, now: Instant) -> Option<Duration> {
        self.deadline().map(|when| when.saturating_duration_since(now))
    }
}

fn raw(errno: Errno) -> u32 {
    errno.raw_os_error().unsigned_abs()
}

fn flags(interest: Interest) -> epoll::EventFlags {
    let mut flags = epoll::EventFlags::empty();
    flags.set(epoll::EventFlags::IN, interest.read);
    flags.set(epoll::EventFlags::OUT, interest.write);
    flags
}
