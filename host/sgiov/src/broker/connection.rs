//! One connection: a stream of a link, and its two ends.

use std::sync::Arc;

use slipway_ring::cross::{Side, Tail};
use slipway_sgiov_spec::Address;

use super::links::Party;
use super::sharing::Bell;
use crate::accounts::{Account, Held, Resource};
use crate::keeper::Kept;
use crate::peer::NamespaceId;

/// One end.
pub struct End {
    pub party: Party,
    /// The family's entry.
    pub entry: u32,
    /// Its address.
    pub local: Address,
    /// Processes that have it open.
    pub holders: u32,
    /// Nobody has it any more, and its half of the stream is finished.
    pub closed: bool,
    /// The last word of its producer, when it was closed: where its bytes lie, as it says.
    pub last: Tail,
    /// It counts against who accepted or connected; until somebody accepts, both ends do against
    /// who connected.
    pub held: Held,
}

/// The eventfds that the two ends of a connection sleep on.
pub struct Bells {
    /// By side. `None` if that end is closed or the engine's, if it was not accepted yet and its
    /// eventfd is chosen later, or if a keeper has the eventfd.
    pub here: [Option<Bell>; 2],
    /// The keeper of the eventfds that are not shared, once both ends have been introduced.
    pub kept: Option<Kept>,
    /// The connector has not asked for the acceptor's eventfd yet.
    pub later: bool,
}

impl Bells {
    /// Eventfds here that no other connection has.
    pub fn own(&self) -> usize {
        self.here.iter().flatten().filter(|bell| bell.group == 0).count()
    }
}

pub struct Connection {
    pub link: u32,
    pub stream: u32,
    /// By side.
    pub ends: [End; 2],
    pub bells: Bells,
    /// The side that connected, whose port is taken until the end.
    pub connector: Side,
    /// The connector's network namespace, whose port it has.
    pub namespace: NamespaceId,
}

impl Connection {
    pub fn end(&self, side: Side) -> &End {
        &self.ends[side as usize]
    }

    /// Returns the eventfd that `side` sleeps on, or `None` if the end is closed or the eventfd is
    /// not here.
    pub fn bell(&self, side: Side) -> Option<&Bell> {
        self.bells.here[side as usize].as_ref()
    }

    /// An end, and what it alone sleeps on, count against this account from now on, if that has
    /// room.
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

    pub fn end_mut(&mut self, side: Side) -> &mut End {
        &mut self.ends[side as usize]
    }
}
