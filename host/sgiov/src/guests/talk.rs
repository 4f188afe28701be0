//! Messages of guests, and the beginning and end of connections.

use std::sync::atomic::Ordering;

use rustix::io::Errno;
use slipway_ring::cross::Tail;
use slipway_sgiov_function::Broken;
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::function::{self, Message, VERSION};

use super::carrying::{Carrying, number};
use super::pair::{Answerer, EndOwner, Pair, PairEnd};
use crate::remote::{Event, Line};

impl Carrying {
    /// Sends a message to a guest, unless the guest has gone meanwhile.
    pub(super) fn message(&mut self, guest: u32, message: Message) {
        let channel = self.guests.get_mut(&guest).and_then(|guest| guest.channel.as_mut());
        if let Some(Err(why)) = channel.map(|channel| channel.say(&message)) {
            self.break_off(guest, why);
        }
    }

    /// Handles a guest's message.
    ///
    /// # Errors
    /// [`Broken`] if the message is invalid.
    pub(super) fn talk(&mut self, number: u32, message: Message) -> Result<(), Broken> {
        let book = self.book.clone();
        let Some(guest) = self.guests.get_mut(&number) else { return Ok(()) };
        let Some(channel) = &mut guest.channel else { return Ok(()) };
        if guest.greeted == matches!(message, Message::Hello { .. }) {
            return Err(Broken::Message);
        }
        match message {
            Message::Hello { version: VERSION } => {
                guest.greeted = true;
                guest.counts.running.store(true, Ordering::Relaxed);
                channel.say(&Message::Welcome(book.addresses(number)))
            }
            Message::Arena { arena, at } => channel.add_arena(arena, at),
            Message::ArenaGone { arena } => {
                if channel.streams(arena).is_none() || !guest.leaving.insert(arena) {
                    return Err(Broken::Message);
                }
                self.free_arena(number, arena);
                Ok(())
            }
            Message::Listen { at } => {
                if (at.is_unspecified() || book.has(number, &at.ip)) && !book.listen(number, at) {
                    return Err(Broken::Message);
                }
                Ok(())
            }
            Message::Unlisten { at } => {
                book.unlisten(number, Some(at));
                Ok(())
            }
            Message::Connect { connection, line, from, to } => {
                self.guest_connects(number, (connection, line), from, to)
            }
            Message::Accepted { incoming, connection, line } => {
                self.guest_accepts(number, incoming, (connection, line))
            }
            Message::Rejected { incoming, errno } => {
                self.awaited_of(number, incoming)?;
                self.answers(number);
                self.refused(incoming, errno);
                Ok(())
            }
            Message::Closed { connection } => {
                let place = guest.connections.get(&connection).copied();
                let (pair, end) = place.ok_or(Broken::Message)?;
                self.left(pair, end).ok_or(Broken::Message)
            }
            _ => Err(Broken::Message),
        }
    }

    fn free_arena(&mut self, number: u32, arena: u32) {
        if self.guests.get_mut(&number).is_some_and(|guest| guest.take_free(arena)) {
            self.message(number, Message::ArenaFree { arena });
        }
    }

    /// Checks that this answer is awaited of the guest.
    fn awaited_of(&self, guest: u32, incoming: u32) -> Result<(), Broken> {
        let pair = self.pairs.get(incoming);
        let asked = pair.is_some_and(|pair| pair.awaits == Some(Answerer::Guest(guest)));
        asked.then_some(()).ok_or(Broken::Message)
    }

    /// Returns an end for a connection and a stream that a guest names and that are not in use.
    fn guest_end(
        &self,
        number: u32,
        (connection, line): (u32, function::Line),
    ) -> Result<PairEnd, Broken> {
        let guest = self.guests.get(&number).ok_or(Broken::Message)?;
        let streams = guest.channel.as_ref().and_then(|channel| channel.streams(line.arena));
        let fits = streams.is_some_and(|streams| line.stream < streams)
            && !guest.leaving.contains(&line.arena)
            && !guest.connections.contains_key(&connection)
            && !guest.streams.contains_key(&(line.arena, line.stream));
        let end = || PairEnd::new(EndOwner::Guest { guest: number, connection, line });
        fits.then(end).ok_or(Broken::Message)
    }

    /// Records that a guest's end belongs to a pair.
    fn enter(&mut self, pair: u32, end: usize) {
        let Some(EndOwner::Guest { guest, connection, line }) =
            self.pairs.get(pair).and_then(|pair| pair.ends[end].as_ref()).map(|end| &end.who)
        else {
            return;
        };
        if let Some(guest) = self.guests.get_mut(guest) {
            guest.connections.insert(*connection, (pair, end));
            guest.streams.insert((line.arena, line.stream), pair);
            guest.counts.streams.store(guest.streams.len() as u64, Ordering::Relaxed);
        }
    }

    fn guest_connects(
        &mut self,
        number: u32,
        line: (u32, function::Line),
        from: Address,
        to: Address,
    ) -> Result<(), Broken> {
        let end = self.guest_end(number, line)?;
        let own = self.book.has(number, &from.ip);
        let (tenant, _) = self.book.who(number).unwrap_or_default();
        let other = self.book.route(&self.policy, &tenant, &to).filter(|other| *other != number);
        let awaits = other.map_or(Answerer::Engine(number), Answerer::Guest);
        let pair = self.pairs.insert(Pair::new(end, awaits));
        self.enter(pair, 0);
        match other {
            _ if !own => self.refused(pair, super::carrying::number(Errno::ADDRNOTAVAIL)),
            Some(other) => self.ask(other, pair, from, to),
            None => self.ask_engine(number, pair, from, to),
        }
        Ok(())
    }

    fn guest_accepts(
        &mut self,
        number: u32,
        incoming: u32,
        line: (u32, function::Line),
    ) -> Result<(), Broken> {
        self.awaited_of(number, incoming)?;
        let end = self.guest_end(number, line)?;
        self.answers(number);
        self.accepted(incoming, end);
        Ok(())
    }

    /// Connects a program of this node to a guest.
    pub(super) fn connect(
        &mut self,
        (connection, line): (u32, Line),
        guest: Option<u32>,
        from: Address,
        to: Address,
    ) {
        let there = guest.filter(|guest| {
            self.guests.get(guest).is_some_and(|guest| guest.channel.is_some() && guest.greeted)
        });
        let Some(guest) = there else {
            let errno = number(Errno::CONNREFUSED);
            return self.say(Event::Refused { connection, errno });
        };
        let end = PairEnd::new(EndOwner::Host { connection, line: line.clone() });
        let pair = self.pairs.insert(Pair::new(end, Answerer::Guest(guest)));
        self.enter_host(connection, &line, pair);
        self.ask(guest, pair, from, to);
    }

    /// Handles the engine's answer to a guest's connection.
    pub(super) fn answered(&mut self, incoming: u32, answer: Result<(u32, Line), u32>) {
        self.engine_answers(incoming);
        let (connection, line) = match answer {
            Ok(there) => there,
            Err(errno) => return self.refused(incoming, errno),
        };
        if self.pairs.get(incoming).is_none() {
            // Does not happen, as a pair waits for its answer.
            return self.say(Event::Ended { connection, last: Tail::default() });
        }
        self.enter_host(connection, &line, incoming);
        self.accepted(incoming, PairEnd::new(EndOwner::Host { connection, line }));
    }

    /// Adds the second end of a pair.
    fn accepted(&mut self, number: u32, end: PairEnd) {
        let Some(pair) = self.pairs.get_mut(number) else { return };
        pair.ends[1] = Some(end);
        (pair.awaits, pair.opened) = (None, true);
        // Before any message: sending one may end the guest, and its streams with it.
        self.enter(number, 1);
        let Some(pair) = self.pairs.get(number) else { return };
        match pair.ends[0].as_ref().map(|end| &end.who) {
            // The connecting end did not wait for it.
            None => self.reset(number, 1),
            Some(EndOwner::Host { connection, .. }) => {
                let connection = *connection;
                self.say(Event::Connected { connection });
            }
            Some(EndOwner::Guest { guest, connection, .. }) => {
                let (guest, connection) = (*guest, *connection);
                self.message(guest, Message::Connected { connection });
            }
        }
        self.stir(number);
    }

    /// Ends a pair that will have no second end.
    pub(super) fn refused(&mut self, number: u32, errno: u32) {
        let Some(mut pair) = self.pairs.remove(number) else { return };
        if let Some(end) = pair.ends[0].take() {
            self.refuse(end, errno);
        }
    }

    /// Refuses the connection to the connecting end.
    pub(super) fn refuse(&mut self, end: PairEnd, errno: u32) {
        match end.who {
            EndOwner::Host { connection, line } => {
                self.forget_host(connection, &line);
                self.say(Event::Refused { connection, errno });
            }
            EndOwner::Guest { guest, connection, line } => {
                self.forget_guest(guest, connection, line);
                self.message(guest, Message::Refused { connection, errno });
                self.free_arena(guest, line.arena);
            }
        }
    }

    fn forget_guest(&mut self, guest: u32, connection: u32, line: function::Line) {
        if let Some(guest) = self.guests.get_mut(&guest) {
            guest.connections.remove(&connection);
            guest.streams.remove(&(line.arena, line.stream));
            guest.counts.streams.store(guest.streams.len() as u64, Ordering::Relaxed);
        }
    }

    /// Notes that a program of this node has closed its side.
    pub(super) fn closed(&mut self, connection: u32) {
        let Some(pair) = self.hosts.get(&connection).copied() else { return };
        let is_it = |end: &Option<PairEnd>| {
            end.as_ref().is_some_and(
                |end| matches!(end.who, EndOwner::Host { connection: of, .. } if of == connection),
            )
        };
        let end = self.pairs.get(pair).and_then(|pair| pair.ends.iter().position(is_it));
        if let Some(end) = end {
            self.left(pair, end);
        }
    }

    /// Ends one end of a pair. Returns `None` if it has ended already.
    fn left(&mut self, number: u32, end: usize) -> Option<()> {
        let pair = self.pairs.get_mut(number)?;
        let there = pair.ends[end].as_mut()?;
        if std::mem::replace(&mut there.left, true) {
            return None;
        }
        if pair.opened {
            self.stir(number);
        } else {
            // The end does not wait for the answer, which is still to come.
            self.end(number, end);
        }
        Some(())
    }

    /// Resets an end.
    pub(super) fn reset(&mut self, number: u32, end: usize) {
        let there = self.pairs.get_mut(number).and_then(|pair| pair.ends[end].as_mut());
        if there.is_some_and(|there| there.reset(&self.guests)) {
            self.tell_end(number, end);
        }
    }

    /// Resets an end whose other end is gone.
    pub(super) fn partner_lost(&mut self, number: u32, end: usize) {
        self.reset(number, end);
        self.stir(number);
        self.drop_empty(number);
    }

    /// Ends an end: its stream is not accessed here any more.
    pub(super) fn end(&mut self, number: u32, end: usize) {
        let Some(pair) = self.pairs.get_mut(number) else { return };
        let opened = pair.opened;
        let Some(mut there) = pair.ends[end].take() else { return };
        there.end(&self.guests);
        match there.who {
            EndOwner::Host { connection, ref line } => {
                self.forget_host(connection, line);
                self.say(Event::Ended { connection, last: there.last() });
            }
            EndOwner::Guest { guest, connection, line } => {
                self.forget_guest(guest, connection, line);
                let errno = number_of_abort();
                let word = if opened {
                    Message::Ended { connection }
                } else {
                    Message::Refused { connection, errno }
                };
                self.message(guest, word);
                self.free_arena(guest, line.arena);
            }
        }
        self.drop_empty(number);
    }

    /// Removes a pair that has no ends and waits for no answer.
    fn drop_empty(&mut self, number: u32) {
        let pair = self.pairs.get(number);
        if pair.is_some_and(|p| p.ends.iter().all(Option::is_none) && p.awaits.is_none()) {
            self.pairs.remove(number);
        }
    }
}

fn number_of_abort() -> u32 {
    number(Errno::CONNABORTED)
}
