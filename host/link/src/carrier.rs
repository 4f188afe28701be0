//! The carrier of streams to other engines, on the commands of the engine's thread. It has a
//! reactor of its own, so that the ciphers of links have a processor to themselves.
//!
//! The signal plane (who is there, who listens, what policy says) and the data plane share no
//! memory but FIFOs. [`Command`]s go one way, [`News`] the other. Signals of programs come straight
//! to the carrier, each family's from its table (`slipway_sgiov_spec::table`).
//!
//! `slipway_family` has the frame of a carrier: commands, news, families and sleep. Here is the
//! work of this one.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slipway_family::{Families, NAP, NewsSender, Rest, Work};
use slipway_ring::cross::is_told_surely;
use slipway_sgiov_spec::Address;

use crate::connection::Report;
use crate::event::{Event, StreamId};
use crate::links::Links;
use crate::patience::Patience;
use crate::renewal::Renewal;
use crate::shares::View as SharesView;
use crate::stream::End;

/// A command to the carrier.
pub enum Command {
    /// Calls [`Links::open`]; [`News::Opening`] with the same ticket follows.
    Open {
        /// The number that the answer repeats.
        ticket: u64,
        /// The tenant.
        tenant: String,
        /// The program's address.
        source: Address,
        /// The address that the program connects to.
        destination: Address,
    },
    /// Calls [`Links::attach`]. The stream is reset if the carrier does not take the signals of the
    /// family.
    Attach {
        /// The stream.
        stream: StreamId,
        /// The engine's end.
        end: End,
        /// The family, and the entry whose number it signals for this stream.
        entry: (u32, u32),
    },
    /// Calls [`Links::refuse`].
    Refuse(StreamId, u32),
    /// Calls [`Links::leave`].
    Leave(StreamId),
    /// Calls [`Links::reset`].
    Reset(StreamId),
    /// Calls [`Links::set_weight`].
    Weight(String, f64),
    /// Calls [`Links::set_rate`].
    Rate(String, u64),
    /// Calls [`Links::renew`].
    Renew(Box<Renewal>),
    /// Calls [`Links::reports`]; [`News::Reports`] follows.
    Report,
    /// Calls [`Links::shares`]; [`News::Shares`] follows.
    Shares,
}

/// A message of the carrier to its owner.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// The answer to [`Command::Open`].
    Opening {
        /// The ticket of the command.
        ticket: u64,
        /// The stream, or an error number of errno(3).
        stream: Result<StreamId, u32>,
    },
    /// An event of the links.
    Event(Event),
    /// The counters of all connections.
    Reports(Vec<Report>),
    /// The shares of all tenants.
    Shares(SharesView),
}

/// The owner's handle of the carrier, which ends, with its thread, when the handle is dropped. A
/// family joins it before its entries have streams, and parts from it when its streams were left
/// ([`Command::Leave`]).
pub type Carrier = slipway_family::Carrier<Command, News>;

/// Starts the carrier of `links` on a thread of its own.
///
/// # Errors
/// No descriptors, or no thread, are available.
pub fn start_carrier(links: Links) -> std::io::Result<Carrier> {
    let (places, patience) = (HashMap::new(), Patience::new(Instant::now()));
    let ended = |why: &str| tracing::error!("links to other engines have ended: {why}");
    Carrier::start("slipway-link", ended, |news| Carrying { links, news, places, patience })
}

/// The streams of a family's entries.
type Entries = HashMap<u32, StreamId>;

/// The work of the carrier.
struct Carrying {
    links: Links,
    news: NewsSender<News>,
    /// The family and entry of each stream.
    places: HashMap<StreamId, (u32, u32)>,
    patience: Patience,
}

impl Work for Carrying {
    type Command = Command;
    type Member = Entries;

    fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        Some(self.links.shared_descriptor())
    }

    fn obey(&mut self, command: Command, families: &mut Families<Entries>, now: Instant) {
        match command {
            Command::Open { ticket, tenant, source, destination } => {
                let stream = self.links.open(&tenant, source, destination, now);
                self.news.send(News::Opening { ticket, stream });
            }
            Command::Attach { stream, end, entry } => {
                let entries = families.member(entry.0);
                let is_deaf = entries.is_none();
                if let Some(entries) = entries {
                    entries.insert(entry.1, stream);
                    self.places.insert(stream, entry);
                }
                self.links.attach(stream, end);
                if is_deaf {
                    // Without signals the stream would stand still, and nobody would know why.
                    self.links.reset(stream, now);
                }
            }
            Command::Refuse(stream, errno) => self.links.refuse(stream, errno, now),
            Command::Leave(stream) => self.links.leave(stream, now),
            Command::Reset(stream) => self.links.reset(stream, now),
            Command::Weight(tenant, weight) => self.links.set_weight(&tenant, weight),
            Command::Rate(tenant, rate) => self.links.set_rate(&tenant, rate),
            Command::Renew(renewal) => self.links.renew(*renewal, now),
            Command::Report => self.news.send(News::Reports(self.links.reports())),
            Command::Shares => self.news.send(News::Shares(self.links.shares(now))),
        }
    }

    #[inline]
    fn signalled(&mut self, _: u32, entries: &Entries, entry: Option<u32>) {
        match entry {
            Some(entry) => {
                entries.get(&entry).into_iter().for_each(|stream| self.links.stir(*stream));
            }
            None => entries.values().for_each(|stream| self.links.stir(*stream)),
        }
    }

    fn spoiled(&mut self, family: u32, entries: Entries, now: Instant) {
        // Logged once for each family, which can only start afresh by attaching again.
        tracing::warn!(family, "its signals cannot be: its streams are broken off");
        entries.into_values().for_each(|stream| self.links.reset(stream, now));
    }

    fn stands_still(&mut self, tenant: &str, slept: Duration) {
        self.links.leaves_signals(tenant, slept, Instant::now());
    }

    fn turn(&mut self, families: &mut Families<Entries>, now: Instant) -> bool {
        let worked = self.links.turn(now);
        self.tell(families);
        worked
    }

    fn worked(&mut self) {
        self.patience.worked(Instant::now());
    }

    fn looks_on(&mut self, now: Instant) -> bool {
        let polls = self.patience.should_poll(now);
        if polls {
            std::thread::yield_now();
            self.patience.yielded(now, Instant::now());
        }
        polls
    }

    fn rest(&mut self, now: Instant) -> Rest {
        let briefly = self.patience.expects_brief_sleep();
        // Both have a full barrier.
        let quiet = if briefly { self.links.doze(now) } else { self.links.rest(now) };
        if !quiet {
            return Rest::Awake;
        }
        let naps = (briefly || !is_told_surely()) && !self.places.is_empty();
        let longest = longest_sleep(self.links.until_deadline(now), naps);
        Rest::Asleep(longest.map(|longest| now + longest))
    }

    fn woken(&mut self, since: Option<Instant>) {
        if let Some(since) = since {
            self.links.woken();
            self.patience.slept(since, Instant::now());
        }
    }
}

impl Carrying {
    /// Passes events of the links on to the owner, and announces the news.
    fn tell(&mut self, families: &mut Families<Entries>) {
        while let Some(event) = self.links.event() {
            if let Event::Ended { stream, .. } = &event
                && let Some((family, entry)) = self.places.remove(stream)
                && let Some(entries) = families.member(family)
                && entries.get(&entry) == Some(stream)
            {
                entries.remove(&entry);
            }
            self.news.send(News::Event(event));
        }
        self.news.announce();
    }
}

/// Returns the longest sleep with something due after `due`, or `None` if there is no limit. With
/// `naps` the sleep is a nap.
fn longest_sleep(due: Option<Duration>, naps: bool) -> Option<Duration> {
    // A little longer than until something is due: one wake-up then serves what is due at almost
    // the same time. Not so for a nap.
    let due = due.map(|due| due + Duration::from_micros(100));
    match naps {
        true => Some(due.map_or(NAP, |due| due.min(NAP))),
        false => due,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nap_is_no_longer_than_a_millisecond() {
        let micros = |count| Some(Duration::from_micros(count));
        assert_eq!((longest_sleep(None, false), longest_sleep(None, true)), (None, micros(1000)));
        for (due, sleep, nap) in
            [(0, 100, 100), (200, 300, 300), (950, 1050, 1000), (9500, 9600, 1000)]
        {
            let due = micros(due);
            assert_eq!(longest_sleep(due, false), micros(sleep));
            assert_eq!(longest_sleep(due, true), micros(nap));
        }
    }
}
