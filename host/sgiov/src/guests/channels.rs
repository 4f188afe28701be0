//! Guests' channels: their signals and messages, and the end of a channel.

use std::ops::Bound;

use rustix::io::Errno;
use slipway_sgiov_function::Broken;
use slipway_sgiov_spec::function::{Message, VERSION};

use super::carrying::Carrying;
use super::guest::GuestSignals;
use super::messages::News;
use super::pair::Answerer;
use crate::error::errno_number;

/// The number of messages of a guest that are handled at a time.
const MESSAGES: usize = 64;

impl Carrying {
    /// Takes the signals and messages of every guest. Returns whether there was something to do.
    pub(super) fn attend(&mut self) -> bool {
        let (mut worked, mut next) = (false, self.guests.keys().next().copied());
        while let Some(guest) = next {
            worked |= self.attend_served(guest);
            let after = (Bound::Excluded(guest), Bound::Unbounded);
            next = self.guests.range(after).next().map(|(guest, _)| *guest);
        }
        worked
    }

    /// Attends to a guest; if it is left out, only to its function. Returns whether there was
    /// something to do.
    fn attend_served(&mut self, number: u32) -> bool {
        let Some(guest) = self.guests.get(&number) else { return false };
        let is_served = self.stalls.until(&guest.tenants).is_none();
        let tenants = self.stalls.is_alert().then(|| guest.tenants.clone());
        let worked = self.attend_one(number, is_served).unwrap_or_else(|why| {
            self.break_off(number, why);
            false
        });
        self.charge(tenants);
        worked
    }

    fn attend_one(&mut self, number: u32, is_served: bool) -> Result<bool, Broken> {
        let Some(guest) = self.guests.get_mut(&number) else { return Ok(false) };
        let signals = if is_served { guest.attend() } else { guest.attend_function() };
        let mut worked = match signals? {
            GuestSignals::Unavailable => return Ok(false),
            GuestSignals::ChannelEnded => {
                self.lose(number);
                self.report_gone();
                return Ok(true);
            }
            GuestSignals::Taken { pairs, worked } => {
                self.stir_all(pairs);
                worked
            }
        };
        for _ in 0..MESSAGES {
            // A message may end the guest's channel.
            let Some(guest) = self.guests.get_mut(&number) else { break };
            let Some(message) = guest.receive()? else { break };
            self.handle_message(number, message)?;
            worked = true;
        }
        Ok(worked)
    }

    /// Handles a guest's message.
    ///
    /// # Errors
    /// [`Broken`] if the message is invalid.
    fn handle_message(&mut self, number: u32, message: Message) -> Result<(), Broken> {
        let Some(guest) = self.guests.get_mut(&number) else { return Ok(()) };
        if guest.channel.is_none() {
            return Ok(());
        }
        if guest.is_greeted() == matches!(message, Message::Hello { .. }) {
            return Err(Broken::Message);
        }
        match message {
            Message::Hello { version: VERSION } => guest.greet(self.book.addresses(number)),
            Message::Arena { arena, at } => guest.add_arena(arena, at),
            Message::ArenaGone { arena } => {
                guest.leave_arena(arena)?;
                self.free_arena(number, arena);
                Ok(())
            }
            Message::Listen { at } => {
                let is_own = at.is_unspecified() || self.book.has(number, &at.ip);
                if is_own && !self.book.listen(number, at) {
                    return Err(Broken::Message);
                }
                Ok(())
            }
            Message::Unlisten { at } => {
                self.book.unlisten(number, Some(at));
                Ok(())
            }
            Message::Connect { connection, line, from, to } => {
                self.guest_connects(number, (connection, line), from, to)
            }
            Message::Accepted { incoming, connection, line } => {
                self.guest_accepts(number, incoming, (connection, line))
            }
            Message::Rejected { incoming, errno } => self.guest_rejects(number, incoming, errno),
            Message::Closed { connection } => {
                let end = guest.connections.get(&connection).copied();
                let (pair, end) = end.ok_or(Broken::Message)?;
                self.close_end(pair, end).ok_or(Broken::Message)
            }
            _ => Err(Broken::Message),
        }
    }

    /// Sends a message to a guest, unless the guest has gone meanwhile.
    pub(super) fn send_message(&mut self, guest: u32, message: Message) {
        let there = self.guests.get_mut(&guest);
        if let Some(Err(why)) = there.map(|there| there.send(&message)) {
            self.break_off(guest, why);
        }
    }

    /// Gives an arena back to a guest that wants it back, once no stream is left in it.
    pub(super) fn free_arena(&mut self, number: u32, arena: u32) {
        if self.guests.get_mut(&number).is_some_and(|guest| guest.take_free(arena)) {
            self.send_message(number, Message::ArenaFree { arena });
        }
    }

    /// Breaks the function of a guest that violated the protocol.
    pub(super) fn break_off(&mut self, number: u32, why: Broken) {
        let name = self.book.name(number);
        self.log.line(
            "guest",
            format_args!(
                "the socket function of guest {name} is broken ({why:?}): its streams end"
            ),
        );
        if let Some(channel) = self.guests.get(&number).and_then(|guest| guest.channel.as_ref()) {
            channel.break_off(why);
        }
        self.lose(number);
    }

    /// Ends a guest's channel: resets its streams, and refuses connections that it was asked to
    /// accept.
    pub(super) fn lose(&mut self, number: u32) {
        self.book.unlisten(number, None);
        let Some(guest) = self.guests.get_mut(&number) else { return };
        let (channel, ends) = guest.end_channel();
        for (pair, end) in ends.into_values() {
            self.lose_end(pair, end);
        }
        let lost = Some(Answerer::Guest(number));
        let asked = self.pairs.iter().filter(|(_, pair)| pair.awaits() == lost);
        let asked: Vec<u32> = asked.map(|(pair, _)| pair).collect();
        for pair in asked {
            self.refuse_pair(pair, errno_number(Errno::CONNREFUSED));
        }
        // The last reference to the guest's memory.
        drop(channel);
    }

    /// Reports guests whose VMM has gone.
    pub(super) fn report_gone(&mut self) {
        for (number, guest) in &self.guests {
            if guest.is_gone() {
                self.news.send(News::Gone(*number));
            }
        }
    }
}
