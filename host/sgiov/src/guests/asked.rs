//! Requests to guests to accept a connection. A guest that does not answer in time is no longer
//! waited for.

use std::time::{Duration, Instant};

use rustix::io::Errno;
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::function::Message;

use super::GUESTS;
use super::carrying::{Carrying, number};
use super::pair::Answerer;
use crate::remote::Event;

/// The time that a guest may take. It is shorter than a program waits for its engine, so that a
/// guest that does not answer, for example since it is stopped, does not look like the engine's
/// end.
const PATIENCE: Duration = Duration::from_secs(5);
/// The number of requests that a guest may leave unanswered before it gets no more, and that it may
/// have in flight to the engine.
const UNANSWERED: usize = 1024;

impl Carrying {
    /// Asks a guest to accept a connection.
    pub(super) fn ask(&mut self, guest: u32, pair: u32, from: Address, to: Address) {
        let Some(asked) = self.guests.get_mut(&guest) else { return };
        if asked.unanswered >= UNANSWERED {
            return self.refused(pair, number(Errno::CONNREFUSED));
        }
        asked.unanswered += 1;
        let now = Instant::now();
        if let Some(pair) = self.pairs.get_mut(pair) {
            pair.asked = Some(now);
        }
        self.asked.push_back((now, pair));
        self.message(guest, Message::Incoming { incoming: pair, from, to });
    }

    /// Asks the engine to accept a connection of a guest. A guest with too many requests there has
    /// to use its kernel; requests that the guest no longer waits for count as well.
    pub(super) fn ask_engine(&mut self, guest: u32, pair: u32, from: Address, to: Address) {
        let Some(asking) = self.guests.get_mut(&guest).filter(|guest| guest.asks < UNANSWERED)
        else {
            return self.refused(pair, number(Errno::PROTONOSUPPORT));
        };
        asking.asks += 1;
        let (tenant, _) = self.book.who(guest).unwrap_or_default();
        let incoming = GUESTS | u64::from(pair);
        self.say(Event::FromGuest { incoming, tenant, from, to });
    }

    /// Notes that the engine has answered.
    pub(super) fn engine_answers(&mut self, pair: u32) {
        let Some(Answerer::Engine(guest)) = self.pairs.get(pair).and_then(|pair| pair.awaits)
        else {
            return;
        };
        if let Some(guest) = self.guests.get_mut(&guest) {
            guest.asks = guest.asks.saturating_sub(1);
        }
    }

    /// Notes that a guest has answered.
    pub(super) fn answers(&mut self, guest: u32) {
        if let Some(guest) = self.guests.get_mut(&guest) {
            guest.unanswered = guest.unanswered.saturating_sub(1);
        }
    }

    /// Refuses connections that have waited for too long. Returns the time until the next look.
    pub(super) fn give_up(&mut self) -> Option<Duration> {
        while let Some((at, pair)) = self.asked.front().copied() {
            // The number may have been reused for another pair.
            let awaits = self.pairs.get(pair).filter(|there| there.asked == Some(at));
            let guest = match awaits.and_then(|pair| pair.awaits) {
                Some(Answerer::Guest(guest)) => Some(guest),
                _ => None,
            };
            let left = PATIENCE.saturating_sub(at.elapsed());
            if guest.is_some() && !left.is_zero() {
                return Some(left);
            }
            self.asked.pop_front();
            if let Some(guest) = guest {
                self.without_answer(guest, pair);
            }
        }
        None
    }

    /// Refuses a connection that was not answered in time. The answer may still come.
    fn without_answer(&mut self, guest: u32, pair: u32) {
        let Some(end) = self.pairs.get_mut(pair).and_then(|pair| pair.ends[0].take()) else {
            return;
        };
        let (_, name) = self.book.who(guest).unwrap_or_default();
        let text = format_args!("guest {name} does not answer: a connection to it is given up");
        self.log.line("unanswered", text);
        self.refuse(end, number(Errno::TIMEDOUT));
    }
}
