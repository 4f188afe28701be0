//! Listeners by address, and the connections that wait to be accepted.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use slipway_peer::Foreign;

use rustix::event::{EventfdFlags, eventfd};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::Reply;

use super::links::Party;
use super::{Broker, Errno, Outcome, lack};
use crate::accounts::{Resource, ResourceHold};
use crate::address::{collide, is_meant};
use crate::remote::StreamCarrier;
use crate::slab::Slab;

/// The largest number of connections that may wait at one listener.
const BACKLOG: u32 = 4096;
/// The number of listeners that may share an address: each connection to the port looks at all of
/// them.
const SHARING: usize = 1024;
/// Ports below this one require a proof by the kernel's socket.
const PRIVILEGED: u16 = 1024;

/// The fields of [`slipway_sgiov_spec::control::Request::Listen`].
pub struct ListenRequest {
    pub at: Address,
    pub backlog: u32,
    pub shared: bool,
    pub v6_only: bool,
}

pub struct Listener {
    pub family: u32,
    pub namespace: u32,
    pub at: Address,
    v6_only: bool,
    shared: bool,
    uid: u32,
    pub backlog: u32,
    /// Connections that wait to be accepted.
    pub queue: VecDeque<u32>,
    /// Counts the connections that wait. A process takes one from the count before it asks for a
    /// connection.
    pub eventfd: Arc<OwnedFd>,
    /// The count may be less than the connections that wait: a process ended, which may have taken
    /// some and not asked for their connections.
    is_short: bool,
    holders: u32,
    /// The account's share for its eventfd.
    _held: ResourceHold,
    /// The process that accepted last shares eventfds.
    pub shares: bool,
}

impl Listener {
    /// Returns whether one more connection may wait. As with the kernel, one more than the backlog
    /// may wait.
    pub fn has_room(&self) -> bool {
        self.queue.len() <= self.backlog as usize
    }
}

#[derive(Default)]
pub struct Listeners {
    all: Slab<Listener>,
    by_port: HashMap<u16, BTreeSet<u32>>,
    turn: usize,
}

impl Listeners {
    pub fn get(&self, number: u32) -> Option<&Listener> {
        self.all.get(number)
    }

    pub fn get_mut(&mut self, number: u32) -> Option<&mut Listener> {
        self.all.get_mut(number)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &Listener)> {
        self.all.iter()
    }

    pub fn add_holder(&mut self, number: u32) {
        if let Some(listener) = self.all.get_mut(number) {
            listener.holders += 1;
        }
    }

    /// Returns the namespaces with a listener that `to` could mean.
    pub fn namespaces(&self, to: &Address) -> Vec<u32> {
        let numbers = self.by_port.get(&to.port).into_iter().flatten();
        let listeners = numbers.filter_map(|number| self.all.get(*number));
        let meant = listeners.filter(|listener| is_meant(&listener.at, listener.v6_only, to));
        let mut all: Vec<u32> = meant.map(|listener| listener.namespace).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Returns the listener in `namespace` that `to` means. One at exactly this address precedes
    /// one at all addresses, and listeners that share an address take turns.
    pub fn find(&mut self, namespace: u32, to: &Address) -> Option<u32> {
        let numbers = self.by_port.get(&to.port)?;
        let all = &self.all;
        let meant = |number: &&u32| {
            all.get(**number).is_some_and(|listener| {
                listener.namespace == namespace && is_meant(&listener.at, listener.v6_only, to)
            })
        };
        let exact =
            |number: &&u32| all.get(**number).is_some_and(|listener| listener.at.ip == to.ip);
        let any_exact = numbers.iter().filter(meant).any(|number| exact(&number));
        let candidates: Vec<u32> = numbers
            .iter()
            .filter(meant)
            .filter(|number| !any_exact || exact(number))
            .copied()
            .collect();
        self.turn = self.turn.wrapping_add(1);
        candidates.get(self.turn % candidates.len().max(1)).copied()
    }

    fn collides(&self, new: &Listener) -> bool {
        let numbers = self.by_port.get(&new.at.port).into_iter().flatten();
        numbers.filter_map(|number| self.all.get(*number)).any(|old| {
            old.namespace == new.namespace
                && collide((&old.at, old.v6_only), (&new.at, new.v6_only))
                && !(old.shared && new.shared && old.uid == new.uid)
        })
    }

    /// Returns whether the largest number of listeners that may share an address listens at this
    /// one.
    fn is_full(&self, namespace: u32, at: &Address) -> bool {
        let numbers = self.by_port.get(&at.port).into_iter().flatten();
        let there = numbers.filter_map(|number| self.all.get(*number));
        there.filter(|old| old.namespace == namespace && old.at == *at).count() >= SHARING
    }

    fn insert(&mut self, listener: Listener) -> u32 {
        let port = listener.at.port;
        let number = self.all.insert(listener);
        self.by_port.entry(port).or_default().insert(number);
        number
    }

    /// Removes one holder. Returns the listener if that was the last one.
    fn release(&mut self, number: u32) -> Option<Listener> {
        let listener = self.all.get_mut(number)?;
        listener.holders -= 1;
        if listener.holders > 0 {
            return None;
        }
        let listener = self.all.remove(number)?;
        if let Some(numbers) = self.by_port.get_mut(&listener.at.port) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.by_port.remove(&listener.at.port);
            }
        }
        Some(listener)
    }
}

impl Broker {
    pub(super) fn listen(
        &mut self,
        number: u32,
        family: u32,
        wanted: ListenRequest,
        proof: Option<Foreign>,
    ) -> Result<Outcome, Errno> {
        let client = self.clients.get(number).ok_or(Errno::INVAL)?;
        let (uid, at) = (client.peer.uid, wanted.at);
        match proof {
            Some(socket) => self.prove(number, wanted, socket),
            None if self.proof || (1..PRIVILEGED).contains(&at.port) => {
                self.log.line(
                    "proof",
                    format_args!(
                        "a process of user {uid} may not listen at {} without the kernel's socket",
                        crate::address::show(&at)
                    ),
                );
                Err(Errno::ACCESS)
            }
            None => self.listen_at(number, family, wanted),
        }
    }

    /// Listens, after the proof that the program may.
    pub(super) fn listen_at(
        &mut self,
        number: u32,
        family: u32,
        wanted: ListenRequest,
    ) -> Result<Outcome, Errno> {
        let client = self.clients.get(number).ok_or(Errno::INVAL)?;
        let (uid, at) = (client.peer.uid, wanted.at);
        let namespace = self.families.get(family).ok_or(Errno::INVAL)?.namespace;
        let held = client.account.hold(Resource::Descriptors, 1)?;
        let mut listener = Listener {
            family,
            namespace,
            at,
            v6_only: wanted.v6_only,
            shared: wanted.shared,
            uid,
            backlog: wanted.backlog.clamp(1, BACKLOG),
            queue: VecDeque::new(),
            eventfd: Arc::new(
                eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(lack)?,
            ),
            is_short: false,
            holders: 1,
            _held: held,
            shares: false,
        };
        if at.port == 0 {
            listener.at.port = self.free_listening_port(&mut listener)?;
        } else if self.listeners.collides(&listener) {
            return Err(Errno::ADDRINUSE);
        } else if self.listeners.is_full(namespace, &at) {
            return Err(super::LIMITED);
        }
        let (at, eventfd) = (listener.at, listener.eventfd.clone());
        let listener = self.listeners.insert(listener);
        if let Some(remote) = &mut self.remote {
            remote.listens(namespace, at);
        }
        if let Some(client) = self.clients.get_mut(number) {
            client.listeners.insert(listener);
        }
        Ok(Outcome::Answer(Reply::Listening { listener: listener.into(), at }, vec![eventfd]))
    }

    fn free_listening_port(&self, listener: &mut Listener) -> Result<u16, Errno> {
        let free = |port: &u16| {
            listener.at.port = *port;
            !self.listeners.collides(listener)
        };
        crate::ports::PORTS.rev().find(free).ok_or(Errno::ADDRINUSE)
    }

    pub(super) fn unlisten(&mut self, number: u32, listener: u64) -> Result<Outcome, Errno> {
        let listener = u32::try_from(listener).map_err(|_| Errno::BADF)?;
        let client = self.clients.get_mut(number).ok_or(Errno::INVAL)?;
        if !client.listeners.remove(&listener) {
            return Err(Errno::BADF);
        }
        self.drop_listener(listener);
        Ok(Outcome::Answer(Reply::Done, Vec::new()))
    }

    /// Removes one process from the holders of a listener. With the last one, waiting connections
    /// are reset.
    pub(super) fn drop_listener(&mut self, listener: u32) {
        let Some(listener) = self.listeners.release(listener) else { return };
        if let Some(remote) = &mut self.remote {
            remote.listens_no_more(listener.namespace, listener.at);
        }
        for connection in listener.queue {
            self.refuse(connection);
        }
    }

    /// Removes a process that has ended from the holders of a listener. The processes that are left
    /// are woken for the connections that wait, since that process may have been woken for them.
    pub(super) fn leave_listener(&mut self, listener: u32) {
        self.drop_listener(listener);
        if let Some(there) = self.listeners.get_mut(listener) {
            there.is_short = true;
            self.make_up(listener);
        }
    }

    /// Raises a listener's eventfd for one of the connections that wait, if the eventfd may count
    /// too few. The next one is made up for when that one is accepted.
    fn make_up(&mut self, listener: u32) {
        let Some(there) = self.listeners.get_mut(listener) else { return };
        there.is_short &= !there.queue.is_empty();
        if there.is_short {
            let (eventfd, family) = (there.eventfd.clone(), there.family);
            self.tell(&eventfd, Party::Family(family));
        }
    }

    pub(super) fn accept(
        &mut self,
        number: u32,
        family: u32,
        listener: u64,
    ) -> Result<Outcome, Errno> {
        let listener = u32::try_from(listener).map_err(|_| Errno::BADF)?;
        let client = self.clients.get_mut(number).ok_or(Errno::INVAL)?;
        if !client.listeners.contains(&listener) {
            return Err(Errno::BADF);
        }
        let there = self.listeners.get_mut(listener).ok_or(Errno::AGAIN)?;
        there.shares = client.shares;
        let connection = there.queue.pop_front().ok_or(Errno::AGAIN)?;
        self.make_up(listener);
        let there = self.connections.get(connection).ok_or(Errno::AGAIN)?;
        let (link, side) = (there.link, there.connector.other());
        if there.bell(side).is_none() {
            let bell = match self.bell_for(number, link) {
                Ok(bell) => bell,
                Err(errno) => {
                    self.waits_on(listener, connection);
                    return Err(errno);
                }
            };
            let there = self.connections.get_mut(connection).ok_or(Errno::AGAIN)?;
            there.bells.here[side as usize] = Some(bell);
        }
        let account = self.clients.get(number).ok_or(Errno::INVAL)?.account.clone();
        let there = self.connections.get_mut(connection).ok_or(Errno::AGAIN)?;
        there.count_against(side, &account);
        there.end_mut(side).holders = 1;
        let entry = there.end(side).entry;
        if let Some(client) = self.clients.get_mut(number) {
            client.entries.insert(entry);
        }
        let outcome = self.introduce(number, family, connection, side);
        self.keep(connection);
        outcome
    }

    /// Puts a connection that could not be accepted now back to the front of the queue.
    fn waits_on(&mut self, listener: u32, connection: u32) {
        if let Some(there) = self.listeners.get_mut(listener) {
            there.queue.push_front(connection);
            let (eventfd, family) = (there.eventfd.clone(), there.family);
            self.tell(&eventfd, Party::Family(family));
        }
    }
}
