//! How connections with other engines begin and end.

use std::io::Error;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::SocketFlags;
use slipway_sgiov_spec::link::{self, Hello, Name};

use super::{LISTENER, Links, raw};
use crate::connection::{Broken, Connection, Interest};
use crate::handshake::{Handshake, HandshakeError, errno};
use crate::settings::Cipher;
use crate::socket::{self, Network};

/// The most incoming connections in handshake at a time.
const STRANGERS: usize = 64;
/// The most incoming connections in handshake from one address (an IPv6 network of 64 bits) that is
/// no engine's.
const STRANGERS_OF_ONE: usize = 8;
/// The most connections with one engine for one tenant that this side connected, and the most that
/// the other side connected.
const OF_ONE: usize = 4;
/// The pause after accept(2) has failed, for want of descriptors most likely.
const PAUSE: Duration = Duration::from_millis(100);
/// The most connections that are accepted in a turn.
const ARRIVALS: usize = 16;

impl Links {
    /// Returns an open connection with an engine for a tenant, or `None` if there is none.
    pub(super) fn connection_to(&self, engine: usize, tenant: &str) -> Option<u32> {
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

    /// Returns this engine's first message for `tenant`, or `None` if a name cannot be sent.
    fn hello(&self, tenant: &str) -> Option<Hello> {
        let cipher = match self.settings.cipher {
            Cipher::Aes128Gcm => link::Cipher::Aes128Gcm,
            Cipher::Aes256Gcm => link::Cipher::Aes256Gcm,
        };
        let (engine, tenant) = (Name::new(&self.settings.name)?, Name::new(tenant)?);
        Some(Hello { status: 0, window: self.settings.window, cipher, engine, tenant })
    }

    /// Begins a connection to `engine` for the streams of `tenant`. Returns its key.
    ///
    /// # Errors
    /// The errno for connect(2) of the program that asks: the last attempt's, during the pause
    /// after a failure; `ENOBUFS` if too many connections are closing; those of [`errno`].
    pub(super) fn connect(
        &mut self,
        engine: usize,
        tenant: &str,
        now: Instant,
    ) -> Result<u32, u32> {
        if let Some(errno) = self.backoffs.get(engine).and_then(|backoff| backoff.errno(now)) {
            return Err(errno);
        }
        // `connection_to` found no open connection, so each of these is closing. How soon a
        // connection has closed depends on the other engine.
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

    /// Begins the handshake of a new connection for the streams of `tenant` to `engine`, on a
    /// socket that is connected to it or being connected. Returns the connection's key.
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

    /// Begins the handshake on `socket`, with which another engine connected. `from` is the network
    /// of its address, `None` in tests and for addresses without one.
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

    /// Has epoll(7) watch a new connection, and adds it. Returns its key.
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
    pub(super) fn accept(&mut self, now: Instant) -> bool {
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

    /// Has epoll(7) watch the listener for `flags`; none while accepting pauses.
    pub(super) fn listen_for(&self, flags: epoll::EventFlags) {
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

    /// Enters a connection whose handshake has ended among those that are served. An engine with
    /// too many connections loses the oldest of those that it connected.
    pub(super) fn came_up(&mut self, key: u32, now: Instant) {
        let Some(connection) = self.connections.get(&key) else { return };
        let engine = connection.engine;
        let others = engine.filter(|_| !connection.is_own());
        let others = others.map(|engine| self.of_one(engine, &connection.tenant, false));
        // The oldest connection is dead, most likely, if the engine has restarted.
        if let Some(oldest) =
            others.filter(|all| all.len() > OF_ONE).and_then(|all| all.first().copied())
        {
            self.end(oldest, &Broken::Many, now);
        }
        let Some(connection) = self.connections.get(&key) else { return };
        if let Some(way) = engine
            && let Err(error) = self.shares.join(key, &connection.tenant, way)
        {
            let broken = Broken::NoShare { tenant: connection.tenant.clone(), error };
            self.end(key, &broken, now);
            return;
        }
        if let Some(backoff) = engine.and_then(|engine| self.backoffs.get_mut(engine)) {
            backoff.reached();
        }
    }

    /// Has epoll watch for what a connection waits for now.
    pub(super) fn watch(&mut self, key: u32) {
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
    pub(super) fn end(&mut self, key: u32, broken: &Broken, now: Instant) {
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

    /// Notes that a connection ended before its handshake did: the next attempt to reach its engine
    /// waits.
    fn failed(&mut self, engine: Option<usize>, broken: &Broken, now: Instant) {
        if let Some(backoff) = engine.and_then(|engine| self.backoffs.get_mut(engine)) {
            backoff.failed(now, broken.errno());
        }
        self.log(engine, broken, now);
    }

    /// Logs the end of a connection with `engine`; `None` stands for one that was not identified.
    fn log(&mut self, engine: Option<usize>, broken: &Broken, now: Instant) {
        let peer = engine.and_then(|engine| self.settings.engine.get(engine));
        let name = peer.map_or("one that connects", |peer| peer.name.as_str());
        self.logs.warn(now, name, broken);
    }
}

/// Returns the events of a socket to watch for. The kernel reports a failure of any socket: one
/// that nobody looks at meanwhile must not keep the thread from sleeping, so that it is reported
/// once (`ET`), and again when the interest changes.
fn flags(interest: Interest) -> epoll::EventFlags {
    let mut flags = epoll::EventFlags::empty();
    flags.set(epoll::EventFlags::ET, !interest.read && !interest.write);
    flags.set(epoll::EventFlags::IN, interest.read);
    flags.set(epoll::EventFlags::OUT, interest.write);
    flags
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::time::Timespec;

    use super::*;

    /// The other engine ends while the connection is left out.
    #[test]
    fn a_socket_that_has_failed_and_is_not_looked_at_is_reported_once() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        let (data, none) = (epoll::EventData::new_u64(1), Interest { read: false, write: false });
        epoll::add(&epoll, &here, data, flags(none)).unwrap();
        drop(there);
        let reported = || {
            let event = epoll::Event { flags: epoll::EventFlags::empty(), data };
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            epoll::wait(&epoll, &mut [event], Some(&at_once)).unwrap()
        };
        assert_eq!([reported(), reported()], [1, 0]);
        let reads = Interest { read: true, write: false };
        epoll::modify(&epoll, &here, data, flags(reads)).unwrap();
        assert_eq!([reported(), reported()], [1, 1]);
    }
}
