//! Guests: their socket functions, and their streams to each other and to programs of this node.
//!
//! Three threads take part:
//!
//! - The engine's thread calls [`Guests`].
//! - A reactor serves the functions (`serve`): it handles accesses of a guest's VMM to registers.
//! - The carrier (`carrying`, whose head has a table of its files), a task on a reactor of its own
//!   with the thread `slipway-guests` ([`Carrier`]), has the channels of all guests, and all
//!   streams with a guest at one end at least. It copies bytes once, from one end's FIFO into the
//!   other's (`pair`). In each step every stream moves a limited number of bytes. A stream with
//!   nothing to do is armed and costs nothing, and if no stream has anything to do the carrier
//!   sleeps.
//!
//! The engine's thread and the carrier exchange messages (`messages`) and share a table (`book`).
//! In an engine with links, whose carrier takes the programs' signals, the carrier of guests gets
//! its own streams' signals from there (`claims`, `signal_receiver`).
//!
//! Nothing that a guest writes is trusted: `slipway_sgiov_function` checks memory, messages and
//! counters, and here the function of a guest that names something it does not own, or uses a
//! number twice, is broken. A stream with invalid counters ends alone. The end of a guest, for
//! whatever reason, resets its streams, and their other ends see ECONNRESET.

mod book;
mod carrying;
mod channels;
mod charger;
mod claims;
mod guest;
mod lifecycle;
mod messages;
mod pair;
mod pairs;
mod programs;
mod requests;
mod serve;
mod signal_receiver;

use std::collections::{HashMap, HashSet};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use slipway_family::{Carrier, Family};
use slipway_reactor::Reactor;
use slipway_sgiov_spec::Address;

use crate::Function;
use crate::policy::Policy;
use crate::remote::{Event, Line, StreamCarrier};

use book::Book;
pub use book::GuestReport;
use carrying::Carrying;
use claims::Claims;
use messages::{Command, News};
use serve::Served;
use signal_receiver::SignalReceiver;

/// The bit of [`Event::Incoming`]'s numbers that marks requests of guests.
pub const GUESTS: u64 = 1 << 63;

/// The number of signals of a guest that are taken at a time.
const SIGNALS: usize = 1024;

/// The guests of an engine, for the engine's thread.
pub struct Guests {
    carrier: Carrier<Command, News>,
    book: Arc<Book>,
    policy: Policy,
    /// The functions, by guest.
    served: HashMap<u32, Served>,
    /// Connections of programs of this node with guests.
    connections: HashSet<u32>,
    /// The number of the next guest.
    next: u32,
    /// The reactor that serves the functions, once there is one.
    reactor: Option<Reactor>,
}

impl Guests {
    /// Starts the carrier.
    ///
    /// # Errors
    /// No descriptors or threads are left.
    pub fn start(policy: Policy) -> std::io::Result<Self> {
        let book = Arc::<Book>::default();
        let work = |news| Carrying::new(news, book.clone(), policy.clone());
        let ended = |why: &str| tracing::error!("streams with guests have ended: {why}");
        let carrier = Carrier::start("slipway-guests", ended, work)?;
        let (served, connections, reactor) = Default::default();
        Ok(Self { carrier, book, policy, served, connections, next: 0, reactor })
    }

    /// Uses another policy for connections from now on.
    pub fn renew_policy(&mut self, policy: Policy) {
        self.policy = policy.clone();
        self.carrier.command(Command::Policy(policy));
    }

    /// Adds a family whose signals the links' carrier takes. Returns the family for that carrier.
    pub fn claimed_family(&mut self, number: u32, family: Family) -> Family {
        let claims = Arc::<Claims>::default();
        self.carrier.command(Command::ClaimedFamily(number, claims.clone()));
        let commands = self.carrier.sender();
        family.with_beside(Box::new(SignalReceiver { family: number, claims, commands }))
    }

    /// Serves a function to the VMM that connects to `listener`, for as long as the crate's
    /// protocol says. `asker` is the client that requested it, and `file` the guest's memory, if
    /// the VMM has no descriptor of it to map.
    ///
    /// # Errors
    /// `listener` is no listening Unix socket; `file` is not the function's memory; no descriptors
    /// or threads are left.
    pub fn add(
        &mut self,
        asker: u32,
        listener: OwnedFd,
        file: Option<OwnedFd>,
        function: Function,
    ) -> std::io::Result<()> {
        let reactor = match self.reactor.take() {
            Some(reactor) => reactor,
            None => Reactor::spawn(slipway_reactor::Settings::default())?,
        };
        let reactor = self.reactor.insert(reactor);
        let (waker, memory) = (self.carrier.waker(), (function.memory, file));
        let (served, peer) = serve::serve(asker, listener, memory, waker, &reactor.handle())?;
        let guest = self.next;
        self.next = self.next.wrapping_add(1);
        self.book.add(guest, function);
        self.carrier.command(Command::Add { guest, peer, control: served.control() });
        self.served.insert(guest, served);
        Ok(())
    }

    /// Removes the functions of a client that has gone, except those that a VMM has connected to.
    pub fn asker_left(&mut self, asker: u32) {
        let unused = |served: &Served| served.asker == asker && !served.was_used();
        let all = self.served.iter().filter(|(_, served)| unused(served));
        let all: Vec<u32> = all.map(|(guest, _)| *guest).collect();
        all.into_iter().for_each(|guest| self.remove(guest));
    }

    fn remove(&mut self, guest: u32) {
        // The command ends the channel, with which the function releases its memory.
        if let Some(served) = self.served.remove(&guest) {
            served.close();
            self.book.remove(guest);
            self.carrier.command(Command::Remove(guest));
        }
    }

    /// Returns whether no function is served.
    pub fn is_empty(&self) -> bool {
        self.served.is_empty()
    }

    /// Returns whether the connection is one with a guest.
    pub fn has(&self, connection: u32) -> bool {
        self.connections.contains(&connection)
    }

    /// Returns the report of all guests.
    pub fn report(&self) -> Vec<GuestReport> {
        self.book.report()
    }

    /// Handles news. Returns the event that the engine is to handle, if the news is one.
    fn handle(&mut self, news: News) -> Option<Event> {
        match news {
            News::Gone(guest) => {
                self.remove(guest);
                None
            }
            News::Event(event) => {
                if let Event::Refused { connection, .. } | Event::Ended { connection, .. } = &event
                {
                    self.connections.remove(connection);
                }
                Some(event)
            }
        }
    }
}

impl StreamCarrier for Guests {
    fn is_for(&self, tenant: &str, to: &Address) -> bool {
        // After a defect, connections are left to the kernel: nobody would answer them.
        !self.carrier.has_ended() && self.book.route(&self.policy, tenant, to).is_some()
    }

    fn family(&mut self, number: u32, family: Family) {
        self.carrier.join(number, family);
    }

    fn family_ended(&mut self, family: u32) {
        // The first is for a family whose signals the carrier takes, the second for one whose
        // signals links take.
        self.carrier.part(family);
        self.carrier.command(Command::FamilyEnded(family));
    }

    fn connect(&mut self, connection: u32, tenant: &str, from: Address, to: Address, line: Line) {
        self.connections.insert(connection);
        // `None` if the guest has stopped listening since the request.
        let guest = self.book.route(&self.policy, tenant, &to);
        self.carrier.command(Command::Connect { connection, guest, from, to, line });
    }

    fn answer(&mut self, incoming: u64, answer: Result<(u32, Line), u32>) {
        if let Ok((connection, _)) = &answer {
            self.connections.insert(*connection);
        }
        let incoming = (incoming & !GUESTS) as u32;
        self.carrier.command(Command::Answer { incoming, answer });
    }

    fn closed(&mut self, connection: u32) {
        self.carrier.command(Command::Closed(connection));
    }

    fn wakes(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.carrier.descriptor()]
    }

    fn events(&mut self) -> Vec<Event> {
        let news: Vec<_> = self.carrier.news().collect();
        news.into_iter().filter_map(|news| self.handle(news)).collect()
    }
}

impl Drop for Guests {
    fn drop(&mut self) {
        self.carrier.end();
        self.served.values().for_each(Served::close);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn a_carrier_that_has_ended_is_for_no_connection() {
        let mut guests = Guests::start(Policy::default()).unwrap();
        let (name, tenant) = ("one".into(), "web".into());
        let addresses = vec![Ipv4Addr::new(10, 9, 0, 1).into()];
        guests.book.add(0, Function { name, tenant, addresses, memory: None });
        let at = Address::v4([10, 9, 0, 1], 80);
        assert!(guests.book.listen(0, at));
        assert!(guests.is_for("web", &at));
        guests.carrier.end();
        assert!(!guests.is_for("web", &at));
    }
}
