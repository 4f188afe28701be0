//! The engine's socket, and the thread that serves it.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fs::{FlockOperation, Mode};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::broker::{Broker, Outcome};
use crate::policy::Policy;
use crate::reload::{Reload, Renewal};
use crate::remote::Remote;
use crate::ways::Ways;
use crate::wire::{self, Received};

/// Requests of one client that are done before others have their turn.
const TURN: usize = 16;
/// Connections that are taken before clients have their turn.
const ARRIVALS: usize = 64;
/// How long nobody new is let in when descriptors have run out.
const BREATH: Duration = Duration::from_millis(100);
/// Connections to the engine's socket that may wait.
const BACKLOG: i32 = 4096;
/// How long an engine that ends when it is idle waits for the next program, and for the first one.
const LINGER: Duration = Duration::from_secs(2);
const FIRST: Duration = Duration::from_secs(60);

const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;
const REMOTE: u64 = u64::MAX - 2;
const RELOAD: u64 = u64::MAX - 3;

/// Name of the socket in its [`folder`].
pub const SHARED: &str = "engine.sock";

/// A folder beside an engine's socket, of which the engine makes it a second name, [`SHARED`], and nothing
/// else: what containers may be given, which so find the next engine's socket too and no file but it.
pub fn folder(socket: &Path) -> PathBuf {
    socket.with_extension("d")
}

/// How an engine is to be.
#[derive(Default)]
pub struct Settings {
    /// Path of its socket. `.lock` is added for the lock beside it.
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
    /// The path cannot be a socket's.
    #[error("no socket can have the path {}: {why}", path.display())]
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
        slipway_eventfd::raise(self.0.as_fd());
    }
}

/// See the crate's head.
pub struct Engine {
    socket: PathBuf,
    ends_when_idle: bool,
    broker: Broker,
    epoll: OwnedFd,
    listener: OwnedFd,
    /// Whether the epoll has the listener.
    listens: bool,
    resumes: Option<Instant>,
    clients: HashMap<u32, OwnedFd>,
    stop: Stop,
    reload: Reload,
    renewals: Receiver<Result<Renewal, String>>,
    served: bool,
    /// Since when nobody is there.
    idle: Option<Instant>,
    /// Held as long as the engine lives.
    _lock: std::fs::File,
}

impl Engine {
    /// Listens at the socket. What an engine that died left of it is replaced.
    ///
    /// # Errors
    /// [`Error`].
    pub fn bind(settings: Settings) -> Result<Self, Error> {
        let lock = lock(&settings.socket)?;
        let listener = listen(&settings.socket)?;
        if let Err(error) = share(&settings.socket) {
            tracing::warn!(%error, folder = %folder(&settings.socket).display(), "containers find no engine");
        }
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let stop = Stop(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        epoll::add(&epoll, &stop.0, EventData::new_u64(STOP), EventFlags::IN)?;
        let ways = ways(settings.remote, settings.guests, &settings.policy)?;
        let (reload, renewals) = Reload::new()?;
        epoll::add(&epoll, reload.wake(), EventData::new_u64(RELOAD), EventFlags::IN)?;
        let mut broker = Broker::new(settings.policy, Some(ways));
        broker.proof = settings.proof;
        if let Some(wakes) = broker.remote_wakes() {
            epoll::add(&epoll, wakes, EventData::new_u64(REMOTE), EventFlags::IN)?;
        }
        Ok(Self {
            socket: settings.socket,
            ends_when_idle: settings.ends_when_idle,
            broker,
            epoll,
            listener,
            listens: true,
            resumes: None,
            clients: HashMap::new(),
            stop,
            reload,
            renewals,
            served: false,
            idle: settings.ends_when_idle.then(Instant::now),
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
                    LISTENER => self.take_arrivals(),
                    STOP => return self.end(),
                    REMOTE => self.hear_remote(),
                    RELOAD => self.renew(),
                    client => self.attend(client as u32),
                }
            }
            self.broker.sweep();
            while let Some(ticket) = self.broker.expired_ticket() {
                self.hang_up(ticket);
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
        Ok(())
    }

    /// How long there is nothing to do but for others' doings. None: for ever.
    fn patience(&mut self) -> Option<Timespec> {
        let (sweep, ticket) = (self.broker.next_sweep(), self.broker.next_ticket());
        let all = [sweep, ticket, self.resumes, self.ends_at()];
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

    fn take_arrivals(&mut self) {
        for _ in 0..ARRIVALS {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(&self.listener, flags) {
                Ok(socket) => self.welcome(socket),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return,
                Err(error) => return self.pause(error),
            }
        }
    }

    /// Nobody new for a moment: the epoll would tell of those who wait for ever.
    fn pause(&mut self, error: Errno) {
        self.broker.log.line("arrivals", format_args!("no process can attach for now: {error}"));
        if std::mem::take(&mut self.listens) {
            let _ = epoll::delete(&self.epoll, &self.listener);
        }
        self.resumes = Some(Instant::now() + BREATH);
    }

    fn resume(&mut self) {
        if self.resumes.is_none_or(|at| at > Instant::now()) {
            return;
        }
        let data = EventData::new_u64(LISTENER);
        self.listens = epoll::add(&self.epoll, &self.listener, data, EventFlags::IN).is_ok();
        self.resumes = if self.listens { None } else { Some(Instant::now() + BREATH) };
    }

    fn welcome(&mut self, socket: OwnedFd) {
        match crate::peer::peer(socket.as_fd()) {
            Ok(peer) => {
                let client = self.broker.join(peer);
                self.watch(client, socket);
            }
            Err(error) => {
                let text = format_args!("a process that cannot be told was turned away: {error}");
                self.broker.log.line("peer", text);
            }
        }
    }

    fn watch(&mut self, client: u32, socket: OwnedFd) {
        let data = EventData::new_u64(client.into());
        if let Err(error) = epoll::add(&self.epoll, &socket, data, EventFlags::IN) {
            self.broker.log.line("watch", format_args!("a process was turned away: {error}"));
            return self.broker.leave(client);
        }
        self.clients.insert(client, socket);
    }

    /// Some of what a client asks for.
    fn attend(&mut self, client: u32) {
        for _ in 0..TURN {
            let Some(socket) = self.clients.get(&client) else { return };
            match wire::receive(socket.as_fd()) {
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
        slipway_eventfd::drain(self.reload.wake());
        self.renewals.try_iter().for_each(|renewal| self.broker.renew(renewal));
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
                drop(self.clients.remove(&client));
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
        drop(self.clients.remove(&client));
        self.broker.leave(client);
    }
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

/// One engine for each socket; the lock ends with the process, however it ends.
fn lock(socket: &Path) -> Result<std::fs::File, Error> {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lock");
    let opened = std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let file = opened.map_err(|why| Error::Path { path: path.into(), why })?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => Err(Error::Busy(socket.to_owned())),
        Err(error) => Err(error.into()),
    }
}

fn listen(path: &Path) -> Result<OwnedFd, Error> {
    let bad = |why: std::io::Error| Error::Path { path: path.to_owned(), why };
    let address = SocketAddrUnix::new(path).map_err(|errno| bad(errno.into()))?;
    let there = std::fs::symlink_metadata(path);
    if there.is_ok_and(|there| !there.file_type().is_socket()) {
        return Err(bad(std::io::Error::other("it is there, and no socket")));
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(bad(error)),
        _ => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&listener, &address).map_err(|errno| bad(errno.into()))?;
    // Everybody may attach: a program gets no more than it has with sockets of the kernel's.
    rustix::fs::chmod(path, Mode::from_raw_mode(0o666)).map_err(|errno| bad(errno.into()))?;
    rustix::net::listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// Gives the socket its second name. The folder stays when an engine ends: containers have it.
fn share(socket: &Path) -> std::io::Result<()> {
    let folder = folder(socket);
    std::fs::create_dir_all(&folder)?;
    let name = folder.join(SHARED);
    match std::fs::remove_file(&name) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => std::fs::hard_link(socket, name),
    }
}
