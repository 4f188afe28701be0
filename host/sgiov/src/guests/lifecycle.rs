//! The life of a connection with a guest. Each change of the state of its
//! [`Pair`](super::pair::Pair) is made by one method here:
//!
//! | from | to | method | because |
//! |---|---|---|---|
//! | | asked | `guest_connects`, `program_connects` | a program connects |
//! | asked, with or without its end | removed | `refuse_pair` | the party refuses or is lost |
//! | asked | asked, without its end | `refuse_overdue` | the guest does not answer in time |
//! | asked | asked, without its end | `close_end` | the connecting program closes |
//! | asked | asked, without its end | `lose_end` | the connecting guest is lost |
//! | asked | open | `open_pair` | the party accepts |
//! | asked, without its end | open, one end, reset | `open_pair` | the party accepts too late |
//! | open | open, an end closed | `close_end` | the end's program closes it |
//! | open, an end closed | open, one end | `finish_end` | the closed end's bytes have moved |
//! | open | open, one end, reset | `lose_end` | the guest of the other end is lost |
//! | open, one end | removed | `finish_end`, `lose_end` | the last end is over or lost |
//!
//! A pair that is asked and has no end stays until the answer, which refers to the pair by its
//! number. A reset (`reset_end`) changes no state: the end's program sees ECONNRESET, and closes
//! the end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use slipway_ring::cross::Tail;
use slipway_sgiov_function::Broken;
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::function::{self, Message};

use super::GUESTS;
use super::carrying::Carrying;
use super::guest::Guest;
use super::pair::{Answerer, EndOwner, Pair, PairEnd};
use super::requests::Oldest;
use crate::error::errno_number;
use crate::remote::{Event, Line};

/// The beginning: a program connects.
impl Carrying {
    /// Handles that a program of a guest connects: asks the guest that listens at `to` or, if no
    /// guest does, the engine.
    ///
    /// # Errors
    /// [`Broken::Message`]: the connection or the stream is in use, or there is no such stream.
    pub(super) fn guest_connects(
        &mut self,
        number: u32,
        (connection, line): (u32, function::Line),
        from: Address,
        to: Address,
    ) -> Result<(), Broken> {
        let end = self.guest_end(number, (connection, line))?;
        if !self.book.has(number, &from.ip) {
            let errno = errno_number(Errno::ADDRNOTAVAIL);
            self.send_message(number, Message::Refused { connection, errno });
            return Ok(());
        }
        let tenant = self.book.tenant(number);
        let other = self.book.route(&self.policy, &tenant, &to).filter(|other| *other != number);
        let (answerer, since) =
            (other.map_or(Answerer::Engine(number), Answerer::Guest), Instant::now());
        let pair = self.pairs.insert(Pair::new(end, answerer, since));
        self.enter_guest(pair, 0);
        match other {
            Some(other) => self.ask_guest(other, (pair, since), from, to),
            None => self.ask_engine(number, pair, tenant, (from, to)),
        }
        Ok(())
    }

    /// Handles that a program of this node connects to a guest.
    pub(super) fn program_connects(
        &mut self,
        (connection, line): (u32, Line),
        guest: Option<u32>,
        from: Address,
        to: Address,
    ) {
        let greeted = |guest: &u32| self.guests.get(guest).is_some_and(Guest::is_greeted);
        let Some(guest) = guest.filter(greeted) else {
            let errno = errno_number(Errno::CONNREFUSED);
            return self.report(Event::Refused { connection, errno });
        };
        let since = Instant::now();
        let end = PairEnd::new(EndOwner::Program { connection, line: line.clone() });
        let pair = self.pairs.insert(Pair::new(end, Answerer::Guest(guest), since));
        self.programs.enter(connection, &line, pair);
        self.ask_guest(guest, (pair, since), from, to);
    }

    /// Asks a guest to accept the connection of a pair that waits since `since`. A guest with too
    /// many unanswered requests is not asked, and the connection is refused.
    fn ask_guest(&mut self, guest: u32, (pair, since): (u32, Instant), from: Address, to: Address) {
        let Some(asked) = self.guests.get_mut(&guest) else { return };
        if !asked.asked.begin() {
            return self.refuse_pair(pair, errno_number(Errno::CONNREFUSED));
        }
        self.requests.add(since, pair);
        self.send_message(guest, Message::Incoming { incoming: pair, from, to });
    }

    /// Asks the engine to accept a guest's connection. A guest with too many requests there has
    /// to use its kernel; requests that the guest no longer waits for count as well.
    fn ask_engine(
        &mut self,
        guest: u32,
        pair: u32,
        tenant: String,
        (from, to): (Address, Address),
    ) {
        if self.guests.get_mut(&guest).is_none_or(|guest| !guest.asking.begin()) {
            return self.refuse_pair(pair, errno_number(Errno::PROTONOSUPPORT));
        }
        let incoming = GUESTS | u64::from(pair);
        self.report(Event::FromGuest { incoming, tenant, from, to });
    }

    /// Returns an end for a connection and a stream that a guest names and that are not in use.
    ///
    /// # Errors
    /// [`Broken::Message`]: one of them is in use, or there is no such stream.
    fn guest_end(
        &self,
        number: u32,
        (connection, line): (u32, function::Line),
    ) -> Result<PairEnd, Broken> {
        let guest = self.guests.get(&number);
        let unused = guest.is_some_and(|guest| guest.is_unused(connection, line));
        let end = || PairEnd::new(EndOwner::Guest { guest: number, connection, line });
        unused.then(end).ok_or(Broken::Message)
    }

    /// Records that a guest's end belongs to a pair.
    fn enter_guest(&mut self, pair: u32, end: usize) {
        let owner = self.pairs.end(pair, end).map(|end| &end.owner);
        if let Some(EndOwner::Guest { guest, connection, line }) = owner
            && let Some(guest) = self.guests.get_mut(guest)
        {
            guest.enter(*connection, *line, pair, end);
        }
    }
}

/// The answer: the other party accepts, refuses, or is silent.
impl Carrying {
    /// Checks that this guest's answer is awaited.
    ///
    /// # Errors
    /// [`Broken::Message`]: it is not.
    fn check_awaited(&self, guest: u32, incoming: u32) -> Result<(), Broken> {
        let awaits = self.pairs.get(incoming).and_then(Pair::awaits);
        (awaits == Some(Answerer::Guest(guest))).then_some(()).ok_or(Broken::Message)
    }

    /// Handles that a guest accepts a connection with a stream of its own.
    ///
    /// # Errors
    /// [`Broken::Message`]: the answer is not awaited, or names what is in use.
    pub(super) fn guest_accepts(
        &mut self,
        number: u32,
        incoming: u32,
        line: (u32, function::Line),
    ) -> Result<(), Broken> {
        self.check_awaited(number, incoming)?;
        let end = self.guest_end(number, line)?;
        self.guest_answered(number);
        self.open_pair(incoming, end);
        Ok(())
    }

    /// Handles that a guest refuses a connection.
    ///
    /// # Errors
    /// [`Broken::Message`]: the answer is not awaited.
    pub(super) fn guest_rejects(
        &mut self,
        number: u32,
        incoming: u32,
        errno: u32,
    ) -> Result<(), Broken> {
        self.check_awaited(number, incoming)?;
        self.guest_answered(number);
        self.refuse_pair(incoming, errno);
        Ok(())
    }

    fn guest_answered(&mut self, number: u32) {
        if let Some(guest) = self.guests.get_mut(&number) {
            guest.asked.end();
        }
    }

    /// Handles the engine's answer to a guest's connection.
    pub(super) fn engine_answers(&mut self, incoming: u32, answer: Result<(u32, Line), u32>) {
        let awaits = self.pairs.get(incoming).and_then(Pair::awaits);
        if let Some(Answerer::Engine(guest)) = awaits
            && let Some(guest) = self.guests.get_mut(&guest)
        {
            guest.asking.end();
        }
        let (connection, line) = match answer {
            Ok(there) => there,
            Err(errno) => return self.refuse_pair(incoming, errno),
        };
        if self.pairs.get(incoming).is_none() {
            // Does not happen, as a pair waits for its answer.
            return self.report(Event::Ended { connection, last: Tail::default() });
        }
        self.programs.enter(connection, &line, incoming);
        self.open_pair(incoming, PairEnd::new(EndOwner::Program { connection, line }));
    }

    /// Opens a pair: adds its accepting end, and tells the connecting end. If that did not wait for
    /// the answer, the accepting end is reset.
    pub(super) fn open_pair(&mut self, number: u32, acceptor: PairEnd) {
        let connector = self.pairs.end(number, 0);
        let tenants = [connector, Some(&acceptor)].map(|end| self.tenant_of(end));
        let Some(pair) = self.pairs.get_mut(number) else { return };
        pair.open(acceptor, tenants);
        // Before any message: sending one may end the guest, and its streams with it.
        self.enter_guest(number, 1);
        match self.pairs.end(number, 0).map(|end| &end.owner) {
            None => self.reset_end(number, 1),
            Some(EndOwner::Program { connection, .. }) => {
                let connection = *connection;
                self.report(Event::Connected { connection });
            }
            Some(EndOwner::Guest { guest, connection, .. }) => {
                let (guest, connection) = (*guest, *connection);
                self.send_message(guest, Message::Connected { connection });
            }
        }
        self.pairs.stir(number);
    }

    /// Returns the tenant of an end, or an empty text if there is no end.
    fn tenant_of(&self, end: Option<&PairEnd>) -> Arc<str> {
        match end.map(|end| &end.owner) {
            Some(EndOwner::Program { line, .. }) => line.tenant.clone(),
            Some(EndOwner::Guest { guest, .. }) => self.book.tenant(*guest).into(),
            None => "".into(),
        }
    }

    /// Refuses the connection of a pair, and removes the pair, which will have no second end.
    pub(super) fn refuse_pair(&mut self, number: u32, errno: u32) {
        let Some(mut pair) = self.pairs.remove(number) else { return };
        if let Some(connector) = pair.ends[0].take() {
            self.refuse_connector(connector, errno);
        }
    }

    /// Refuses connections whose guest has not answered in time. Their pairs stay until the answer.
    /// Returns the time until the next look. Returns `None` if no guest is to answer.
    pub(super) fn refuse_overdue(&mut self) -> Option<Duration> {
        loop {
            let (guest, pair) = match self.requests.oldest(&self.pairs)? {
                Oldest::Waits(left) => return Some(left),
                Oldest::Overdue { guest, pair } => (guest, pair),
            };
            let connector = self.pairs.get_mut(pair).and_then(|pair| pair.ends[0].take());
            let Some(connector) = connector else { continue };
            let name = self.book.name(guest);
            let text = format_args!("guest {name} does not answer: a connection to it is refused");
            self.log.line("unanswered", text);
            self.refuse_connector(connector, errno_number(Errno::TIMEDOUT));
        }
    }

    /// Tells a connecting end, which was taken out of its pair, that the connection is refused.
    fn refuse_connector(&mut self, connector: PairEnd, errno: u32) {
        match connector.owner {
            EndOwner::Program { connection, line } => {
                self.programs.forget(connection, &line);
                self.report(Event::Refused { connection, errno });
            }
            EndOwner::Guest { guest, connection, line } => {
                self.forget_guest(guest, connection, line);
                self.send_message(guest, Message::Refused { connection, errno });
                self.free_arena(guest, line.arena);
            }
        }
    }

    fn forget_guest(&mut self, guest: u32, connection: u32, line: function::Line) {
        if let Some(guest) = self.guests.get_mut(&guest) {
            guest.forget(connection, line);
        }
    }
}

/// The end: an end is closed, reset, lost or over.
impl Carrying {
    /// Handles that a program of this node has closed its connection.
    pub(super) fn program_closes(&mut self, connection: u32) {
        let Some(number) = self.programs.pair(connection) else { return };
        let is_it = |end: &Option<PairEnd>| {
            let owner = end.as_ref().map(|end| &end.owner);
            matches!(owner, Some(EndOwner::Program { connection: of, .. }) if *of == connection)
        };
        let end = self.pairs.get(number).and_then(|pair| pair.ends.iter().position(is_it));
        if let Some(end) = end {
            self.close_end(number, end);
        }
    }

    /// Closes an end, as its program asks for. In an open pair the end stays until its bytes have
    /// moved ([`Carrying::finish_end`]). Returns `None` if the end was closed already.
    pub(super) fn close_end(&mut self, number: u32, end: usize) -> Option<()> {
        if !self.pairs.end_mut(number, end)?.close() {
            return None;
        }
        if self.pairs.get(number)?.is_open() {
            self.pairs.stir(number);
        } else {
            // The end does not wait for the answer, which is still to come.
            self.finish_end(number, end);
        }
        Some(())
    }

    /// Finishes an end and takes it out of its pair: its stream is not accessed here any more.
    pub(super) fn finish_end(&mut self, number: u32, end: usize) {
        let Some(pair) = self.pairs.get_mut(number) else { return };
        let is_open = pair.is_open();
        let Some(mut end) = pair.ends[end].take() else { return };
        end.finish(&self.guests);
        let last = end.last();
        match end.owner {
            EndOwner::Program { connection, line } => {
                self.programs.forget(connection, &line);
                self.report(Event::Ended { connection, last });
            }
            EndOwner::Guest { guest, connection, line } => {
                self.forget_guest(guest, connection, line);
                let errno = errno_number(Errno::CONNABORTED);
                let message = if is_open {
                    Message::Ended { connection }
                } else {
                    Message::Refused { connection, errno }
                };
                self.send_message(guest, message);
                self.free_arena(guest, line.arena);
            }
        }
        self.remove_if_over(number);
    }

    /// Takes the end of a lost guest out of its pair, and resets the other end.
    pub(super) fn lose_end(&mut self, number: u32, end: usize) {
        let Some(pair) = self.pairs.get_mut(number) else { return };
        pair.ends[end] = None;
        self.reset_end(number, 1 - end);
        self.pairs.stir(number);
        self.remove_if_over(number);
    }

    /// Resets an end, and wakes its program, which sees ECONNRESET.
    fn reset_end(&mut self, number: u32, end: usize) {
        let there = self.pairs.end_mut(number, end);
        if there.is_some_and(|there| there.reset(&self.guests)) {
            self.wake_owner(number, end);
        }
    }

    /// Resets both ends of a pair.
    pub(super) fn reset_pair(&mut self, number: u32) {
        self.reset_end(number, 0);
        self.reset_end(number, 1);
        self.pairs.stir(number);
    }

    /// Resets streams whose program could not be woken. Returns whether there were any.
    pub(super) fn reset_unwoken(&mut self) -> bool {
        let unwoken = self.programs.take_unwoken();
        for number in &unwoken {
            self.reset_pair(*number);
        }
        // These programs were not woken for the reset either. They see it at their next look.
        drop(self.programs.take_unwoken());
        !unwoken.is_empty()
    }

    /// Removes a pair that is open and has no end.
    fn remove_if_over(&mut self, number: u32) {
        if self.pairs.get(number).is_some_and(Pair::is_over) {
            self.pairs.remove(number);
        }
    }
}
