//! All connections of an engine: what its owner sees of them.
//!
//! - `connections`: how a connection begins and ends;
//! - `turns`: how connections are served, by their tenants' shares.

mod connections;
mod turns;

use std::collections::{HashMap, VecDeque};
use std::io::Error;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::io::Errno;
use slipway_family::Stalls;
use slipway_rate::{Bucket, Rate};
use slipway_ring::cross;
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::link::Open;

use crate::backoff::Backoff;
use crate::connection::{Around, Broken, Connection, Report};
use crate::error::LinksError;
use crate::event::{Ended, Event, StreamId};
use crate::identity::Identity;
use crate::logs::Logs;
use crate::renewal::Renewal;
use crate::settings::Settings;
use crate::shares::{Direction, Shares, View};
use crate::socket;
use crate::stream::End;

/// The listener's number in epoll; connections have their own numbers.
const LISTENER: u64 = u64::MAX;
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
    epoll: Arc<OwnedFd>,
    connections: HashMap<u32, Connection>,
    /// Keys of `connections`, in the order of turns.
    order: VecDeque<u32>,
    next: u32,
    backoffs: Vec<Backoff>,
    /// The choice of the next connection.
    shares: Shares,
    /// Tenants whose memory made the thread sleep.
    stalls: Stalls<String>,
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
            epoll: Arc::new(epoll),
            connections: HashMap::new(),
            order: VecDeque::new(),
            next: 0,
            stalls: Stalls::new(Instant::now()),
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
        let mut unserved = Vec::new();
        for (key, connection) in &self.connections {
            if let Some(way) = connection.engine.filter(|_| connection.is_up()) {
                if let Err(error) = self.shares.join(*key, &connection.tenant, way) {
                    let tenant = connection.tenant.clone();
                    unserved.push((*key, Broken::NoShare { tenant, error }));
                    continue;
                }
                // The former queue is lost: queue both directions again.
                self.shares.want(*key, Direction::In);
                self.shares.want(*key, Direction::Out);
            }
        }
        for (key, broken) in unserved {
            self.end(key, &broken, now);
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

    /// Returns what [`Links::descriptor`] returns, for a reactor that holds it.
    pub(crate) fn shared_descriptor(&self) -> Arc<OwnedFd> {
        self.epoll.clone()
    }

    /// Takes the next event.
    pub fn event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Returns the tenants' shares of the core and of the ways to other engines.
    pub fn shares(&self, now: Instant) -> View {
        self.shares.view(self.since_begin(now))
    }

    /// Returns the time as the scheduler counts it: since this value was made.
    fn since_begin(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.begin)
    }

    /// Returns the counters of all connections.
    pub fn reports(&self) -> Vec<Report> {
        let known = self.order.iter().filter_map(|key| self.connections.get(key));
        known.map(|connection| connection.report(&self.settings)).collect()
    }

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
            connection.mark_hot(stream.number());
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

    /// Returns the parts of this value that a connection needs beside itself, the connections, and
    /// their order.
    fn around(
        &mut self,
        now: Instant,
    ) -> (Around<'_>, &mut HashMap<u32, Connection>, &mut VecDeque<u32>) {
        let Self { settings, events, logs, connections, order, .. } = self;
        (Around { now, settings, events, logs }, connections, order)
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
        let (mut due, mut asleep) = (false, true);
        self.each(now, |connection, around| due |= connection.rest(around));
        if due {
            cross::heavy();
        } else {
            slipway_ring::barrier();
        }
        self.each(now, |connection, around| asleep &= connection.rested(around));
        asleep && self.events.is_empty()
    }

    /// Does what [`Links::rest`] does, without a barrier of other processors, which costs as much
    /// as some records: for an owner that expects a signal soon, and sleeps no longer than a
    /// millisecond. A program that wrote in this very moment may not see that it has to signal: its
    /// stream is polled after the sleep.
    pub fn doze(&mut self, now: Instant) -> bool {
        let mut asleep = true;
        self.each(now, |connection, around| connection.doze(around));
        slipway_ring::barrier();
        // A write of a program before it could see the wish is visible by now.
        (0..PAUSES).for_each(|_| std::hint::spin_loop());
        self.each(now, |connection, around| asleep &= connection.dozes(around));
        asleep && self.events.is_empty()
    }

    /// Notes that the thread has slept since the last turn.
    pub fn woken(&mut self) {
        self.stalls.woken();
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

/// Returns the error number of `errno`, as programs get it.
fn raw(errno: Errno) -> u32 {
    errno.raw_os_error().unsigned_abs()
}
