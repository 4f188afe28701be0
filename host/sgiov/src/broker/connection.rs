//! One connection: a stream of a link, and its two ends.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use slipway_ring::cross::{Side, Tail};
use slipway_sgiov_spec::Address;

use super::links::Party;
use super::sharing::Bell;
use crate::accounts::{Account, Resource, ResourceHold};
use crate::eventfds::PairPlace;
use crate::peer::NamespaceId;

/// One end of a connection.
pub struct ConnectionEnd {
    pub party: Party,
    /// The end's entry in its family's table.
    pub entry: u32,
    /// The end's address.
    pub local: Address,
    /// The number of processes that have the end open.
    pub holders: u32,
    /// Set when no process has the end any more and its half of the stream is finished.
    pub closed: bool,
    /// The tail that its producer had written when the end was closed: the region of its bytes,
    /// according to the producer.
    pub last: Tail,
    /// The share of the account of the acceptor or the connector. Until the connection is accepted,
    /// both ends count against the connector.
    pub held: ResourceHold,
}

impl ConnectionEnd {
    /// Makes the end of a party at an address, without an entry.
    pub fn new((party, local): (Party, Address), held: ResourceHold) -> Self {
        Self { party, entry: 0, local, holders: 0, closed: false, last: Tail::default(), held }
    }
}

/// The eventfds that the two ends of a connection sleep on.
pub struct Bells {
    /// By side. `None` if that end is closed or the engine's, if it was not accepted yet and its
    /// eventfd is chosen later, or if an `EventfdThreads` has the eventfd.
    pub here: [Option<Bell>; 2],
    /// The place of the eventfds that are not shared in `EventfdThreads`, once both ends have been
    /// introduced.
    pub kept: Option<PairPlace>,
    /// The connector has not asked for the acceptor's eventfd yet.
    pub later: bool,
}

impl Bells {
    /// Returns the number of eventfds here that belong to this connection alone.
    pub fn own(&self) -> usize {
        self.here.iter().flatten().filter(|bell| bell.group == 0).count()
    }
}

pub struct Connection {
    pub link: u32,
    pub stream: u32,
    /// The ends, by side.
    pub ends: [ConnectionEnd; 2],
    pub bells: Bells,
    /// The side that connected, whose port is in use until the connection ends.
    pub connector: Side,
    /// The connector's network namespace, in which the port is in use.
    pub namespace: NamespaceId,
}

impl Connection {
    pub fn end(&self, side: Side) -> &ConnectionEnd {
        &self.ends[side as usize]
    }

    /// Returns the eventfd that `side` sleeps on, or `None` if the end is closed or the eventfd is
    /// not here.
    pub fn bell(&self, side: Side) -> Option<&Bell> {
        self.bells.here[side as usize].as_ref()
    }

    /// Returns the eventfds that the process at `side` gets: `own`, and that of the other side.
    /// Returns `true` beside them if the latter is to be asked for when it is needed.
    pub fn eventfds(&self, side: Side, own: &Bell) -> (Vec<Arc<OwnedFd>>, bool) {
        let mut eventfds = vec![own.eventfd.clone()];
        let (peer, other) = (self.end(side.other()), self.bell(side.other()));
        if peer.party == Party::Engine {
            return (eventfds, false);
        }
        let later = other.is_none() && !peer.closed;
        if !later {
            // A peer that has closed is never woken; send our own eventfd as a placeholder.
            eventfds.push(other.unwrap_or(own).eventfd.clone());
        }
        (eventfds, later)
    }

    /// Counts an end, and its eventfd if that is its own, against this account from now on, if the
    /// account has room.
    pub fn count_against(&mut self, side: Side, account: &Arc<Account>) {
        if let Ok(held) = account.hold(Resource::Sockets, 1) {
            self.end_mut(side).held = held;
        }
        if let Some(bell) = self.bells.here[side as usize].as_mut().filter(|bell| bell.group == 0)
            && let Ok(held) = account.hold(Resource::Descriptors, 1)
        {
            bell.held = Arc::new(held);
        }
    }

    pub fn end_mut(&mut self, side: Side) -> &mut ConnectionEnd {
        &mut self.ends[side as usize]
    }
}
