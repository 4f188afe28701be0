//! The end of endpoints: closed by the last process that had them, or left by a process that died.
//!
//! The other side sees the same as with TCP: the end of the stream after close(2) with nothing left
//! to read, and a reset with unread data. A process that was killed looks the same, unless it was
//! in the middle of a send (it held the lock of the sending half): its peer could take a part of a
//! message for the whole, so it sees a reset.

use slipway_ring::cross::index::{MAX_ORDER, PAGE};
use slipway_ring::cross::{Arena, Region, Regions, Side, Stream, Tail};
use slipway_sgiov_spec::table::entry;

use super::connection::ConnectionEnd;
use super::links::Party;
use super::{Broker, Outcome};
use crate::remote::StreamCarrier;
use crate::table::Table;

impl Broker {
    /// Returns the end of a connection with this entry of its family.
    pub(super) fn end_of(&mut self, family: u32, entry: u32) -> Option<&mut ConnectionEnd> {
        let (connection, side) = self.families.get(family)?.entry(entry)?;
        Some(self.connections.get_mut(connection)?.end_mut(side))
    }

    pub(super) fn close(&mut self, client: u32, family: u32, entry: u64) -> Outcome {
        let entry = u32::try_from(entry).unwrap_or(u32::MAX);
        let held = self.clients.get_mut(client).is_some_and(|client| client.entries.remove(&entry));
        if held {
            self.drop_holder(family, entry, false);
        }
        Outcome::Nothing
    }

    /// Removes one process from the holders of an endpoint. The last one ends the endpoint.
    pub(super) fn drop_holder(&mut self, family: u32, entry: u32, killed: bool) {
        let Some(end) = self.end_of(family, entry) else { return };
        end.holders = end.holders.saturating_sub(1);
        if end.holders == 0
            && let Some((connection, side)) =
                self.families.get(family).and_then(|family| family.entry(entry))
        {
            self.finish(
                connection,
                side,
                if killed { EndReason::Killed } else { EndReason::Closed },
            );
        }
    }

    /// Refuses a connection that will not be accepted any more.
    pub(super) fn refuse(&mut self, connection: u32) {
        if let Some(there) = self.connections.get(connection) {
            let side = there.connector.other();
            self.finish(connection, side, EndReason::Refused);
        }
    }

    /// Ends one end of a connection, once. The order counts: the stream's halves are finished
    /// before the other end is woken, so that it finds the end of the stream when it looks; and the
    /// memory is released last, when both ends are closed and nobody reads it any more.
    pub(super) fn finish(&mut self, number: u32, side: Side, how: EndReason) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        if connection.end(side).closed {
            return;
        }
        let Some(link) = self.links.get(connection.link) else { return };
        let stream = connection.stream;
        connection.bells.here[side as usize] = None;
        let end = connection.end_mut(side);
        end.closed = true;
        if let Party::Family(number) = end.party
            && let Some(family) = self.families.get_mut(number)
        {
            end.last = finish_stream(&family.table, end.entry, &link.arena, stream, side, how);
            family.give_entry(end.entry);
            if let Some(space) = self.namespaces.get_mut(family.namespace) {
                space.endpoints -= 1;
            }
        }
        let other = connection.end(side.other());
        if other.party == Party::Engine
            && !other.closed
            && let Some(remote) = &mut self.remote
        {
            remote.closed(number);
        }
        let (party, both_closed) = (other.party, other.closed);
        let arena = link.arena.clone();
        if let Some(bell) = connection.bell(side.other()).cloned() {
            self.tell(&bell.eventfd, party);
            arena.note_raised(side.other());
        } else if let Some(kept) = connection.bells.kept
            && !both_closed
        {
            self.keepers.raise(kept, side.other());
        }
        if both_closed {
            self.release(number);
        }
    }

    /// Ends the carrier's side of a connection.
    pub(super) fn finish_engine(&mut self, number: u32, last: Tail) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        let Some(end) = connection.ends.iter_mut().find(|end| end.party == Party::Engine) else {
            return;
        };
        (end.closed, end.last) = (true, last);
        if connection.ends.iter().all(|end| end.closed) {
            self.release(number);
        }
    }

    /// Releases the memory, the stream and the port of a connection whose ends are both closed.
    fn release(&mut self, number: u32) {
        let Some(connection) = self.connections.remove(number) else { return };
        self.release_connector(&connection);
        if let Some(kept) = connection.bells.kept {
            self.keepers.drop(kept);
        }
        self.forget_swept(number);
        let Some(link) = self.links.get_mut(connection.link) else { return };
        for (end, side) in connection.ends.iter().zip([Side::Zero, Side::One]) {
            let Some(region) = within(end.last, &link.arena) else { continue };
            if region.order == 0 {
                // The stream's own page stays for the next connection, until the link ends.
                continue;
            }
            let there = link.ends[side as usize];
            match (there.party, &link.bits) {
                (Party::Engine, Some(bits)) => {
                    let (bits, shape) = (bits.clone(), link.arena.shape());
                    link.arena.punch(side, region, move || Regions::new(&bits, shape).give(region));
                }
                (Party::Family(number), _) => {
                    let Some(family) = self.families.get(number) else { continue };
                    let bits = (family.table.clone(), there.number);
                    link.cleaning.give(&link.arena, side, region, bits);
                }
                _ => link.arena.punch(side, region, || {}),
            }
        }
        link.give_stream(connection.stream);
        if link.live == 0 && link.ends.iter().any(|end| end.party == Party::Gone) {
            self.end_link(connection.link);
        }
    }

    fn release_connector(&mut self, connection: &super::connection::Connection) {
        let (connector, acceptor) =
            (connection.end(connection.connector), connection.end(connection.connector.other()));
        self.namespaces.release(connection.namespace, connector.local, acceptor.local);
    }
}

/// The reason for which an endpoint ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    Closed,
    Killed,
    /// No process ever had it.
    Refused,
}

/// Finishes both halves of a stream for a side that has ended. Returns the last tail of its
/// producer.
fn finish_stream(
    table: &Table,
    number: u32,
    arena: &Arena,
    stream: u32,
    side: Side,
    how: EndReason,
) -> Tail {
    let (out, into) = table.halves(number);
    let there = Stream::new(arena, stream, side, out, into);
    let unread = there.into.refresh() != Ok(0);
    let holder = table.word(number, entry::TX_LOCK);
    // The holder is a process, not the sweeper.
    let died_sending = how == EndReason::Killed && holder != 0 && !is_engine(holder);
    if unread || died_sending || how == EndReason::Refused {
        there.out.reset();
        there.into.reset();
    } else {
        there.out.finish();
        there.into.shut();
    }
    there.out.tail()
}

/// Returns whether the holder of a lock is the engine.
pub fn is_engine(holder: u64) -> bool {
    holder as u32 == 0
}

/// Returns the region that a producer's tail names, or `None` if the region is invalid.
pub fn within(tail: Tail, arena: &Arena) -> Option<Region> {
    let region = tail.region()?;
    let pages = region.len().div_ceil(PAGE);
    let fits =
        region.order <= MAX_ORDER && region.page as usize + pages <= arena.shape().pages as usize;
    fits.then_some(region)
}
