//! The engine's socket, and the thread that serves it.
//!
//! The thread has an epoll of its own and no reactor: it is the signal plane, which carries no
//! bytes, and in a guest, where the machine's engine carries them, there is no reactor.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use rustix::net::Shutdown;
use slipway_peer::Bin;
use slipway_sgiov_spec::control::Reply;

use crate::broker::{Broker, Outcome};
use crate::carriers::Carriers;
use crate::doors::{Door, Doors};
use crate::error::Error;
use crate::idle::IdleEnd;
use crate::place::{self, AdminDirectory, SHARED, folder};
use crate::policy::Policy;
use crate::reload::{Reload, Renewal};
use crate::remote::StreamCarrier;
use crate::wire::{self, Received};

/// The most requests of one client in one turn.
const TURN: usize = 16;
/// The longest turn of one client, also if it has sent more requests.
const SLICE: Duration = Duration::from_millis(2);
/// The most descriptors that one user has sent and that are not closed yet. A client whose user has
/// more is disconnected.
const MOST_SENT: usize = 1024;
/// The most connections that are accepted before clients have their turn.
const ARRIVALS: usize = 64;

// Data in the epoll. Clients have their numbers, which are lower.
const PROGRAMS: u64 = u64::MAX;
const ADMINISTRATOR: u64 = u64::MAX - 4;
const STOP: u64 = u64::MAX - 1;
const REMOTE: u64 = u64::MAX - 2;
const RELOAD: u64 = u64::MAX - 3;
const PROOFS: u64 = u64::MAX - 5;

/// Settings of an engine.
#[derive(Default)]
pub struct Settings {
    /// The path of the programs' socket. The administrator's directory beside it has the ending
    /// `.admin`.
    pub socket: PathBuf,
    /// Ends the engine soon after its last program and guest have gone, or when no family comes
    /// within a minute.
    pub ends_when_idle: bool,
    /// Requires a program that listens to show the kernel's own listening socket.
    pub proof: bool,
    /// The policy: who may reach whom across network namespaces.
    pub policy: Policy,
    /// The carrier of streams to other nodes.
    pub remote: Option<Box<dyn StreamCarrier>>,
    /// Serves guests' socket functions (feature `guests`).
    pub guests: bool,
}

/// Ends an engine, from another thread or from a signal handler.
#[derive(Clone)]
pub struct Stop(Arc<OwnedFd>);

impl Stop {
    /// Ends the engine.
    pub fn stop(&self) {
        slipway_family::wake(&self.0);
    }
}

/// The engine's socket and the state of the thread that serves it. See the crate's head.
pub struct Engine {
    /// The path of the programs' socket.
    socket: PathBuf,
    broker: Broker,
    /// The epoll with everything that wakes the thread.
    epoll: OwnedFd,
    doors: Doors,
    /// The clients' connections, by the broker's numbers.
    clients: HashMap<u32, OwnedFd>,
    /// Bins for connections of processes that have no account, by user.
    strangers: HashMap<u32, Bin>,
    stop: Stop,
    reload: Reload,
    renewals: Receiver<Result<Renewal, String>>,
    idle: IdleEnd,
    /// The administrator's directory, in which the lock is.
    own: AdminDirectory,
    /// The engine's lock, held as long as the engine lives.
    _lock: std::fs::File,
}

impl Engine {
    /// Listens at the socket, and replaces the socket that an engine that died left there.
    ///
    /// # Errors
    /// [`Error`].
    pub fn bind(settings: Settings) -> Result<Self, Error> {
        let own = AdminDirectory::make(&settings.socket)?;
        let lock = own.lock(&settings.socket)?;
        let administrator = own.listen()?;
        let programs = place::listen_for_programs(&settings.socket)?;
        // A process that has no account yet has no bin for descriptors that it sends.
        slipway_peer::refuse_descriptors(&programs);
        if let Err(error) = place::share(&settings.socket) {
            let folder = folder(&settings.socket);
            tracing::warn!(%error, folder = %folder.display(), "containers find no engine");
        }
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let stop = Stop(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        let doors = Doors::new((programs, PROGRAMS), (administrator, ADMINISTRATOR), &epoll);
        epoll::add(&epoll, &stop.0, EventData::new_u64(STOP), EventFlags::IN)?;
        let carriers = carriers(settings.remote, settings.guests, &settings.policy)?;
        let (reload, renewals) = Reload::new()?;
        epoll::add(&epoll, reload.wake(), EventData::new_u64(RELOAD), EventFlags::IN)?;
        let mut broker = Broker::new(settings.policy, Some(carriers));
        broker.proof = settings.proof;
        if let Some(wakes) = broker.proofs_wake() {
            epoll::add(&epoll, wakes, EventData::new_u64(PROOFS), EventFlags::IN)?;
        }
        for wakes in broker.remote_wakes() {
            epoll::add(&epoll, wakes, EventData::new_u64(REMOTE), EventFlags::IN)?;
        }
        Ok(Self {
            socket: settings.socket,
            broker,
            epoll,
            doors,
            clients: HashMap::new(),
            strangers: HashMap::new(),
            stop,
            reload,
            renewals,
            idle: IdleEnd::new(settings.ends_when_idle, Instant::now()),
            own,
            _lock: lock,
        })
    }

    /// Returns a handle that ends the engine.
    pub fn stop(&self) -> Stop {
        self.stop.clone()
    }

    /// Returns a handle that gives the engine another policy.
    pub fn reload(&self) -> Reload {
        self.reload.clone()
    }

    /// Serves until the engine is stopped or, if it ends when idle, is idle. Its socket and all
    /// connections end with it.
    ///
    /// # Errors
    /// An error of the system.
    pub fn run(&mut self) -> Result<(), Error> {
        let mut events = Vec::with_capacity(256);
        loop {
            self.wait(&mut events)?;
            for event in &events {
                match event.data.u64() {
                    STOP => return self.end(),
                    key => self.handle(key),
                }
            }
            self.broker.sweep();
            self.dismiss();
            self.doors.resume(&self.epoll);
            let is_used = !self.clients.is_empty() || self.broker.has_guests();
            if self.idle.is_over(is_used, self.broker.families() > 0, Instant::now()) {
                return self.end();
            }
        }
    }

    /// Waits for events, or until there is something to do without one.
    fn wait(&mut self, events: &mut Vec<epoll::Event>) -> Result<(), Error> {
        let wait = self.time_to_wait();
        events.clear();
        let room = rustix::buffer::spare_capacity(events);
        match epoll::wait(&self.epoll, room, wait.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Handles an event by its data in the epoll, except [`STOP`].
    fn handle(&mut self, key: u64) {
        match key {
            PROGRAMS => self.take_arrivals(Door::Programs),
            ADMINISTRATOR => self.take_arrivals(Door::Administrator),
            REMOTE => self.handle_remote_events(),
            RELOAD => self.renew(),
            PROOFS => self.handle_proofs(),
            client => self.attend(client as u32),
        }
    }

    /// Disconnects the clients whose time is over, or that cannot be served any more.
    fn dismiss(&mut self) {
        while let Some(ticket) = self.broker.expired_ticket() {
            self.hang_up(ticket);
        }
        while let Some(client) = self.broker.overdue() {
            self.refuse(client, "it did not attach in time");
        }
        while let Some(client) = self.broker.unheard() {
            self.refuse(client, "it cannot be told of what happens to its sockets");
        }
    }

    /// Removes the engine's sockets.
    fn end(&self) -> Result<(), Error> {
        for name in [&self.socket, &folder(&self.socket).join(SHARED)] {
            let _ = std::fs::remove_file(name);
        }
        self.own.end();
        Ok(())
    }

    /// Returns the time until the engine has something to do without an event. Returns `None` if
    /// there is no such time.
    fn time_to_wait(&mut self) -> Option<Timespec> {
        let all = [
            self.broker.next_sweep(),
            self.broker.next_ticket(),
            self.broker.next_greeting(),
            self.doors.resumes_at(),
            self.idle.ends_at(),
        ];
        let next = all.into_iter().flatten().min()?;
        // Rounded up, so that the time has come when the wait ends.
        let wait = next.saturating_duration_since(Instant::now()).as_micros() as i64 + 1;
        let (tv_sec, tv_nsec) = (wait / 1_000_000, wait % 1_000_000 * 1000);
        let is_due = next <= Instant::now();
        Some(if is_due { Timespec { tv_sec: 0, tv_nsec: 0 } } else { Timespec { tv_sec, tv_nsec } })
    }

    /// Accepts waiting connections, up to a number.
    fn take_arrivals(&mut self, door: Door) {
        for _ in 0..ARRIVALS {
            match self.doors.accept(door) {
                Ok(socket) => self.admit(socket, door == Door::Administrator),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    let text = format_args!("no process can attach for now: {error}");
                    self.broker.log.line("arrivals", text);
                    return self.doors.pause(door, &self.epoll);
                }
            }
        }
    }

    /// Makes the process at the other end of a connection a client, or turns it away.
    fn admit(&mut self, socket: OwnedFd, administers: bool) {
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
                // The process reads this refusal as the reply to its first request.
                wire::send(socket.as_fd(), &Reply::Refused(errno), &[]);
                self.turn_away(socket);
            }
        }
    }

    /// Disconnects a process that has no account.
    fn turn_away(&mut self, socket: OwnedFd) {
        let uid =
            slipway_peer::Peer::of(&socket).map_or(slipway_peer::Peer::NOBODY, |peer| peer.uid);
        self.strangers.retain(|other, bin| *other == uid || bin.held() > 0);
        discard(socket, self.strangers.entry(uid).or_default());
    }

    /// Waits for requests of a client.
    fn watch(&mut self, client: u32, socket: OwnedFd) {
        let data = EventData::new_u64(client.into());
        if let Err(error) = epoll::add(&self.epoll, &socket, data, EventFlags::IN) {
            self.broker.log.line("watch", format_args!("a process was turned away: {error}"));
            self.clients.insert(client, socket);
            return self.hang_up(client);
        }
        self.clients.insert(client, socket);
    }

    /// Carries out some of a client's requests.
    fn attend(&mut self, client: u32) {
        let Some(bin) = self.broker.sent(client) else { return };
        let begun = Instant::now();
        for _ in 0..TURN {
            if bin.held() > MOST_SENT {
                return self.refuse(client, "too much of what its user sent cannot be closed");
            }
            // Some requests take long, since they look at all that a client has. The rest wait for
            // the next turn.
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

    /// Hands newly read configuration to the broker.
    fn renew(&mut self) {
        slipway_peer::eventfd::drain(self.reload.wake());
        self.renewals.try_iter().for_each(|renewal| self.broker.renew(renewal));
    }

    /// Answers clients whose listening socket was checked.
    fn handle_proofs(&mut self) {
        for (client, outcome) in self.broker.proven() {
            self.answer(client, outcome);
        }
    }

    /// Answers clients that events of carriers concern.
    fn handle_remote_events(&mut self) {
        for (client, outcome) in self.broker.remote_events() {
            self.answer(client, outcome);
        }
    }

    /// Does what the broker's outcome of a client's request says.
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
                let is_sent = wire::send(socket.as_fd(), &Reply::Done, &[theirs]);
                self.watch(child, ours);
                if !is_sent {
                    self.refuse(client, "it does not take its replies");
                }
            }
            Outcome::Moved { reply, files, ours } => {
                let is_sent = wire::send(socket.as_fd(), &reply, &files);
                // The client goes on over `ours`, so its old connection, the ticket, is closed.
                self.close(client);
                self.watch(client, ours);
                if !is_sent {
                    self.refuse(client, "it does not take its replies");
                }
            }
            Outcome::HangUp(why) => self.refuse(client, why),
        }
    }

    /// Disconnects a client, and logs the reason.
    fn refuse(&mut self, client: u32, why: &'static str) {
        let who = self.broker.who(client);
        self.broker.log.line(why, format_args!("process {who} is not served any more: {why}"));
        self.hang_up(client);
    }

    /// Disconnects a client, and forgets it.
    fn hang_up(&mut self, client: u32) {
        // Closed first: the broker may give the client's number to another one once it knows.
        self.close(client);
        self.broker.leave(client);
    }

    /// Ends a client's connection.
    fn close(&mut self, client: u32) {
        let Some(socket) = self.clients.remove(&client) else { return };
        // Removed from the epoll first: the socket may stay open for a while, and its events would
        // count as those of a later client with the same number.
        let _ = epoll::delete(&self.epoll, &socket);
        discard(socket, &self.broker.bin(client).unwrap_or_default());
    }
}

/// Ends a connection at once for its peer. Closing the socket also closes what the peer sent and
/// nobody received, which may take for ever, so the bin does it.
fn discard(socket: OwnedFd, bin: &Bin) {
    let _ = rustix::net::shutdown(&socket, Shutdown::Both);
    bin.discard(socket);
}

/// Makes the engine's carriers: links to other nodes, and guests.
fn carriers(
    links: Option<Box<dyn StreamCarrier>>,
    guests: bool,
    policy: &Policy,
) -> std::io::Result<Carriers> {
    #[cfg(feature = "guests")]
    {
        let guests = guests.then(|| crate::guests::Guests::start(policy.clone()));
        Ok(Carriers::new(links, guests.transpose()?))
    }
    #[cfg(not(feature = "guests"))]
    {
        let _ = (guests, policy);
        Ok(Carriers::new(links))
    }
}
