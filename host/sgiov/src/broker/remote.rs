//! Connections to other nodes and to guests. One end is the engine's, and a carrier
//! ([`StreamCarrier`]) serves it.

use std::os::fd::BorrowedFd;

use slipway_ring::cross::{Side, Tail};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::Reply;

use super::connect::Pair;
use super::links::Party;
use super::{Broker, EndReason, Errno, Outcome};
use crate::remote::{Destined, Event, Line, StreamCarrier};

impl Broker {
    /// Has the carrier connect to `to`. Returns `None` if the carrier has no way there.
    pub(super) fn connect_remote(
        &mut self,
        client: u32,
        family: u32,
        to: Address,
        from: Address,
    ) -> Result<Option<Outcome>, Errno> {
        let connector = self.families.get(family).ok_or(Errno::INVAL)?;
        let (namespace, id) = (connector.namespace, connector.peer.namespace);
        let tenant = self.namespaces.get(namespace).ok_or(Errno::INVAL)?.name();
        if to.is_loopback()
            || !self.remote.as_ref().is_some_and(|remote| remote.is_for(&tenant, &to))
        {
            return Ok(None);
        }
        let from = self.source(namespace, &to, from)?;
        let pair = Pair {
            connector: (Party::Family(family), from),
            acceptor: (Party::Engine, to),
            namespace: id,
            client: Some(client),
            later: false,
        };
        let joined = self.join_pair(&pair);
        if joined.is_err() {
            self.namespaces.release(id, from, to);
        }
        let connection = joined?;
        self.hold(client, connection);
        self.pending.insert(connection, client);
        let line = self.line(connection).ok_or(Errno::NOBUFS)?;
        if let Some(remote) = &mut self.remote {
            remote.connect(connection, &tenant, from, to, line);
        }
        Ok(Some(Outcome::Nothing))
    }

    /// Returns the engine's side of a connection, for the carrier.
    fn line(&self, number: u32) -> Option<Line> {
        let connection = self.connections.get(number)?;
        let link = self.links.get(connection.link)?;
        let side = [Side::Zero, Side::One]
            .into_iter()
            .find(|side| connection.end(*side).party == Party::Engine)?;
        let other = connection.end(side.other());
        let Party::Family(family) = other.party else { return None };
        let namespace = self.families.get(family)?.namespace;
        Some(Line {
            tenant: self.namespaces.get(namespace)?.name().into(),
            arena: link.arena.clone(),
            stream: connection.stream,
            side,
            eventfd: connection.bell(side.other())?.eventfd.clone(),
            family,
            entry: other.entry,
            regions: link.bits.clone()?,
        })
    }

    /// Returns the descriptors of which one is readable when a carrier has events.
    pub fn remote_wakes(&self) -> Vec<BorrowedFd<'_>> {
        self.remote.as_ref().map(|remote| remote.wakes()).unwrap_or_default()
    }

    /// Handles the carrier's events. Returns outcomes for clients that waited.
    pub fn remote_events(&mut self) -> Vec<(u32, Outcome)> {
        let events = self.remote.as_mut().map(|remote| remote.events()).unwrap_or_default();
        events.into_iter().filter_map(|event| self.remote_event(event)).collect()
    }

    /// Handles an event of the carrier. Returns the outcome for a client that waited for it.
    fn remote_event(&mut self, event: Event) -> Option<(u32, Outcome)> {
        match event {
            Event::Connected { connection } => self.remote_connected(connection),
            Event::Refused { connection, errno } => self.remote_refused(connection, errno),
            Event::Incoming { incoming, into, from, to } => {
                let answer = self.incoming(&into, from, to).map_err(super::told);
                if let Some(remote) = &mut self.remote {
                    remote.answer(incoming, answer);
                }
                None
            }
            Event::FromGuest { incoming, tenant, from, to } => {
                let answer = self.guest_asks(&tenant, from, to).map_err(super::told);
                if let Some(remote) = &mut self.remote {
                    remote.answer(incoming, answer);
                }
                None
            }
            Event::Ended { connection, last } => {
                self.finish_engine(connection, last);
                None
            }
        }
    }

    /// Introduces the two ends of a connection that the other side has accepted.
    fn remote_connected(&mut self, connection: u32) -> Option<(u32, Outcome)> {
        let client = self.pending.remove(&connection)?;
        let there = self.connections.get(connection)?;
        let side = there.connector;
        let Party::Family(family) = there.end(side).party else { return None };
        let outcome = self.introduce(client, family, connection, side);
        Some((client, outcome.unwrap_or_else(Outcome::refused)))
    }

    /// Ends a connection that the other side has refused.
    fn remote_refused(&mut self, connection: u32, errno: u32) -> Option<(u32, Outcome)> {
        let client = self.pending.remove(&connection);
        self.finish_engine(connection, Tail::default());
        let there = self.connections.get(connection)?;
        let (entry, side) = (there.end(there.connector).entry, there.connector);
        let client = client?;
        if let Some(client) = self.clients.get_mut(client) {
            client.entries.remove(&entry);
        }
        self.finish(connection, side, EndReason::Refused);
        Some((client, Outcome::Answer(Reply::Refused(errno), Vec::new())))
    }

    /// Makes a connection from another node, which then waits to be accepted.
    fn incoming(
        &mut self,
        into: &Destined,
        from: Address,
        to: Address,
    ) -> Result<(u32, Line), Errno> {
        let namespace = match into {
            Destined::Tenant(name) => self.namespaces.named(name).ok_or(Errno::CONNREFUSED)?,
            Destined::Namespace(number) => *number,
        };
        let space = self.namespaces.get_mut(namespace).ok_or(Errno::CONNREFUSED)?;
        if to.is_loopback() || !space.has(&to.ip) {
            return Err(Errno::HOSTUNREACH);
        }
        self.enqueue(namespace, from, to)
    }

    /// Makes a connection from a guest of the tenant to the one network namespace that has the
    /// address and that policy lets the guest reach. If there is none, the connection is left to
    /// the guest's kernel.
    fn guest_asks(
        &mut self,
        tenant: &str,
        from: Address,
        to: Address,
    ) -> Result<(u32, Line), Errno> {
        let owner = if to.is_loopback() { None } else { self.owner(&to) };
        let namespace = owner.ok_or(Errno::PROTONOSUPPORT)?;
        let name = self.tenant(namespace);
        if name != Some(tenant) && !self.policy.allows(Some(tenant), name, &to) {
            return Err(Errno::PROTONOSUPPORT);
        }
        self.enqueue(namespace, from, to)
    }

    fn enqueue(
        &mut self,
        namespace: u32,
        from: Address,
        to: Address,
    ) -> Result<(u32, Line), Errno> {
        let id = self.namespaces.get(namespace).ok_or(Errno::CONNREFUSED)?.id;
        let listener = self.listeners.find(namespace, &to).ok_or(Errno::CONNREFUSED)?;
        let there = self.listeners.get(listener).filter(|there| there.has_room());
        let family = there.ok_or(Errno::CONNREFUSED)?.family;
        let pair = Pair {
            connector: (Party::Engine, from),
            acceptor: (Party::Family(family), to),
            namespace: id,
            client: None,
            later: false,
        };
        let connection = self.join_pair(&pair)?;
        if let Some(there) = self.listeners.get_mut(listener) {
            there.queue.push_back(connection);
            let eventfd = there.eventfd.clone();
            self.tell(&eventfd, Party::Family(family));
        }
        self.line(connection).map(|line| (connection, line)).ok_or(Errno::NOBUFS)
    }
}
