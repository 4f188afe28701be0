//! One connection: a stream of a link, and its two ends.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use slipway_ring::cross::{Side, Tail};
use slipway_sgiov_spec::Address;

use super::links::Party;
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
}

/// What the two ends of a connection sleep on.
pub enum Bells {
    /// By side; None: that end is closed.
    Here([Option<Arc<OwnedFd>>; 2]),
    /// A keeper has them, since both ends have been introduced.
    Kept(Kept),
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

    /// What `side` sleeps on, if it is here and not closed.
    pub fn bell(&self, side: Side) -> Option<&Arc<OwnedFd>> {
        let Bells::Here(bells) = &self.bells else { return None };
        bells[side as usize].as_ref()
    }

    pub fn end_mut(&mut self, side: Side) -> &mut End {
        &mut self.ends[side as usize]
    }
}
