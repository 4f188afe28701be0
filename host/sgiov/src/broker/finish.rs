//! The end of endpoints: closed by the last process that had them, or left by a process that died.
//!
//! The other side sees the same as with TCP: the end of the stream after close(2) with nothing left
//! to read, and a reset with unread data. A process that was killed looks the same, unless it was
//! in the middle of a send (it held the lock of the sending half): its peer could take a part of a
//! message for the whole, so it sees a reset.
//!
//! The order of the steps counts. The halves of a stream are finished before the other end is
//! woken, so that it finds the end of the stream when it looks. The memory is released last, when
//! both ends are closed and nobody reads it any more.

use slipway_ring::cross::index::{MAX_ORDER, PAGE};
use slipway_ring::cross::{Arena, Region, Regions, Side, Stream, Tail};
use slipway_sgiov_spec::table::entry;

use super::connection::{Connection, ConnectionEnd};
use super::family::Family;
use super::links::{ArenaLink, Party};
use super::{Broker, Outcome};
use crate::remote::StreamCarrier;
use crate::slab::Slab;

/// The reason for which an endpoint ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// The endpoint's last process closed it.
    Closed,
    /// The endpoint's last process ended without closing it.
    Killed,
    /// The connection is refused, and no process ever had the endpoint.
    Refused,
}

impl Broker {
    /// Returns the connection and the side that an entry of a family's table stands for. Returns
    /// `None` if the entry is unused.
    fn place_of(&self, family: u32, entry: u32) -> Option<(u32, Side)> {
        self.families.get(family)?.entry(entry)
    }

    /// Returns the end of a connection with this entry of its family. Returns `None` if the entry
    /// is unused.
    pub(super) fn end_of(&mut self, family: u32, entry: u32) -> Option<&mut ConnectionEnd> {
        let (connection, side) = self.place_of(family, entry)?;
        Some(self.connections.get_mut(connection)?.end_mut(side))
    }

    /// Closes an endpoint for one process. An entry that the process does not have is ignored.
    pub(super) fn close(&mut self, client: u32, family: u32, entry: u64) -> Outcome {
        let entry = u32::try_from(entry).unwrap_or(u32::MAX);
        let held = self.clients.get_mut(client).is_some_and(|client| client.entries.remove(&entry));
        if held {
            self.drop_holder(family, entry, EndReason::Closed);
        }
        Outcome::Nothing
    }

    /// Removes one process from the holders of an endpoint. The last one ends the endpoint, for
    /// `reason`.
    pub(super) fn drop_holder(&mut self, family: u32, entry: u32, reason: EndReason) {
        let Some((number, side)) = self.place_of(family, entry) else { return };
        let Some(connection) = self.connections.get_mut(number) else { return };
        let end = connection.end_mut(side);
        end.holders = end.holders.saturating_sub(1);
        if end.holders == 0 {
            self.finish(number, side, reason);
        }
    }

    /// Refuses a connection that will not be accepted any more.
    pub(super) fn refuse(&mut self, connection: u32) {
        if let Some(there) = self.connections.get(connection) {
            let side = there.connector.other();
            self.finish(connection, side, EndReason::Refused);
        }
    }

    /// Ends one end of a connection, and releases the connection if the other end is closed, too.
    /// An end that is closed already stays as it is.
    pub(super) fn finish(&mut self, number: u32, side: Side, reason: EndReason) {
        if self.close_end(number, side, reason) {
            self.tell_closed(number, side.other());
            self.release_if_closed(number);
        }
    }

    /// Marks the carrier's end of a connection as closed. `last` is the last tail that the carrier
    /// has produced.
    pub(super) fn finish_engine(&mut self, number: u32, last: Tail) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        let Some(end) = connection.ends.iter_mut().find(|end| end.party == Party::Engine) else {
            return;
        };
        (end.closed, end.last) = (true, last);
        self.release_if_closed(number);
    }

    /// Marks an end as closed, finishes its halves of the stream and frees its entry. Returns
    /// whether the end was open.
    fn close_end(&mut self, number: u32, side: Side, reason: EndReason) -> bool {
        let Some(connection) = self.connections.get_mut(number) else { return false };
        let Some(link) = self.links.get(connection.link) else { return false };
        if connection.end(side).closed {
            return false;
        }
        let stream = connection.stream;
        connection.bells.here[side as usize] = None;
        let end = connection.end_mut(side);
        end.closed = true;
        if let Party::Family(number) = end.party
            && let Some(family) = self.families.get_mut(number)
        {
            let (out, into) = family.table.halves(end.entry);
            let halves = Stream::new(&link.arena, stream, side, out, into);
            end.last = finish_stream(&halves, family.table.word(end.entry, entry::TX_LOCK), reason);
            family.give_entry(end.entry);
            if let Some(space) = self.namespaces.get_mut(family.namespace) {
                space.endpoints -= 1;
            }
        }
        true
    }

    /// Tells the end at `side` that the other end is closed: a carrier by a call, a process by its
    /// eventfd.
    fn tell_closed(&mut self, number: u32, side: Side) {
        let Some(connection) = self.connections.get(number) else { return };
        let Some(link) = self.links.get(connection.link) else { return };
        let end = connection.end(side);
        let (party, is_open) = (end.party, !end.closed);
        if party == Party::Engine
            && is_open
            && let Some(remote) = &mut self.remote
        {
            remote.closed(number);
        }
        if let Some(bell) = connection.bell(side).cloned() {
            let arena = link.arena.clone();
            self.tell(&bell.eventfd, party);
            arena.note_raised(side);
        } else if let Some(kept) = connection.bells.kept
            && is_open
        {
            self.eventfd_threads.raise(kept, side);
        }
    }

    /// Releases a connection if both of its ends are closed.
    fn release_if_closed(&mut self, number: u32) {
        let is_closed = |connection: &Connection| connection.ends.iter().all(|end| end.closed);
        if self.connections.get(number).is_some_and(is_closed) {
            self.release(number);
        }
    }

    /// Releases the memory, the stream and the port of a connection whose ends are both closed.
    fn release(&mut self, number: u32) {
        let Some(connection) = self.connections.remove(number) else { return };
        self.release_port(&connection);
        if let Some(kept) = connection.bells.kept {
            self.eventfd_threads.drop(kept);
        }
        self.forget_swept(number);
        let Some(link) = self.links.get_mut(connection.link) else { return };
        for (end, side) in connection.ends.iter().zip([Side::Zero, Side::One]) {
            // The stream's own page stays for the next connection, until the link ends.
            let region = within(end.last, &link.arena).filter(|region| region.order != 0);
            if let Some(region) = region {
                release_region(link, &self.families, side, region);
            }
        }
        link.give_stream(connection.stream);
        if link.live == 0 && link.ends.iter().any(|end| end.party == Party::Gone) {
            self.end_link(connection.link);
        }
    }

    /// Releases the port that the connector took.
    fn release_port(&mut self, connection: &Connection) {
        let (connector, acceptor) =
            (connection.end(connection.connector), connection.end(connection.connector.other()));
        self.namespaces.release(connection.namespace, connector.local, acceptor.local);
    }
}

/// Finishes both halves of a stream for the side that has ended. They are reset if the side left
/// data unread, if its process died while it sent, or if the connection is refused, and are
/// finished in order otherwise. `lock` is the word of the lock of the sending half. Returns the
/// last tail of the side's producer.
fn finish_stream(halves: &Stream<'_>, lock: u64, reason: EndReason) -> Tail {
    let has_unread = halves.into.refresh() != Ok(0);
    let died_sending = reason == EndReason::Killed && is_held_by_process(lock);
    if has_unread || died_sending || reason == EndReason::Refused {
        halves.out.reset();
        halves.into.reset();
    } else {
        halves.out.finish();
        halves.into.shut();
    }
    halves.out.tail()
}

/// Returns whether a process holds the lock of a sending half. The sweeper of the engine holds it
/// with a value whose lower 32 bits are 0.
fn is_held_by_process(lock: u64) -> bool {
    lock as u32 != 0
}

/// Releases the memory pages of the region that the producer at `side` used last, and then clears
/// the region in the bits in which the side's party marks the regions that it uses.
fn release_region(link: &ArenaLink, families: &Slab<Family>, side: Side, region: Region) {
    let end = link.ends[side as usize];
    match (end.party, &link.bits) {
        (Party::Engine, Some(bits)) => {
            let (bits, shape) = (bits.clone(), link.arena.shape());
            link.arena.punch(side, region, move || Regions::new(&bits, shape).give(region));
        }
        (Party::Family(number), _) => {
            let Some(family) = families.get(number) else { return };
            let bits = (family.table.clone(), end.number);
            link.cleaning.give(&link.arena, side, region, bits);
        }
        _ => link.arena.punch(side, region, || {}),
    }
}

/// Returns the region that a producer's tail names. Returns `None` if the region is invalid.
pub fn within(tail: Tail, arena: &Arena) -> Option<Region> {
    let region = tail.region()?;
    let pages = region.len().div_ceil(PAGE);
    let fits =
        region.order <= MAX_ORDER && region.page as usize + pages <= arena.shape().pages as usize;
    fits.then_some(region)
}
