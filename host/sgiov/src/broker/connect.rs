//! The beginning of connections: the request of a process, the resources that a connection takes,
//! and the answer that gives a process its end.
//!
//! A connection is made in three steps. `check_room` looks for room in the families' tables and
//! within the limits of tenants; `reserve` takes all that can fail; `commit` cannot fail. So a
//! connection that is refused leaves nothing.

use std::sync::Arc;

use slipway_ring::cross::Side;
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::{Endpoint, NOT_OURS, Reply};
use slipway_sgiov_spec::table::Place;

use super::connection::{Bells, Connection, ConnectionEnd};
use super::links::{self, ArenaLink, Party};
use super::sharing::Bell;
use super::{Broker, Errno, Outcome};
use crate::accounts::{Account, Resource, ResourceHold};
use crate::address::specific;
use crate::peer::NamespaceId;

/// The two parties of a connection to make, each with its address.
pub struct Pair {
    pub connector: (Party, Address),
    pub acceptor: (Party, Address),
    /// The connector's network namespace.
    pub namespace: NamespaceId,
    /// The connector's process, or `None` if the connector is the engine.
    pub client: Option<u32>,
    /// Set if the acceptor's eventfd is chosen when it accepts.
    pub later: bool,
}

/// The resources of a connection that is not made yet.
struct Reserved {
    link: u32,
    stream: u32,
    /// The shares of accounts for the connector's end and the acceptor's end.
    held: [ResourceHold; 2],
    /// The eventfds of the connector and of the acceptor.
    bells: [Option<Bell>; 2],
}

/// Returns the answer that leaves a connection to the kernel.
fn not_ours() -> Outcome {
    Outcome::Answer(Reply::Refused(NOT_OURS), Vec::new())
}

impl Broker {
    /// Carries out [`Request::Connect`](slipway_sgiov_spec::control::Request::Connect) of a process
    /// of `family`. A connection to a listener of this node waits there to be accepted; the answer
    /// for one to another node or a guest comes with the carrier's event.
    ///
    /// # Errors
    /// `EHOSTUNREACH` if the namespace has no source address; `EADDRNOTAVAIL` if the source's port
    /// is in use, or none is free; `ENOBUFS` for want of memory or descriptors;
    /// [`LIMITED`](super::LIMITED) at a limit.
    pub(super) fn connect(
        &mut self,
        client: u32,
        family: u32,
        to: Address,
        from: Address,
    ) -> Result<Outcome, Errno> {
        let to = specific(to);
        let connector = self.families.get(family).ok_or(Errno::INVAL)?;
        let (namespace, id) = (connector.namespace, connector.peer.namespace);
        // The address that the kernel's socket is bound to may be newer than the addresses known
        // here. The connection is left to the kernel, which knows it.
        if !self.may_come_from(namespace, &to, &from) || !self.knows(namespace, &to) {
            return Ok(not_ours());
        }
        let Some(number) = self.route(namespace, &to) else {
            return Ok(self.connect_remote(client, family, to, from)?.unwrap_or_else(not_ours));
        };
        let Some(listener) = self.listeners.get(number) else { return Ok(not_ours()) };
        // A connection that finds the queue full is left to the kernel, which has a listener at the
        // same address and its own treatment of a full queue.
        if !listener.has_room() {
            return Ok(not_ours());
        }
        let (acceptor, later) = ((Party::Family(listener.family), to), listener.shares);
        let from = self.source(namespace, &to, from)?;
        let connector = (Party::Family(family), from);
        let pair = Pair { connector, acceptor, namespace: id, client: Some(client), later };
        let joined = self.join_pair(&pair);
        if joined.is_err() {
            self.namespaces.release(id, from, to);
        }
        let connection = joined?;
        self.hold(client, connection);
        if let Some(listener) = self.listeners.get_mut(number) {
            listener.queue.push_back(connection);
            let (eventfd, family) = (listener.eventfd.clone(), listener.family);
            self.tell(&eventfd, Party::Family(family));
        }
        let side = self.connections.get(connection).map_or(Side::Zero, |made| made.connector);
        self.introduce(client, family, connection, side)
    }

    /// Notes that the connector's process has its end.
    pub(super) fn hold(&mut self, client: u32, connection: u32) {
        let Some(connection) = self.connections.get_mut(connection) else { return };
        let end = connection.end_mut(connection.connector);
        end.holders = 1;
        if let Some(client) = self.clients.get_mut(client) {
            client.entries.insert(end.entry);
        }
    }

    /// Makes a connection with entries in both families' tables, all of it or nothing.
    pub(super) fn join_pair(&mut self, pair: &Pair) -> Result<u32, Errno> {
        self.check_room(pair)?;
        let reserved = self.reserve(pair)?;
        let number = self.commit(pair, reserved);
        self.sweep_soon();
        Ok(number)
    }

    /// Checks that the families' tables have room for a connection's ends, and that the tenants may
    /// have that many more.
    fn check_room(&mut self, pair: &Pair) -> Result<(), Errno> {
        let parties = [pair.connector.0, pair.acceptor.0];
        let entries = if parties[0] == parties[1] { 2 } else { 1 };
        let mut namespaces = [None; 2];
        for (party, namespace) in parties.into_iter().zip(&mut namespaces) {
            let Party::Family(number) = party else { continue };
            let family = self.families.get(number).ok_or(Errno::CONNREFUSED)?;
            family.has_room(entries).then_some(()).ok_or(Errno::NOBUFS)?;
            *namespace = Some(family.namespace);
        }
        for namespace in namespaces.into_iter().flatten() {
            // Two families of one namespace take both ends from the limit of one tenant.
            let ends = namespaces.iter().filter(|other| **other == Some(namespace)).count();
            self.check_limits(namespace, ends as u32)?;
        }
        Ok(())
    }

    /// Takes all that a connection needs. After an error, nothing of it is left.
    fn reserve(&mut self, pair: &Pair) -> Result<Reserved, Errno> {
        // Both ends count against the connector until the connection is accepted; otherwise
        // connections that wait at a listener would use up the listener's account.
        let account = self.account_of(pair).ok_or(Errno::CONNREFUSED)?;
        let held = [account.hold(Resource::Sockets, 1)?, account.hold(Resource::Sockets, 1)?];
        let has_bell = pair.acceptor.0 != Party::Engine && !pair.later;
        let acceptors = has_bell.then(|| Bell::own(&account)).transpose()?;
        let link = self.link_between(pair.connector.0, pair.acceptor.0, &account)?;
        let taken = self.take_stream(link, pair.client);
        if taken.is_err() && self.links.get(link).is_some_and(|made| made.live == 0) {
            self.end_link(link);
        }
        let (stream, connectors) = taken?;
        Ok(Reserved { link, stream, held, bells: [connectors, acceptors] })
    }

    /// Takes a stream of a link, and an eventfd for the client that connects, if there is one.
    fn take_stream(
        &mut self,
        number: u32,
        client: Option<u32>,
    ) -> Result<(u32, Option<Bell>), Errno> {
        let link = self.links.get_mut(number).ok_or(Errno::NOBUFS)?;
        let stream = link.take_stream().ok_or(Errno::NOBUFS)?;
        let bell = client.map(|client| self.bell_for(client, number)).transpose();
        if bell.is_err()
            && let Some(link) = self.links.get_mut(number)
        {
            link.give_stream(stream);
        }
        Ok((stream, bell?))
    }

    /// Makes a connection of what was reserved for it, and returns its number.
    fn commit(&mut self, pair: &Pair, reserved: Reserved) -> u32 {
        let Reserved { link, stream, held: [one, other], bells: mut here } = reserved;
        let connector = self.connectors_side(link, pair);
        let mut ends =
            [ConnectionEnd::new(pair.connector, one), ConnectionEnd::new(pair.acceptor, other)];
        if connector == Side::One {
            ends.reverse();
            here.reverse();
        }
        let bells = Bells { here, kept: None, later: pair.later };
        let namespace = pair.namespace;
        let made = Connection { link, stream, ends, bells, connector, namespace };
        let number = self.connections.insert(made);
        for side in [Side::Zero, Side::One] {
            self.grant(number, side);
        }
        number
    }

    /// Returns the connector's side of a link. In a link of a family with itself the sides differ
    /// by their link numbers.
    fn connectors_side(&self, link: u32, pair: &Pair) -> Side {
        let (a, b) = (pair.connector.0, pair.acceptor.0);
        match self.links.get(link) {
            Some(link) if a != b => links::side_of(link, a),
            _ => Side::Zero,
        }
    }

    /// Returns the account of a new connection: the connector's or, if the connector is on another
    /// node, the listener's.
    fn account_of(&self, pair: &Pair) -> Option<Arc<Account>> {
        let family = |party: Party| match party {
            Party::Family(number) => self.families.get(number).map(|family| family.account.clone()),
            Party::Engine | Party::Gone => None,
        };
        family(pair.connector.0).or_else(|| family(pair.acceptor.0))
    }

    /// Writes the entry of one end into its family's table, which has room for it.
    fn grant(&mut self, number: u32, side: Side) {
        let Some(connection) = self.connections.get(number) else { return };
        let Some(link) = self.links.get(connection.link) else { return };
        let Party::Family(family) = connection.end(side).party else { return };
        let other = connection.end(side.other()).party;
        let place = place(connection, link, side, self.are_one_tenant(family, other));
        let Some(family) = self.families.get_mut(family) else { return };
        // `check_room` has found the room, and nothing has taken an entry since then.
        let entry = family.take_entry(number, side).expect("the table has room for the entry");
        family.table.grant(entry, place);
        if let Some(connection) = self.connections.get_mut(number) {
            connection.end_mut(side).entry = entry;
        }
        if let Some(space) = self.namespaces.get_mut(family.namespace) {
            space.endpoints += 1;
        }
    }

    /// Returns whether the two parties are of one tenant, user and container, so that neither has
    /// to protect itself from the other's eventfd.
    fn are_one_tenant(&self, family: u32, other: Party) -> bool {
        let Party::Family(other) = other else { return false };
        let (Some(a), Some(b)) = (self.families.get(family), self.families.get(other)) else {
            return false;
        };
        a.peer.is_as(&b.peer)
    }

    /// Returns the answer that gives a process its side of a connection.
    pub(super) fn introduce(
        &mut self,
        client: u32,
        family: u32,
        number: u32,
        side: Side,
    ) -> Result<Outcome, Errno> {
        let connection = self.connections.get(number).ok_or(Errno::INVAL)?;
        let link = self.links.get(connection.link).ok_or(Errno::INVAL)?;
        let (mine, theirs) = (connection.end(side), connection.end(side.other()));
        let same_tenant = self.were_one_tenant(family, mine.entry, theirs.party)?;
        let place = place(connection, link, side, same_tenant);
        let bell = connection.bell(side).ok_or(Errno::INVAL)?;
        let (mut files, peer_later) = connection.eventfds(side, bell);
        let new_link = self.clients.get_mut(client).ok_or(Errno::INVAL)?.given.insert(place.link);
        if new_link {
            files.push(link.file.clone());
        }
        let endpoint =
            Endpoint { entry: mine.entry.into(), place, local: mine.local, peer: theirs.local };
        let reply = Reply::Connected { endpoint, new_link, group: bell.group, peer_later };
        Ok(Outcome::Answer(reply, files))
    }

    /// Returns whether the parties were of one tenant when the entry was granted, and still are.
    fn were_one_tenant(&self, family: u32, entry: u32, other: Party) -> Result<bool, Errno> {
        let table = &self.families.get(family).ok_or(Errno::INVAL)?.table;
        let word = table.word(entry, slipway_sgiov_spec::table::entry::PLACE);
        // The family may have changed the word since then, to its own disadvantage only.
        let granted = Place::decode(word).is_some_and(|place| place.same_tenant);
        Ok(granted && self.are_one_tenant(family, other))
    }
}

/// Returns the place of a connection's stream, as the family at `side` is told of it.
fn place(connection: &Connection, link: &ArenaLink, side: Side, same_tenant: bool) -> Place {
    Place {
        stream: connection.stream,
        side: side as u8,
        engine: connection.end(side.other()).party == Party::Engine,
        same_tenant,
        link: link.ends[side as usize].number,
    }
}

#[cfg(test)]
pub(super) mod tests;
