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
//! - `greeting`: processes that have connected and not attached yet; `proof`: whether a process has
//!   the kernel's listening socket that it claims;
//! - `attach`, `listen`, `connect`, `exec`: the requests; `finish`: how endpoints end;
//! - `route`: the listener that an address means; `tenant_limits`: what policy lets a tenant have;
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
mod route;
mod sharing;
mod sweep;
mod tenant_limits;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use slipway_peer::{Bin, Foreign};
use slipway_sgiov_spec::control::{Reply, Request};

use crate::accounts::{Account, Accounts, Refused, Resource, ResourceHold};
use crate::carriers::Carriers;
use crate::error::errno_number;
use crate::eventfds::EventfdThreads;
use crate::log::Log;
use crate::namespace::Namespaces;
use crate::peer::Peer;
use crate::policy::Policy;
use crate::reload::Renewal;
use crate::slab::Slab;

use connection::Connection;
use family::Family;
use finish::EndReason;
use greeting::Greetings;
use links::{ArenaLinks, Party};
use listen::Listeners;
use proof::{PendingListen, Proofs};
use sharing::Group;
use sweep::Sweep;

pub use report::{ConnectionReport, FamilyReport, ListenerReport, Reloads, Report, TenantReport};

/// An error as replies carry it: a number of errno(3).
pub(crate) type Errno = rustix::io::Errno;

/// A process at the other end of a control connection.
struct Client {
    peer: Peer,
    /// The account that everything the process has counts against.
    account: Arc<Account>,
    /// The account's share for its connection.
    _connection: ResourceHold,
    /// Set if it connected to the administrator's socket.
    administers: bool,
    /// Its number in [`Greetings`], or `None` once it has attached.
    greeting: Option<u64>,
    /// The number of its family, or `None` before it has attached.
    family: Option<u32>,
    /// The entries of its family's table that it has open.
    entries: BTreeSet<u32>,
    /// The listeners that it has open.
    listeners: BTreeSet<u32>,
    /// The family's links whose arenas it has got.
    given: HashSet<u16>,
    /// The time until which it is a ticket, or `None` if it is a process.
    ticket: Option<Instant>,
    /// Set if its new endpoints may share an eventfd.
    shares: bool,
    /// The eventfds that several of its endpoints share, by the number of their group.
    groups: HashMap<u32, Group>,
    /// Its request that waits for the proof of its listening socket.
    proves: Option<PendingListen>,
}

impl Client {
    /// Returns why the client may not make this request at all, or `None` if it may.
    fn forbids(&self, request: &Request) -> Option<&'static str> {
        if self.administers && !matches!(request, Request::Report | Request::Function { .. }) {
            return Some("it wants a program's sockets of the administrator's socket");
        }
        // A ticket is good for one request, which nobody else makes.
        let resumes = matches!(request, Request::Resume);
        (self.ticket.is_some() != resumes).then_some("it used a ticket for something else")
    }
}

/// The action after a request.
pub enum Outcome {
    /// No action.
    Nothing,
    /// Answer, with these descriptors.
    Answer(Reply, Vec<Arc<OwnedFd>>),
    /// Answer with the child's end; the client with this number talks over the engine's end.
    Forked { client: u32, ours: OwnedFd, theirs: Arc<OwnedFd> },
    /// Answer, and talk with the client over this from now on.
    Moved { reply: Reply, files: Vec<Arc<OwnedFd>>, ours: OwnedFd },
    /// Disconnect the client, which does not keep to the protocol.
    HangUp(&'static str),
}

impl Outcome {
    fn refused(errno: Errno) -> Self {
        Self::Answer(Reply::Refused(told(errno)), Vec::new())
    }
}

/// The error if limits of a tenant, a user or a network namespace are reached. An application gets
/// a lack of buffers for it.
const LIMITED: Errno = Errno::DQUOT;

impl From<Refused> for Errno {
    fn from(_: Refused) -> Self {
        LIMITED
    }
}

/// Returns the number of errno(3) that an application gets.
fn told(errno: Errno) -> u32 {
    let errno = if errno == LIMITED { Errno::NOBUFS } else { errno };
    errno_number(errno)
}

/// The engine's state, and its answers to requests.
#[derive(Default)]
pub struct Broker {
    /// The use that users, tenants and network namespaces make of the engine, and their limits.
    accounts: Accounts,
    /// Clients that have connected and not attached yet.
    greetings: Greetings,
    /// Processes that are connected, by number.
    clients: Slab<Client>,
    /// Families, by number.
    families: Slab<Family>,
    /// The network namespaces of clients, and their tenants.
    namespaces: Namespaces,
    /// The arenas that two families share.
    links: ArenaLinks,
    /// Connections, by number.
    connections: Slab<Connection>,
    /// The number of the group that began last.
    last_group: u32,
    /// Threads that hold eventfds beyond the limit of open files.
    eventfd_threads: EventfdThreads,
    listeners: Listeners,
    /// The round that takes memory of idle sockets back.
    sweep: Sweep,
    /// The carriers to other nodes and to guests, if the engine has any.
    remote: Option<Carriers>,
    /// Families that could not be woken without waiting. They are disconnected.
    unheard: BTreeSet<u32>,
    /// Clients that wait for another node, by connection.
    pending: HashMap<u32, u32>,
    /// Clients that are tickets, each with the time of its end, the oldest first.
    tickets: VecDeque<(Instant, u32)>,
    policy: Policy,
    /// Set if listening at any port requires a proof.
    pub proof: bool,
    /// The proofs under way. `None` if the system does not permit any.
    proofs: Option<Proofs>,
    pub log: Log,
    /// How often the policy was reloaded, and the last error.
    reloads: Reloads,
}

impl Broker {
    /// Returns a broker with `policy` that reaches other nodes and guests through `remote`.
    pub fn new(policy: Policy, remote: Option<Carriers>) -> Self {
        let proofs = Proofs::new().ok();
        let broker = Self { policy, remote, proofs, ..Self::default() };
        broker.accounts.limit(broker.policy.limits());
        broker
    }

    /// Uses another policy, and other settings for links to other nodes, from now on; or records
    /// why reading them failed. Connections stay open.
    pub fn renew(&mut self, renewal: Result<Renewal, String>) {
        self.reloads.tried += 1;
        self.reloads.error = match renewal {
            Ok(renewal) => {
                self.namespaces.renew(&renewal.policy);
                self.accounts.limit(renewal.policy.limits());
                self.policy = renewal.policy;
                #[cfg(feature = "guests")]
                if let Some(guests) = self.remote.as_mut().and_then(|remote| remote.guests.as_mut())
                {
                    guests.renew_policy(self.policy.clone());
                }
                #[cfg(feature = "links")]
                if let Some((remote, links)) = self.remote.as_mut().zip(renewal.links) {
                    crate::remote::StreamCarrier::renew(remote, links);
                }
                None
            }
            Err(error) => Some(error),
        };
    }

    /// Adds a process that has connected to the administrator's socket or to the programs'. Returns
    /// its number, and the number of another process that is to be disconnected in exchange.
    ///
    /// # Errors
    /// The error for the process, if its user or its network namespace has reached its limits.
    pub fn join(&mut self, peer: Peer, administers: bool) -> Result<(u32, Option<u32>), u32> {
        let (uid, namespace) = (peer.uid, peer.namespace.1);
        self.try_join(peer, administers).map_err(|Refused| {
            self.log.line(
                "join",
                format_args!(
                    "user {uid}, or net:[{namespace}], has as much of the engine as they may: none \
                     of their programs can attach"
                ),
            );
            errno_number(LIMITED)
        })
    }

    /// Does what [`Broker::join`] does, without the log.
    fn try_join(&mut self, peer: Peer, administers: bool) -> Result<(u32, Option<u32>), Refused> {
        let account = self.accounts.of(&peer, administers)?;
        let connection = if administers {
            account.hold_anyway(Resource::Descriptors, 1)
        } else {
            account.hold(Resource::Descriptors, 1)?
        };
        // One descriptor of the namespace serves all of its processes.
        let peer = Peer { file: account.namespace.clone(), ..peer };
        let client = Client {
            peer,
            account: account.clone(),
            _connection: connection,
            administers,
            greeting: None,
            family: None,
            entries: BTreeSet::new(),
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
        let (greeting, surplus) = self.greetings.wait(number, &account);
        if let Some(client) = self.clients.get_mut(number) {
            client.greeting = Some(greeting);
        }
        Ok((number, surplus))
    }

    /// Returns the time at which a process that has not attached is to be disconnected.
    pub fn next_greeting(&self) -> Option<Instant> {
        self.greetings.next()
    }

    /// Returns a process that has not attached in time, and which is to be disconnected.
    pub fn overdue(&self) -> Option<u32> {
        self.greetings.overdue()
    }

    /// Returns the bin that closes a client's connection.
    pub fn bin(&self, client: u32) -> Option<Bin> {
        self.clients.get(client).map(|client| client.account.bin.clone())
    }

    /// Returns the bin that closes the descriptors that a client sends.
    pub fn sent(&self, client: u32) -> Option<Bin> {
        self.clients.get(client).map(|client| client.account.sent.clone())
    }

    /// Returns the number of families.
    pub fn families(&self) -> usize {
        self.families.len()
    }

    /// Returns a description of a client for logs.
    pub fn who(&self, client: u32) -> String {
        let Some(client) = self.clients.get(client) else { return "that is gone".into() };
        format!("{} of user {}", client.peer.pid, client.peer.uid)
    }

    /// Raises a family's eventfd. A family that cannot be woken without waiting is disconnected.
    fn tell(&mut self, eventfd: &OwnedFd, party: Party) {
        if !slipway_peer::eventfd::raise(eventfd.as_fd())
            && let Party::Family(family) = party
        {
            self.unheard.insert(family);
        }
    }

    /// Returns a process of a family that could not be woken, and which is to be disconnected.
    pub fn unheard(&mut self) -> Option<u32> {
        while let Some(family) = self.unheard.first().copied() {
            let members = self.families.get(family).map(|family| &family.members);
            if let Some(client) = members.and_then(|members| members.iter().next()) {
                return Some(*client);
            }
            self.unheard.remove(&family);
        }
        None
    }

    /// Carries out a client's request.
    pub fn request(&mut self, number: u32, request: Request, files: Vec<Foreign>) -> Outcome {
        let client = self.clients.get(number);
        if let Some(reason) = client.and_then(|client| client.forbids(&request)) {
            return Outcome::HangUp(reason);
        }
        let family = client.and_then(|client| client.family);
        let client = number;
        let outcome = match (request, family) {
            (Request::Attach { version }, None) => {
                let attached = self.attach(client, version);
                // No error of a socket: the library logs the reason.
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
                let wanted = listen::ListenRequest { at, backlog, shared, v6_only };
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
            self.log.line(
                "limit",
                format_args!(
                    "process {who}: its tenant, user or network namespace has as many sockets, or \
                     as much memory for them, as it may"
                ),
            );
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

    /// Logs that a process cannot attach, and returns the answer.
    fn full(&mut self, client: u32) -> Outcome {
        let who = self.who(client);
        self.log.line(
            "join",
            format_args!(
                "process {who} cannot attach: its user or network namespace has as much of the \
                 engine as it may"
            ),
        );
        Outcome::Answer(Reply::Refused(errno_number(LIMITED)), Vec::new())
    }

    /// Removes a client whose connection has ended, and everything that it held.
    pub fn leave(&mut self, number: u32) {
        let Some(client) = self.clients.remove(number) else { return };
        if let Some(greeting) = client.greeting {
            self.greetings.done(greeting);
        }
        self.asker_left(number);
        let Some(family) = client.family else { return };
        self.pending.retain(|_, waits| *waits != number);
        for listener in client.listeners {
            self.leave_listener(listener);
        }
        for entry in client.entries {
            self.drop_holder(family, entry, EndReason::Killed);
        }
        let Some(left) = self.families.get_mut(family) else { return };
        left.members.remove(&number);
        if left.members.is_empty() {
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

    /// Runs a whole round of the sweeper.
    pub fn sweep_now(&mut self) {
        self.sweep.due();
        self.sweep();
    }

    /// Returns all memory that families can write.
    pub fn writable(&self) -> Vec<slipway_ram::Lasting> {
        let tables = self.families.iter().map(|(_, family)| family.table.memory().clone());
        let arenas = self.links.iter().filter_map(|(_, link)| {
            let file = link.file.try_clone().ok()?;
            slipway_ram::Lasting::of(file).ok()
        });
        tables.chain(arenas).collect()
    }
}
