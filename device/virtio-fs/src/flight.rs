//! The requests that the file server works on.

use std::collections::BTreeMap;

use slipway_virtio::queue::Chain;

use crate::Ticket;

/// Most requests that the file server works on at a time.
pub const MOST_REQUESTS: usize = 64;
/// Most bytes of these requests, with the room for their replies, before another one is begun.
pub const MOST_BYTES: usize = 8 << 20;

/// The place of a reply in guest memory.
pub(crate) struct ReplySlot {
    pub(crate) queue: u16,
    /// The head of the chain.
    pub(crate) head: u16,
    pub(crate) chain: Chain,
}

struct Flying {
    bytes: usize,
    /// `None` after a reset: the chain is no longer the device's.
    place: Option<ReplySlot>,
}

/// The requests under way, by their numbers.
#[derive(Default)]
pub(crate) struct Flights {
    flying: BTreeMap<Ticket, Flying>,
    bytes: usize,
    next: u64,
}

impl Flights {
    /// Returns whether another request may begin.
    pub(crate) fn has_room(&self) -> bool {
        self.flying.len() < MOST_REQUESTS && self.bytes < MOST_BYTES
    }

    /// Returns whether a request is under way.
    pub(crate) fn is_empty(&self) -> bool {
        self.flying.is_empty()
    }

    /// Notes a request that takes `bytes` bytes with its reply, and returns its number.
    pub(crate) fn begin(&mut self, place: ReplySlot, bytes: usize) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        self.bytes += bytes;
        self.flying.insert(ticket, Flying { bytes, place: Some(place) });
        ticket
    }

    /// Ends a request, and returns the place of its reply. Returns `None` if the driver has reset
    /// the device since the request.
    pub(crate) fn end(&mut self, ticket: Ticket) -> Option<ReplySlot> {
        let Flying { bytes, place } = self.flying.remove(&ticket)?;
        self.bytes -= bytes;
        place
    }

    /// Forgets the places of all replies.
    pub(crate) fn forget_places(&mut self) {
        self.flying.values_mut().for_each(|one| one.place = None);
    }
}
