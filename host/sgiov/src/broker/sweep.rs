//! The sweeper, which gives memory of idle sockets back to the system.
//!
//! The sweeper looks at endpoints a slice at a time, so that a request never waits long for it. An
//! endpoint that has a region of its arena, whose bytes were all read and which has not moved since
//! the sweeper saw it last, gives the region up ([`Stream::trim`]) under the lock of its sending
//! half, which the sweeper only ever tries to take. A round that found no region doubles the time
//! to the next one, up to ten seconds; a new connection makes it a second again. Without
//! connections, and without links to forget, there are no rounds.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use slipway_ring::cross::{Regions, Side, Stream};
use slipway_sgiov_spec::table::{ENGINE, entry};

use super::Broker;
use super::connection::{Connection, ConnectionEnd};
use super::finish::within;
use super::links::Party;
use crate::table::Table;

/// The time from one round to the next while there is something to sweep.
const SOON: Duration = Duration::from_secs(1);
/// The longest time between two rounds, after many rounds that found nothing.
const LATE: Duration = Duration::from_secs(10);
/// The number of connections that are looked at before requests have their turn.
const SLICE: u32 = 4096;
/// The time for which a link stays without streams, so that the next connection finds it.
const LINGER: Duration = Duration::from_secs(5);

/// The sweeper's progress.
pub struct Sweep {
    /// The connection to continue with, or `None` between two rounds.
    at: Option<u32>,
    next: Option<Instant>,
    pause: Duration,
    /// Regions met in this round.
    met: u32,
    /// The tails of endpoints with a region when they were last seen, by connection and side.
    seen: HashMap<(u32, u8), u64>,
    /// A number that distinguishes the engine's holds of locks.
    holds: u32,
}

impl Default for Sweep {
    fn default() -> Self {
        Self { at: None, next: None, pause: SOON, met: 0, seen: HashMap::new(), holds: 0 }
    }
}

impl Sweep {
    /// Returns the value of a new hold of a lock.
    fn next_hold(&mut self) -> u64 {
        self.holds = self.holds.wrapping_add(1);
        ENGINE + (u64::from(self.holds) << 33)
    }
}

#[cfg(any(test, feature = "fuzz"))]
impl Sweep {
    /// Makes a round due.
    pub fn due(&mut self) {
        self.next = Some(Instant::now());
    }
}

/// The lock of a sending half that the sweeper holds: the family's table, the number of the entry,
/// and the value of the hold.
type HeldHalf = (Table, u32, u64);

/// Releases the lock of an entry's sending half, if this hold still has it.
fn let_go((table, number, hold): &HeldHalf) {
    let lock = &table.entry(*number)[entry::TX_LOCK];
    let _ = lock.compare_exchange(*hold, 0, Ordering::Release, Ordering::Relaxed);
}

impl Broker {
    /// Returns the time at which [`Broker::sweep`] has something to do, or `None` while there are
    /// no connections.
    pub fn next_sweep(&mut self) -> Option<Instant> {
        if self.sweep.at.is_some() {
            return Some(Instant::now());
        }
        let wanted = self.connections.len() > 0 || self.links.iter().next().is_some();
        if !wanted {
            (self.sweep.next, self.sweep.pause) = (None, SOON);
            return None;
        }
        Some(*self.sweep.next.get_or_insert_with(|| Instant::now() + SOON))
    }

    /// Has the next round begin soon, for a new connection.
    pub(super) fn sweep_soon(&mut self) {
        let soon = Instant::now() + SOON;
        self.sweep.pause = SOON;
        if self.sweep.at.is_none() && self.sweep.next.is_none_or(|next| next > soon) {
            self.sweep.next = Some(soon);
        }
    }

    /// Sweeps a slice of a round, if one is due.
    pub fn sweep(&mut self) {
        let due = self.next_sweep().is_some_and(|next| next <= Instant::now());
        if !due {
            return;
        }
        let first = self.sweep.at.unwrap_or(0);
        for number in first..first.saturating_add(SLICE).min(self.connections.end()) {
            self.look_at(number, Side::Zero);
            self.look_at(number, Side::One);
        }
        if first.saturating_add(SLICE) < self.connections.end() {
            self.sweep.at = Some(first + SLICE);
            return;
        }
        for link in self.links.idle(LINGER) {
            self.end_link(link);
        }
        let idle = self.sweep.met == 0 && self.links.iter().all(|(_, link)| link.live > 0);
        self.sweep.pause = if idle { (self.sweep.pause * 2).min(LATE) } else { SOON };
        (self.sweep.at, self.sweep.met) = (None, 0);
        self.sweep.next = Some(Instant::now() + self.sweep.pause);
    }

    /// Looks at one end of a connection, and gives its region up if it has not moved since the last
    /// look.
    fn look_at(&mut self, number: u32, side: Side) {
        let Some(connection) = self.connections.get(number) else { return };
        let end = connection.end(side);
        let Party::Family(family) = end.party else { return };
        let Some(family) = self.families.get(family).filter(|_| !end.closed) else { return };
        let tail = family.table.word(end.entry, entry::TX_TAIL);
        let key = (number, side as u8);
        if slipway_ring::cross::Tail(tail).region().is_none() {
            self.sweep.seen.remove(&key);
            return;
        }
        self.sweep.met += 1;
        let is_still = self.sweep.seen.insert(key, tail) == Some(tail);
        if !is_still || self.links.get(connection.link).is_none() {
            return;
        }
        let hold = self.sweep.next_hold();
        let lock = &family.table.entry(end.entry)[entry::TX_LOCK];
        // Acquire and release: this hold sees the writes of the last one, and the next one sees
        // the writes of this one.
        if lock.compare_exchange(0, hold, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return;
        }
        let held = (family.table.clone(), end.entry, hold);
        if self.give_up(connection, side, held) {
            self.sweep.seen.remove(&key);
        }
    }

    /// Gives up the region of an end whose sending half is `held`, and has the half released. The
    /// end is a family's. Returns `false` if the end keeps its region.
    fn give_up(&self, connection: &Connection, side: Side, held: HeldHalf) -> bool {
        let Some(link) = self.links.get(connection.link) else {
            let_go(&held);
            return false;
        };
        let (table, number, _) = &held;
        let (out, into) = table.halves(*number);
        let stream = Stream::new(&link.arena, connection.stream, side, out, into);
        // A family may name a region outside of its area.
        let own = Regions::own(connection.stream);
        let region = within(stream.out.tail(), &link.arena)
            .filter(|region| *region != own || self.is_among_friends(connection))
            .and_then(|_| stream.untie());
        match region {
            Some(region) if region == own => {
                // The next write goes to the same page, so it waits until the page is released.
                let (cleaning, number) = (link.cleaning.clone(), connection.stream);
                cleaning.begin(number, side);
                link.arena.punch(side, region, move || {
                    cleaning.done(number, side);
                    let_go(&held);
                });
            }
            Some(region) => {
                let bits = (table.clone(), link.ends[side as usize].number);
                link.cleaning.give(&link.arena, side, region, bits);
                let_go(&held);
            }
            None => let_go(&held),
        }
        region.is_some()
    }

    /// Returns whether both sides of a connection are of one tenant, user and container. A process
    /// that writes to the connection may wait for the engine, and the engine for the process that
    /// has the file. A side that is closed is nobody's friend: its family may have ended, and its
    /// number be another family's.
    fn is_among_friends(&self, connection: &Connection) -> bool {
        let peer = |side: Side| match connection.end(side) {
            ConnectionEnd { party: Party::Family(family), closed: false, .. } => {
                self.families.get(*family).map(|family| &family.peer)
            }
            _ => None,
        };
        peer(Side::Zero).zip(peer(Side::One)).is_some_and(|(one, other)| one.is_as(other))
    }

    /// Forgets a connection that has ended, since its number may soon be another connection's.
    pub(super) fn forget_swept(&mut self, number: u32) {
        for side in [0, 1] {
            self.sweep.seen.remove(&(number, side));
        }
    }
}

#[cfg(test)]
mod tests {
    use slipway_sgiov_spec::Address;
    use slipway_sgiov_spec::control::{Reply, Request};

    use crate::broker::Outcome;
    use crate::broker::connect::tests::{attach, listening};

    /// The process at the other side has left the engine and still has the file. A friend of the
    /// side that stays has attached since.
    #[test]
    fn the_number_of_a_family_that_has_ended_makes_no_friends() {
        let (mut broker, _, to) = listening();
        let client = attach(&mut broker);
        let connect = Request::Connect { to, from: Address::ANY };
        let outcome = broker.request(client, connect, Vec::new());
        assert!(matches!(outcome, Outcome::Answer(Reply::Connected { .. }, _)));
        let (number, connection) = broker.connections.iter().next().unwrap();
        assert!(broker.is_among_friends(connection));
        let ended = broker.clients.get(client).unwrap().family;
        broker.leave(client);
        let next = attach(&mut broker);
        assert_eq!(broker.clients.get(next).unwrap().family, ended);
        let connection = broker.connections.get(number).unwrap();
        assert!(!broker.is_among_friends(connection));
    }
}
