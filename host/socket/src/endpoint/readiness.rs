//! Readiness of one side of a connection, and the wake-ups that announce it.
//!
//! To sleep without missing a wake-up, a thread arms the halves that it waits for and looks once
//! more: [`Endpoint::arm`] does both for one endpoint. For many there are [`Endpoint::wish`] for
//! each, one barrier ([`crate::heavy`]) for all, and [`Endpoint::is_armed`] for each.

use std::sync::atomic::Ordering;

use slipway_ring::cross::{Stream, Tail, fetch};
use slipway_sgiov_spec::table::entry;

use super::{Endpoint, Half, LARGEST_FIFO, option};

// The bits of poll(2).
const IN: i16 = 1;
const OUT: i16 = 4;
/// POLLRDNORM, which the kernel's TCP sets together with POLLIN.
const RDNORM: i16 = 0x40;
/// POLLWRNORM, which the kernel's TCP sets together with POLLOUT.
const WRNORM: i16 = 0x100;
const ERR: i16 = 8;
const HUP: i16 = 0x10;
const RDHUP: i16 = 0x2000;

/// The bits of a position in a FIFO, as a mask.
const POSITIONS: u64 = (1 << 36) - 1;

/// Bytes that are prefetched when a connection is reported: a cache line. The rest is prefetched
/// when the connection's turn comes next, or much of it would be evicted again.
const FETCHED: usize = 64;

impl Endpoint {
    /// Returns whether bytes wait here, or the end. Looks at less than [`Endpoint::ready`] does.
    #[inline]
    pub fn is_readable(&self) -> bool {
        let inbox = self.arena.inbox(self.place.stream, self.side);
        let theirs = Tail(inbox.tail.load(Ordering::Acquire));
        let head = Tail(self.words()[entry::RX_HEAD].load(Ordering::Relaxed));
        theirs.position() != head.position() || theirs.is_end()
    }

    /// Returns whether the peer sends no more.
    pub fn has_peer_ended(&self) -> bool {
        let inbox = self.arena.inbox(self.place.stream, self.side);
        Tail(inbox.tail.load(Ordering::Acquire)).is_end()
    }

    /// Returns whether the connection is over: neither side sends any more, or it was reset. TCP's
    /// socket is in the state CLOSE then, and has no peer any more.
    pub fn is_over(&self) -> bool {
        let ended = self.has_peer_ended() && self.stream().out.tail().is_end();
        ended || self.is_reset()
    }

    /// Returns the number of bytes that have arrived and were not read.
    pub fn arrived(&self) -> usize {
        let stream = self.stream();
        let theirs = Tail(stream.into.mine.tail.load(Ordering::Acquire)).position();
        let count = theirs.wrapping_sub(stream.into.position()) & POSITIONS;
        usize::try_from(count).unwrap_or(0).min(LARGEST_FIFO)
    }

    /// Returns whether `least` bytes have arrived and were not read, or no more may come before
    /// some are read: the stream has ended, or the other side's FIFO is more than half full, and
    /// that side does not report room ([`Endpoint::ready`]).
    pub fn has_arrived(&self, least: usize) -> bool {
        let theirs = Tail(self.stream().into.mine.tail.load(Ordering::Acquire));
        let ended = theirs.is_end() || self.has(option::NO_MORE) || self.is_reset();
        ended || self.arrived() >= self.most_arrived(least)
    }

    /// Returns `least`, or less if the other side's FIFO is more than half full earlier. A FIFO
    /// without bytes may become a larger one.
    pub(crate) fn most_arrived(&self, least: usize) -> usize {
        let theirs = Tail(self.stream().into.mine.tail.load(Ordering::Acquire));
        let half = usize::try_from(theirs.size() / 2).unwrap_or(usize::MAX);
        if self.arrived() == 0 { least.min(1) } else { least.min(half.saturating_add(1)) }
    }

    /// Returns the number of bytes that were sent and that the peer has not read.
    pub fn unread(&self) -> usize {
        let stream = self.stream();
        let head = stream.out.mine.head.load(Ordering::Acquire);
        let count = stream.out.tail().position().wrapping_sub(head) & POSITIONS;
        usize::try_from(count).unwrap_or(0)
    }

    /// Prefetches the memory that [`Endpoint::ready`] and a transfer look at, for a caller of
    /// either soon.
    #[inline]
    pub fn fetch(&self) {
        fetch(self.words(), entry::WORDS * 8);
        let inbox = self.arena.inbox(self.place.stream, self.side);
        fetch(inbox.tail, 1);
        fetch(inbox.data_wanted, 1);
    }

    /// Prefetches the first bytes that have arrived: one cache line.
    #[inline]
    pub fn fetch_data(&self) {
        self.stream().fetch_data(FETCHED);
    }

    /// Returns the address of the bytes to read next: for [`crate::fetch`] only.
    #[inline]
    pub fn next_data(&self) -> *const u8 {
        self.stream().next_data().map_or(std::ptr::null(), |(at, _)| at)
    }

    /// Returns the address where the bytes to send next will go: for [`crate::fetch_to_write`]
    /// only.
    #[inline]
    pub fn next_room(&self) -> *const u8 {
        self.stream().next_room()
    }

    /// Returns the bits of poll(2) that are set: IN with RDNORM, OUT with WRNORM, RDHUP, HUP, ERR.
    /// Takes no lock and raises no eventfd.
    #[inline]
    pub fn ready(&self) -> i16 {
        let stream = self.stream();
        let theirs = Tail(stream.into.mine.tail.load(Ordering::Acquire));
        let flags = self.option(option::FLAGS).load(Ordering::Relaxed);
        let ended = theirs.is_end() || flags & option::NO_MORE != 0;
        let finished = stream.out.tail().is_end();
        let mut bits = 0;
        if theirs.position() != stream.into.position() {
            bits |= IN | RDNORM;
        }
        if ended {
            bits |= IN | RDNORM | RDHUP;
        }
        if ended && finished {
            bits |= HUP;
        }
        // A send that fails at once does not block either.
        if finished || stream.out.is_shut() || self.has_room(&stream) {
            bits |= OUT | WRNORM;
        }
        if self.is_reset() {
            bits |= IN | RDNORM | OUT | WRNORM | RDHUP | HUP;
            if flags & option::TOLD == 0 {
                bits |= ERR;
            }
        }
        bits
    }

    /// Returns whether the sending FIFO has room enough to report it: half of it, or all of it
    /// where it is pinched. A FIFO without memory has room, since it grows.
    #[inline]
    fn has_room(&self, stream: &Stream<'_>) -> bool {
        let size = stream.out.tail().size();
        let left = if stream.out.is_pinched() { 0 } else { size / 2 };
        size == 0 || self.unread() as u64 <= left
    }

    /// Asks for the eventfd to be raised when `least` bytes, at least one, can be read, or when
    /// there is room to send. Returns `true` if that is so already: then the eventfd may not be
    /// raised. Costs a barrier on all processors.
    pub fn arm(&self, half: Half, least: usize) -> bool {
        let Ok(_held) = self.lock(half) else { return true };
        let stream = self.stream();
        let done = match half {
            Half::Receiving => stream.arm_data(least),
            Half::Sending => stream.arm_space(),
        };
        done.unwrap_or(true) || self.is_reset()
    }

    /// The first part of [`Endpoint::arm`], for callers that arm many endpoints: [`crate::heavy`]
    /// must follow, once for all, and then [`Endpoint::is_armed`] for each.
    pub fn wish(&self, half: Half, least: usize) {
        let Ok(_held) = self.lock(half) else { return };
        match half {
            Half::Receiving => self.stream().wish_data(least),
            Half::Sending => self.stream().wish_space(),
        }
    }

    /// The last part of [`Endpoint::arm`]. Returns whether the caller must wait for the eventfd.
    pub fn is_armed(&self, half: Half, least: usize) -> bool {
        let Ok(_held) = self.lock(half) else { return false };
        let there = match half {
            Half::Receiving => self.stream().is_data_there(least),
            Half::Sending => self.stream().is_space_there(),
        };
        !there.unwrap_or(true) && !self.is_reset()
    }

    /// Returns two numbers that change when bytes arrive, or when the peer reads.
    pub fn marks(&self) -> (u64, u64) {
        let inbox = self.arena.inbox(self.place.stream, self.side);
        (inbox.tail.load(Ordering::Acquire), inbox.head.load(Ordering::Acquire))
    }

    /// Asks the other side to note when bytes begin to wait here, from now on: [`Endpoint::since`].
    pub fn want_times(&self) {
        self.stream().into.want_times();
    }

    /// Returns the time, in nanoseconds of [`Deadline::now`](crate::Deadline::now), when the other
    /// side sent the first bytes that wait here, or since when this side has read a part of them.
    /// Returns `None` if the other side noted no time, as one on another machine does. A hostile
    /// peer notes any time.
    #[inline]
    pub fn since(&self) -> Option<u64> {
        self.stream().into.since()
    }
}
