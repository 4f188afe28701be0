//! All carriers of the engine together: links to other nodes, or what stands in their place, and
//! guests.

use std::os::fd::BorrowedFd;

use slipway_family::Family;
use slipway_ring::cross::Arena;
use slipway_sgiov_spec::Address;

#[cfg(feature = "guests")]
use crate::guests::{GUESTS, Guests};
use crate::remote::{Event, Line, StreamCarrier};

/// The engine's carriers, served as one [`StreamCarrier`].
pub struct Carriers {
    /// Links to other nodes, or another carrier in their place.
    links: Option<Box<dyn StreamCarrier>>,
    /// Guests, if the engine serves their functions.
    #[cfg(feature = "guests")]
    pub guests: Option<Guests>,
}

impl Carriers {
    /// Joins the carriers.
    pub fn new(
        links: Option<Box<dyn StreamCarrier>>,
        #[cfg(feature = "guests")] guests: Option<Guests>,
    ) -> Self {
        Self {
            links,
            #[cfg(feature = "guests")]
            guests,
        }
    }

    /// Returns the carrier of a connection or request: guests if `is_guests` says so, else links.
    fn of(&mut self, is_guests: impl Fn(&Self) -> bool) -> Option<&mut dyn StreamCarrier> {
        #[cfg(feature = "guests")]
        if is_guests(self) {
            return self.guests.as_mut().map(|guests| guests as &mut dyn StreamCarrier);
        }
        #[cfg(not(feature = "guests"))]
        let _ = is_guests;
        self.links.as_deref_mut().map(|links| links as &mut dyn StreamCarrier)
    }
}

impl StreamCarrier for Carriers {
    fn is_for(&self, tenant: &str, to: &Address) -> bool {
        #[cfg(feature = "guests")]
        if self.guests.as_ref().is_some_and(|guests| guests.is_for(tenant, to)) {
            return true;
        }
        self.links.as_ref().is_some_and(|links| links.is_for(tenant, to))
    }

    fn family(&mut self, number: u32, family: Family) {
        // Only one carrier can take a family's signals. With both, links take the signals and pass
        // them on to guests.
        #[cfg(feature = "guests")]
        let family = match (&self.links, &mut self.guests) {
            (_, None) => family,
            (Some(_), Some(guests)) => guests.claimed_family(number, family),
            (None, Some(guests)) => return guests.family(number, family),
        };
        if let Some(links) = &mut self.links {
            links.family(number, family);
        }
    }

    fn arena(&mut self) -> Option<std::io::Result<Arena>> {
        self.links.as_mut().and_then(|links| links.arena())
    }

    fn arena_gone(&mut self, arena: &Arena) {
        if let Some(links) = &mut self.links {
            links.arena_gone(arena);
        }
    }

    fn listens(&mut self, namespace: u32, at: Address) {
        if let Some(links) = &mut self.links {
            links.listens(namespace, at);
        }
    }

    fn listens_no_more(&mut self, namespace: u32, at: Address) {
        if let Some(links) = &mut self.links {
            links.listens_no_more(namespace, at);
        }
    }

    fn family_ended(&mut self, family: u32) {
        if let Some(links) = &mut self.links {
            links.family_ended(family);
        }
        #[cfg(feature = "guests")]
        if let Some(guests) = &mut self.guests {
            guests.family_ended(family);
        }
    }

    fn connect(&mut self, connection: u32, tenant: &str, from: Address, to: Address, line: Line) {
        // The guest may have stopped listening since `is_for` returned `true`. Without links guests
        // have to answer all the same, or nobody would.
        #[cfg(feature = "guests")]
        let is_guests = |all: &Self| {
            let is_for = |guests: &Guests| guests.is_for(tenant, &to);
            all.links.is_none() || all.guests.as_ref().is_some_and(is_for)
        };
        #[cfg(not(feature = "guests"))]
        let is_guests = |_: &Self| false;
        if let Some(carrier) = self.of(is_guests) {
            carrier.connect(connection, tenant, from, to, line);
        }
    }

    #[cfg(feature = "links")]
    fn renew(&mut self, renewal: slipway_link::Renewal) {
        if let Some(links) = &mut self.links {
            links.renew(renewal);
        }
    }

    fn answer(&mut self, incoming: u64, answer: Result<(u32, Line), u32>) {
        #[cfg(feature = "guests")]
        let is_guests = |_: &Self| incoming & GUESTS != 0;
        #[cfg(not(feature = "guests"))]
        let is_guests = |_: &Self| false;
        if let Some(carrier) = self.of(is_guests) {
            carrier.answer(incoming, answer);
        }
    }

    fn closed(&mut self, connection: u32) {
        #[cfg(feature = "guests")]
        let is_guests =
            |all: &Self| all.guests.as_ref().is_some_and(|guests| guests.has(connection));
        #[cfg(not(feature = "guests"))]
        let is_guests = |_: &Self| false;
        if let Some(carrier) = self.of(is_guests) {
            carrier.closed(connection);
        }
    }

    fn wakes(&self) -> Vec<BorrowedFd<'_>> {
        let wakes = self.links.iter().flat_map(|links| links.wakes());
        #[cfg(feature = "guests")]
        let wakes = wakes.chain(self.guests.iter().flat_map(|guests| guests.wakes()));
        wakes.collect()
    }

    fn events(&mut self) -> Vec<Event> {
        let events = self.links.as_mut().map(|links| links.events()).unwrap_or_default();
        #[cfg(feature = "guests")]
        let events = {
            let guests = self.guests.as_mut().map(Guests::events).unwrap_or_default();
            [events, guests].into_iter().flatten().collect()
        };
        events
    }

    #[cfg(feature = "links")]
    fn shares(&mut self) -> Option<slipway_link::SharesView> {
        self.links.as_mut().and_then(|links| links.shares())
    }
}

#[cfg(all(test, feature = "guests"))]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use rustix::event::{EventfdFlags, eventfd};
    use slipway_ring::cross::{Regions, Side};

    use super::*;
    use crate::policy::Policy;

    /// The guest listened when `is_for` was asked, and has stopped when the connection is made.
    #[test]
    fn a_connection_to_a_guest_that_has_stopped_listening_is_answered() {
        let guests = Guests::start(Policy::default()).unwrap();
        let mut carriers = Carriers::new(None, Some(guests));
        let line = Line {
            arena: Arena::new(Regions::shape(1)).unwrap(),
            stream: 0,
            side: Side::One,
            eventfd: Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap()),
            tenant: "web".into(),
            family: 0,
            entry: 0,
            regions: Arc::new([]),
        };
        carriers.connect(7, "web", Address::ANY, Address::v4([10, 9, 0, 1], 80), line);
        let begun = Instant::now();
        loop {
            if let [event] = &carriers.events()[..] {
                assert!(matches!(event, Event::Refused { connection: 7, errno: 111 }), "{event:?}");
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "nobody answers");
            std::thread::yield_now();
        }
    }
}
