//! The engine's state and its answers to requests, without its socket: clients, listeners,
//! connections.
//!
//! A [`Broker`] gets the arrival, the requests and the departure of clients, and returns answers.
//! It owns all memory and all descriptors that it hands out, so the end of a process's connection
//! alone tells what the process leaves behind: nothing that a process writes anywhere decides what
//! is released.
//!
//! - `family`: families and their tables; `links`: arenas; `connection`: one connection and its two
//!   ends;
//! - `attach`, `listen`, `connect`, `exec`: the requests; `finish`: how endpoints end;
//! - `remote`: connections to other nodes and to guests; `guests`: their socket functions;
//! - `sharing`: the eventfds of connections' ends; `sweep`: memory of idle sockets; `report`: the
//!   report for people.

mod attach;
mod connect;
mod connection;
mod exec;
mod family;
mod finish;
mod greeting;
mod guests;
mod links;
mod listen;
mod proof;
mod remote;
mod report;
mod sharing;
mod sweep;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use slipway_peer::{Bin, Foreign};
use slipway_sgiov_spec::control::{Reply, Request};

use crate::accounts::{Account, Accounts, Held, Refused, Resource};
use crate::keeper::Keepers;
use crate::log::Log;
use crate::namespace::Namespaces;
use crate::peer::Peer;
use crate::policy::Policy;
use crate::reload::Renewal;
use crate::slab::Slab;
use crate::ways::Ways;

use connection::Connection;
use family::Family;
use greeting::Greetings;
use links::{Links, Party};
use listen::Listeners;
use proof::{Asked, Proofs};
use sharing::Group;
use sweep::Sweep;

pub use report::{ConnectionReport, FamilyReport, ListenerReport, Reloads, Report, TenantReport};

/// A number of errno(3), as replies carry it.
pub(crate) type Errno = rustix::io::Errno;

/// One process, at the other end of a control connection.
struct Client {
    peer: Peer,
    /// Whom all that the process has is counted against.
    account: Arc<Account>,
    /// Its connection.
    _connection: Held,
    /// It came by the administrator's socket.
    administers: bool,
    /// It has not attached yet: its number among those.
    greets: Option<u64>,
    family: Option<u32>,
    /// Entries that it has open.
    held: BTreeSet<u32>,
    /// Listeners that it has open.
    listeners: BTreeSet<u32>,
    /// Links of the family whose arenas it has been given.
    given: HashSet<u16>,
    /// It is a ticket, until then.
    ticket: Option<Instant>,
    /// Its new endpoints may share an eventfd, and which one, by link.
    shares: bool,
    groups: HashMap<u32, Group>,
    /// It waits for what the kernel says of its listening socket.
    proves: Option<Asked>,
}

/// The action after a request.
pub enum Outcome {
    /// No action.
    Nothing,
    /// Answer it, with these descriptors.
    Answer(Reply, Vec<Arc<OwnedFd>>),
    /// Answer with the child's end; the client with this number talks over the engine's end.
    Forked { client: u32, ours: OwnedFd, theirs: Arc<OwnedFd> },
    /// Answer, and talk with the client over this from now on.
    Moved { reply: Reply, files: Vec<Arc<OwnedFd>>, ours: OwnedFd },
    /// The client does not keep to the protocol: hang up.
    HangUp(&'static str),
}

impl Outcome {
    fn refused(errno: Errno) -> Self {
        Self::Answer(Reply::Refused(told(errno)), Vec::new())
    }
}

/// Limits of a tenant, a user or a network namespace do not allow it: to an application a lack of
/// buffers.
const LIMITED: Errno = Errno::DQUOT;

impl From<Refused> for Errno {
    fn from(_: Refused) -> Self {
        LIMITED
    }
}

/// Returns the number of errno(3) that an application gets.
fn told(errno: Errno) -> u32 {
    let errno = if errno == LIMITED { Errno::NOBUFS } else { errno };
    errno.raw_os_error().unsigned_abs()
}

/// See the module's head.
#[derive(Default)]
pub struct Broker {
    accounts: Accounts,
    greetings: Greetings,
    clients: Slab<Client>,
    families: Slab<Family>,
    namespaces: Namespaces,
    links: Links,
    connections: Slab<Connection>,
    /// The number of the group that began last.
    last_group: u32,
    keepers: Keepers,
    listeners: Listeners,
    sweep: Sweep,
    remote: Option<Ways>,
    /// Families that could not be told of something without waiting: they are hung up on.
    unheard: BTreeSet<u32>,
    /// Clients that wait for another node, by connection.
    pending: HashMap<u32, u32>,
    /// Clients that are tickets, and until when, the oldest first.
    tickets: VecDeque<(Instant, u32)>,
    policy: Policy,
    /// Listen wants a proof.
    pub proof: bool,
    proofs: Option<Proofs>,
    pub log: Log,
    reloads: Reloads,
}

impl Broker {
    /// One that knows `policy`, and reaches other nodes and guests through `remote`.
    pub fn new(policy: Policy, remote: Option<Ways>) -> Self {
        let proofs = Proofs::new().ok();
        let broker = Self { policy, remote, proofs, ..Self::default() };
        broker.accounts.limit(broker.policy.limits());
        broker
    }

    /// Another policy, and settings for links to other nodes, from now on; or why there is none.
    /// What is connected stays so.
    pub fn renew(&mut self, renewal: Result<Renewal, String>) {
        self.reloads.tried += 1;
        self.reloads.error = match renewal {
            Ok(renewal) => {
                self.namespaces.renew(&renewal.policy);
                self.accounts.limit(renewal.policy.limits());
                self.policy = renewal.policy;
                #[cfg(feature = "guests")]
                if let Some(guests) = self.remote.as_mut().and_then(|ways| ways.guests.as_mut()) {
                    guests.go_by(self.policy.clone());
                }
                #[cfg(feature = "links")]
                if let Some((ways, links)) = self.remote.as_mut().zip(renewal.links) {
                    crate::remote::Remote::renew(ways, links);
                }
                None
            }
            Err(error) => Some(error),
        };
    }

    /// A process has connected, by the administrator's socket or by that of programs. Its number,
    /// and that of another process, to be hung up on for it.
    ///
    /// # Errors
    /// Its user or its network namespace have as much of the engine as they may: what it is told.
    pub fn join(&mut self, peer: Peer, administers: bool) -> Result<(u32, Option<u32>), u32> {
        let joined = self.join_as(peer, administers).inspect_err(|(uid, namespace)| {
            let text = "of the engine as they may: none of their programs can attach";
            let namespace = namespace.1;
            let who = format_args!("user {uid}, or net:[{namespace}], has as much {text}");
            self.log.line("join", who);
        });
        joined.map_err(|_| LIMITED.raw_os_error().unsigned_abs())
    }

    fn join_as(
        &mut self,
        peer: Peer,
        administers: bool,
    ) -> Result<(u32, Option<u32>), (u32, crate::peer::NamespaceId)> {
        let who = (peer.uid, peer.namespace);
        let account = self.accounts.of(&peer, administers).map_err(|_| who)?;
        let connection = if administers {
            account.hold_anyway(Resource::Descriptors, 1)
        } else {
            account.hold(Resource::Descriptors, 1).map_err(|_| who)?
        };
        // One descriptor of the namespace does for all of its processes.
        let peer = Peer { file: account.namespace.clone(), ..peer };
        let client = Client {
            peer,
            account: account.clone(),
            _connection: connection,
            administers,
            greets: None,
            family: None,
            held: BTreeSet::new(),
            listeners: BTreeSet::new(),
            given: HashSet::new(),
            ticket: None,
            shares: false,
            groups: HashMap::new(),
            proves: None,
        };
        let number = self.clients.insert(client);
        if administers {
            return Ok((number, None));
        }
        let (greets, surplus) = self.greetings.wait(number, &account);
        if let Some(client) = self.clients.get_mut(number) {
            client.greets = Some(greets);
        }
        Ok((number, surplus))
    }

    /// When a process is to be hung up on that has not attached.
    pub fn next_greeting(&self) -> Option<Instant> {
        self.greetings.next()
    }

    /// A process that has not attached in time: hang up on it.
    pub fn overdue(&self) -> Option<u32> {
        self.greetings.overdue()
    }

    /// Where a client's connection goes.
    pub fn bin(&self, client: u32) -> Option<Bin> {
        self.clients.get(client).map(|client| client.account.bin.clone())
    }

    /// Where descriptors go that a client sends.
    pub fn sent(&self, client: u32) -> Option<Bin> {
        self.clients.get(client).map(|client| client.account.sent.clone())
    }

    /// Families that are there.
    pub fn families(&self) -> usize {
        self.families.len()
    }

    /// A client, for people to read.
    pub fn who(&self, client: u32) -> String {
        let Some(client) = self.clients.get(client) else { return "that is gone".into() };
        format!("{} of user {}", client.peer.pid, client.peer.uid)
    }

    /// Raises an eventfd of a family's. A family that cannot be told is not waited for.
    fn tell(&mut self, eventfd: &OwnedFd, party: Party) {
        if !slipway_peer::eventfd::raise(eventfd.as_fd())
            && let Party::Family(family) = party
        {
            self.unheard.insert(family);
        }
    }

    /// A process of a family that could not be told of something: hang up on it.
    pub fn unheard(&mut self) -> Option<u32> {
        while let Some(family) = self.unheard.first().copied() {
            let there = self.families.get(family);
            if let Some(client) = there.and_then(|family| family.members.iter().next()) {
                return Some(*client);
            }
            self.unheard.remove(&family);
        }
        None
    }

    /// Does what a client asks for.
    pub fn request(&mut self, client: u32, request: Request, files: Vec<Foreign>) -> Outcome {
        let there = self.clients.get(client);
        let administers = there.is_some_and(|client| client.administers);
        if administers && !matches!(request, Request::Report | Request::Function { .. }) {
            return Outcome::HangUp("it wants a program's sockets of the administrator's socket");
        }
        let family = there.and_then(|client| client.family);
        let is_ticket = there.is_some_and(|client| client.ticket.is_some());
        if is_ticket != (request == Request::Resume) {
            return Outcome::HangUp("it used a ticket for something else");
        }
        let outcome = match (request, family) {
            (Request::Attach { version }, None) => {
                let attached = self.attach(client, version);
                // Not what a socket would say: the library passes the reason on.
                return match attached {
                    Err(LIMITED) => self.full(client),
                    other => other.unwrap_or_else(Outcome::refused),
                };
            }
            (Request::Report, _) => self.report_to(client),
            (Request::Function { bytes }, _) => self.serve_function(client, bytes, files),
            (Request::Attach { .. }, Some(_)) => return Outcome::HangUp("it attached twice"),
            (_, None) => return Outcome::HangUp("it asked before it attached"),
            (Request::Fork, Some(family)) => self.fork(client, family),
            (Request::Exec, Some(family)) => self.exec(client, family),
            (Request::Resume, Some(family)) => self.resume(client, family),
            (Request::Held { entry }, Some(family)) => self.held(client, family, entry),
            (Request::HeldListener { listener }, Some(_)) => self.held_listener(client, listener),
            (Request::Listen { at, backlog, shared, v6_only }, Some(family)) => {
                let wanted = listen::Wanted { at, backlog, shared, v6_only };
                self.listen(client, family, wanted, files.into_iter().next())
            }
            (Request::Unlisten { listener }, Some(_)) => self.unlisten(client, listener),
            (Request::Accept { listener }, Some(family)) => self.accept(client, family, listener),
            (Request::Connect { to, from }, Some(family)) => self.connect(client, family, to, from),
            (Request::Close { entry }, Some(family)) => return self.close(client, family, entry),
            (Request::Share { on }, Some(_)) => return self.share(client, on),
            (Request::Peer { entry }, Some(family)) => self.peer(client, family, entry),
        };
        outcome.unwrap_or_else(|errno| self.failed(client, errno))
    }

    /// Logs why a request failed, and returns the answer to its client.
    fn failed(&mut self, client: u32, errno: Errno) -> Outcome {
        if errno == LIMITED {
            let who = self.who(client);
            let text = "its tenant, user or network namespace has as many sockets, or as much \
                        memory for them, as it may";
            self.log.line("limit", format_args!("process {who}: {text}"));
        }
        if matches!(errno, Errno::NOBUFS | Errno::MFILE | Errno::NFILE | Errno::NOMEM) {
            self.log.line(
                "memory",
                format_args!("a request failed for want of memory or descriptors: {errno}"),
            );
            return Outcome::refused(Errno::NOBUFS);
        }
        Outcome::refused(errno)
    }

    /// A process cannot attach.
    fn full(&mut self, client: u32) -> Outcome {
        let who = self.who(client);
        let text =
            "cannot attach: its user or network namespace has as much of the engine as it may";
        self.log.line("join", format_args!("process {who} {text}"));
        Outcome::Answer(Reply::Refused(LIMITED.raw_os_error().unsigned_abs()), Vec::new())
    }

    /// A client's connection has ended, and with it all that it held.
    pub fn leave(&mut self, number: u32) {
        let Some(client) = self.clients.remove(number) else { return };
        if let Some(greets) = client.greets {
            self.greetings.done(greets);
        }
        self.asker_left(number);
        let Some(family) = client.family else { return };
        self.pending.retain(|_, waits| *waits != number);
        for listener in client.listeners {
            self.drop_listener(listener);
        }
        for entry in client.held {
            self.drop_holder(family, entry, true);
        }
        let Some(there) = self.families.get_mut(family) else { return };
        there.members.remove(&number);
        if there.members.is_empty() {
            self.end_family(family);
        }
    }
}

/// Converts an error of the system to the one that an application gets: a lack of buffers.
fn lack(_: impl std::fmt::Display) -> Errno {
    Errno::NOBUFS
}

#[cfg(any(test, feature = "fuzz"))]
impl Broker {
    /// Returns whether there are no clients, and nothing is left of any.
    pub fn is_empty(&self) -> bool {
        self.clients.len() == 0
            && self.families.len() == 0
            && self.connections.len() == 0
            && self.links.iter().next().is_none()
            && self.listeners.iter().next().is_none()
            && self.namespaces.is_empty()
    }

    /// A round of the sweeper that is due.
    pub fn sweep_now(&mut self) {
        self.sweep.due();
        self.sweep();
    }

    /// All that families can write.
    pub fn writable(&self) -> Vec<slipway_ram::Lasting> {
        let tables = self.families.iter().map(|(_, family)| family.table.memory().clone());
        let arenas = self.links.iter().filter_map(|(_, link)| {
            let file = link.file.try_clone().ok()?;
            slipway_ram::Lasting::of(file).ok()
        });
        tables.chain(arenas).collect()
    }
}
