//! The engine's socket, and the thread that serves it.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags};
use slipway_peer::Bin;
use slipway_sgiov_spec::control::Reply;

use crate::broker::{Broker, Outcome};
use crate::place::{self, Own, SHARED, folder};
use crate::policy::Policy;
use crate::reload::{Reload, Renewal};
use crate::remote::Remote;
use crate::ways::Ways;
use crate::wire::{self, Received};

/// Requests of one client that are done before others have their turn.
const TURN: usize = 16;
/// Time after which others have their turn, if that is sooner.
const SLICE: Duration = Duration::from_millis(2);
/// Descriptors of one user's that are still to be closed, above which who sends more is hung up on.
const MOST_SENT: usize = 1024;
/// Connections that are taken before clients have their turn.
const ARRIVALS: usize = 64;
/// How long nobody new is let in when descriptors have run out.
const BREATH: Duration = Duration::from_millis(100);
/// How long an engine that ends when it is idle waits for the next program, and for the first one.
const LINGER: Duration = Duration::from_secs(2);
const FIRST: Duration = Duration::from_secs(60);

const PROGRAMS: u64 = u64::MAX;
const ADMINISTRATOR: u64 = u64::MAX - 4;
const STOP: u64 = u64::MAX - 1;
const REMOTE: u64 = u64::MAX - 2;
const RELOAD: u64 = u64::MAX - 3;
const PROOFS: u64 = u64::MAX - 5;

/// How an engine is to be.
#[derive(Default)]
pub struct Settings {
    /// Path of its socket. The administrator's directory beside it has the ending `.admin`.
    pub socket: PathBuf,
    /// It ends when the last family has, or when none comes within a minute.
    pub ends_when_idle: bool,
    /// Who listens has to show the kernel's own listening socket.
    pub proof: bool,
    /// Who may reach whom across network namespaces.
    pub policy: Policy,
    /// Who carries streams to other nodes.
    pub remote: Option<Box<dyn Remote>>,
    /// Guests' socket functions are served (feature `guests`).
    pub guests: bool,
}

/// Why there is no engine, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another one has the lock.
    #[error("another socket engine serves {}", .0.display())]
    Busy(PathBuf),
    /// What is at the path does not allow it.
    #[error("no engine can have the path {}: {why}", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// Why not.
        why: std::io::Error,
    },
    /// The system.
    #[error("the socket engine failed: {0}")]
    System(std::io::Error),
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::System(error)
    }
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        Self::System(errno.into())
    }
}

/// Ends an engine from another thread or a signal's.
#[derive(Clone)]
pub struct Stop(Arc<OwnedFd>);

impl Stop {
    /// Ends it.
    pub fn stop(&self) {
        slipway_family::wake(&self.0);
    }
}

/// A socket that processes connect to.
struct Door {
    listener: OwnedFd,
    /// Its number in the epoll.
    number: u64,
    /// Whether the epoll has it.
    listens: bool,
}

impl Door {
    fn open(listener: OwnedFd, number: u64) -> Self {
        Self { listener, number, listens: false }
    }

    fn listen(&mut self, epoll: &OwnedFd) {
        let data = EventData::new_u64(self.number);
        self.listens |= epoll::add(epoll, &self.listener, data, EventFlags::IN).is_ok();
    }

    /// Whether it is the administrator's.
    fn administers(&self) -> bool {
        self.number == ADMINISTRATOR
    }
}

/// See the crate's head.
pub struct Engine {
    socket: PathBuf,
    ends_when_idle: bool,
    broker: Broker,
    epoll: OwnedFd,
    /// The programs' socket, and the administrator's.
    doors: [Door; 2],
    resumes: Option<Instant>,
    clients: HashMap<u32, OwnedFd>,
    /// Where connections go of processes that have no account, by user.
    strangers: HashMap<u32, Bin>,
    stop: Stop,
    reload: Reload,
    renewals: Receiver<Result<Renewal, String>>,
    served: bool,
    /// Since when nobody is there.
    idle: Option<Instant>,
    own: Own,
    /// Held as long as the engine lives.
    _lock: std::fs::File,
}

impl Engine {
    /// Listens at the socket. What an engine that died left of it is replaced.
    ///
    /// # Errors
    /// [`Error`].
    pub fn bind(settings: Settings) -> Result<Self, Error> {
        let own = Own::make(&settings.socket)?;
        let lock = own.lock(&settings.socket)?;
        let administrator = Door::open(own.listen()?, ADMINISTRATOR);
        let listener = place::listen_for_programs(&settings.socket)?;
        // Whoever has no account yet has nowhere to put what it sends.
        slipway_peer::refuse_descriptors(&listener);
        let programs = Door::open(listener, PROGRAMS);
        if let Err(error) = place::share(&settings.socket) {
            tracing::warn!(%error, folder = %folder(&settings.socket).display(), "containers find no engine");
        }
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let stop = Stop(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        let mut doors = [programs, administrator];
        doors.iter_mut().for_each(|door| door.listen(&epoll));
        epoll::add(&epoll, &stop.0, EventData::new_u64(STOP), EventFlags::IN)?;
        let ways = ways(settings.remote, settings.guests, &settings.policy)?;
        let (reload, renewals) = Reload::new()?;
        epoll::add(&epoll, reload.wake(), EventData::new_u64(RELOAD), EventFlags::IN)?;
        let mut broker = Broker::new(settings.policy, Some(ways));
        broker.proof = settings.proof;
        if let Some(wakes) = broker.proofs_wake() {
            epoll::add(&epoll, wakes, EventData::new_u64(PROOFS), EventFlags::IN)?;
        }
        if let Some(wakes) = broker.remote_wakes() {
            epoll::add(&epoll, wakes, EventData::new_u64(REMOTE), EventFlags::IN)?;
        }
        Ok(Self {
            socket: settings.socket,
            ends_when_idle: settings.ends_when_idle,
            broker,
            epoll,
            doors,
            resumes: None,
            clients: HashMap::new(),
            strangers: HashMap::new(),
            stop,
            reload,
            renewals,
            served: false,
            idle: settings.ends_when_idle.then(Instant::now),
            own,
            _lock: lock,
        })
    }

    /// What ends it.
    pub fn stop(&self) -> Stop {
        self.stop.clone()
    }

    /// What gives it another policy.
    pub fn reload(&self) -> Reload {
        self.reload.clone()
    }

    /// Serves until it is stopped or, if so set, idle. Its socket is gone then, and all connections with it.
    ///
    /// # Errors
    /// The system's.
    pub fn run(&mut self) -> Result<(), Error> {
        let mut events = Vec::with_capacity(256);
        loop {
            let wait = self.patience();
            events.clear();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                wait.as_ref(),
            ) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for event in &events {
                match event.data.u64() {
                    PROGRAMS => self.take_arrivals(0),
                    ADMINISTRATOR => self.take_arrivals(1),
                    STOP => return self.end(),
                    REMOTE => self.hear_remote(),
                    RELOAD => self.renew(),
                    PROOFS => self.hear_proofs(),
                    client => self.attend(client as u32),
                }
            }
            self.broker.sweep();
            while let Some(ticket) = self.broker.expired_ticket() {
                self.hang_up(ticket);
            }
            while let Some(client) = self.broker.overdue() {
                self.refuse(client, "it did not attach in time");
            }
            while let Some(client) = self.broker.unheard() {
                self.refuse(client, "it cannot be told of what happens to its sockets");
            }
            self.resume();
            self.served |= self.broker.families() > 0;
            if self.is_over() {
                return self.end();
            }
        }
    }

    /// Whether it was to end when idle, and is.
    fn is_over(&mut self) -> bool {
        let nobody = self.clients.is_empty() && !self.broker.has_guests();
        if !self.ends_when_idle || !nobody {
            self.idle = None;
            return false;
        }
        self.idle.get_or_insert_with(Instant::now);
        self.ends_at().is_some_and(|end| end <= Instant::now())
    }

    /// When it is over unless somebody comes. None: somebody is there, or it is not to end.
    fn ends_at(&self) -> Option<Instant> {
        self.idle.map(|since| since + if self.served { LINGER } else { FIRST })
    }

    fn end(&self) -> Result<(), Error> {
        for name in [&self.socket, &folder(&self.socket).join(SHARED)] {
            let _ = std::fs::remove_file(name);
        }
        self.own.end();
        Ok(())
    }

    /// How long there is nothing to do but for others' doings. None: for ever.
    fn patience(&mut self) -> Option<Timespec> {
        let (sweep, ticket) = (self.broker.next_sweep(), self.broker.next_ticket());
        let all = [sweep, ticket, self.broker.next_greeting(), self.resumes, self.ends_at()];
        let next = all.into_iter().flatten().min()?;
        // Rounded up, so that it is time when it wakes.
        let wait = next.saturating_duration_since(Instant::now()).as_micros() as i64 + 1;
        let (tv_sec, tv_nsec) = (wait / 1_000_000, wait % 1_000_000 * 1000);
        let overdue = next <= Instant::now();
        Some(if overdue {
            Timespec { tv_sec: 0, tv_nsec: 0 }
        } else {
            Timespec { tv_sec, tv_nsec }
        })
    }

    fn take_arrivals(&mut self, door: usize) {
        for _ in 0..ARRIVALS {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(&self.doors[door].listener, flags) {
                Ok(socket) => self.welcome(socket, self.doors[door].administers()),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return,
                Err(error) => return self.pause(door, error),
            }
        }
    }

    /// Nobody new for a moment: the epoll would tell of those who wait for ever.
    fn pause(&mut self, door: usize, error: Errno) {
        self.broker.log.line("arrivals", format_args!("no process can attach for now: {error}"));
        let door = &mut self.doors[door];
        if std::mem::take(&mut door.listens) {
            let _ = epoll::delete(&self.epoll, &door.listener);
        }
        self.resumes = Some(Instant::now() + BREATH);
    }

    fn resume(&mut self) {
        if self.resumes.is_none_or(|at| at > Instant::now()) {
            return;
        }
        let missing = self.doors.iter_mut().filter(|door| !door.listens);
        missing.for_each(|door| door.listen(&self.epoll));
        let all = self.doors.iter().all(|door| door.listens);
        self.resumes = if all { None } else { Some(Instant::now() + BREATH) };
    }

    fn welcome(&mut self, socket: OwnedFd, administers: bool) {
        wire::bound_replies(socket.as_fd());
        let peer = match crate::peer::peer(socket.as_fd()) {
            Ok(peer) => peer,
            Err(error) => {
                let text = format_args!("a process that cannot be told was turned away: {error}");
                self.broker.log.line("peer", text);
                return self.turn_away(socket);
            }
        };
        match self.broker.join(peer, administers) {
            Ok((client, surplus)) => {
                if let Some(surplus) = surplus {
                    self.refuse(surplus, "it did not attach, and many of its user's came after it");
                }
                crate::peer::accept_descriptors(socket.as_fd());
                self.watch(client, socket);
            }
            Err(errno) => {
                // The reason, for what it will ask.
                wire::send(socket.as_fd(), &Reply::Refused(errno), &[]);
                self.turn_away(socket);
            }
        }
    }

    /// Hangs up on a process that has no account.
    fn turn_away(&mut self, socket: OwnedFd) {
        let uid =
            slipway_peer::Peer::of(&socket).map_or(slipway_peer::Peer::NOBODY, |peer| peer.uid);
        self.strangers.retain(|other, bin| *other == uid || bin.held() > 0);
        discard(socket, self.strangers.entry(uid).or_default());
    }

    fn watch(&mut self, client: u32, socket: OwnedFd) {
        let data = EventData::new_u64(client.into());
        if let Err(error) = epoll::add(&self.epoll, &socket, data, EventFlags::IN) {
            self.broker.log.line("watch", format_args!("a process was turned away: {error}"));
            self.clients.insert(client, socket);
            return self.hang_up(client);
        }
        self.clients.insert(client, socket);
    }

    /// Some of what a client asks for.
    fn attend(&mut self, client: u32) {
        let Some(bin) = self.broker.sent(client) else { return };
        let begun = Instant::now();
        for _ in 0..TURN {
            if bin.held() > MOST_SENT {
                return self.refuse(client, "too much of what its user sent cannot be closed");
            }
            // Some requests look at all that a client has. What is left is heard in the next turn.
            if begun.elapsed() > SLICE {
                return;
            }
            let Some(socket) = self.clients.get(&client) else { return };
            match wire::receive(socket.as_fd(), &bin) {
                Received::Nothing => return,
                Received::Gone => return self.hang_up(client),
                Received::Malformed => return self.refuse(client, "it sent what is no request"),
                Received::Request(request, files) => {
                    let outcome = self.broker.request(client, request, files);
                    self.answer(client, outcome);
                }
            }
        }
    }

    fn renew(&mut self) {
        slipway_peer::eventfd::drain(self.reload.wake());
        self.renewals.try_iter().for_each(|renewal| self.broker.renew(renewal));
    }

    fn hear_proofs(&mut self) {
        for (client, outcome) in self.broker.proven() {
            self.answer(client, outcome);
        }
    }

    fn hear_remote(&mut self) {
        for (client, outcome) in self.broker.remote_events() {
            self.answer(client, outcome);
        }
    }

    fn answer(&mut self, client: u32, outcome: Outcome) {
        let Some(socket) = self.clients.get(&client) else { return };
        match outcome {
            Outcome::Nothing => {}
            Outcome::Answer(reply, files) => {
                if !wire::send(socket.as_fd(), &reply, &files) {
                    self.refuse(client, "it does not take its replies");
                }
            }
            Outcome::Forked { client: child, ours, theirs } => {
                let done = slipway_sgiov_spec::control::Reply::Done;
                let told = wire::send(socket.as_fd(), &done, &[theirs]);
                self.watch(child, ours);
                if !told {
                    self.refuse(client, "it does not take its replies");
                }
            }
            Outcome::Moved { reply, files, ours } => {
                let told = wire::send(socket.as_fd(), &reply, &files);
                // The ticket, or what is left of it, goes.
                self.close(client);
                self.watch(client, ours);
                if !told {
                    self.refuse(client, "it does not take its replies");
                }
            }
            Outcome::HangUp(why) => self.refuse(client, why),
        }
    }

    fn refuse(&mut self, client: u32, why: &'static str) {
        let who = self.broker.who(client);
        self.broker.log.line(why, format_args!("process {who} is not served any more: {why}"));
        self.hang_up(client);
    }

    fn hang_up(&mut self, client: u32) {
        // Closed first: its number is free once the broker knows.
        self.close(client);
        self.broker.leave(client);
    }

    /// Ends a client's connection.
    fn close(&mut self, client: u32) {
        let Some(socket) = self.clients.remove(&client) else { return };
        // It may be open for a while: no event of it is another client's.
        let _ = epoll::delete(&self.epoll, &socket);
        discard(socket, &self.broker.bin(client).unwrap_or_default());
    }
}

/// Ends a connection at once for its peer. What the peer sent and nobody took is closed with it, which may take for ever.
fn discard(socket: OwnedFd, bin: &Bin) {
    let _ = rustix::net::shutdown(&socket, Shutdown::Both);
    bin.discard(socket);
}

/// Who carries streams for the engine.
fn ways(links: Option<Box<dyn Remote>>, guests: bool, policy: &Policy) -> std::io::Result<Ways> {
    #[cfg(feature = "guests")]
    {
        let guests = guests.then(|| crate::guests::Guests::start(policy.clone()));
        Ways::new(links, guests.transpose()?)
    }
    #[cfg(not(feature = "guests"))]
    {
        let _ = (guests, policy);
        Ways::new(links)
    }
}
