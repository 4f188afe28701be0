//! One side of a connection.
//!
//! Over 500 lines: what a program and the engine do to one side of a connection, with its races.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;
use slipway_ring::cross::{Arena, Error, Own, Regions, Side, Stream, Tail, fetch};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::Endpoint as Granted;
use slipway_sgiov_spec::table::{Place, entry};

use crate::family::Family;
use crate::hidden::Hidden;
use crate::spin::Spin;
use crate::table::{self, TableGuard};

/// A half of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// The receiving half.
    Receiving,
    /// The sending half.
    Sending,
}

/// Words of an endpoint's table entry that only the family uses, and bits in the first of them.
///
/// All six words have a use. A new value has room in the high half of `TURN`, and in the bits of
/// `FLAGS` above those that the preload library has from `FREE` on. A whole word is left before
/// `OWN` (`slipway_sgiov_spec::table::entry`): `OWN` goes down by one then, so that
/// `Endpoint::begin` clears it, and the table has another `VERSION`, since the other words move. A
/// half is stored by a compare-and-swap of the whole word: the other half may change meanwhile.
pub mod option {
    use slipway_sgiov_spec::table::entry::OWN;

    /// The word with the bits below.
    pub const FLAGS: usize = OWN;
    /// Thread id of the leader, which sleeps on the eventfd for all (low half), and number of
    /// threads that sleep on the futex (high half).
    pub const SLEEPERS: usize = OWN + 1;
    /// Futex word that changes when the eventfd was drained.
    pub const TURN: usize = OWN + 2;
    /// Timeouts in milliseconds of receiving (low half) and sending (high half); 0 for none.
    pub const TIMEOUTS: usize = OWN + 3;
    /// Buffer sizes that the program asked for: receiving (low half), sending (high half).
    pub const BUFFERS: usize = OWN + 4;
    /// Upper bound of the processes that hold the endpoint (low half); `SO_RCVLOWAT` (high half).
    pub const HOLDERS: usize = OWN + 5;

    /// `O_NONBLOCK`.
    pub const NONBLOCK: u64 = 1;
    /// `shutdown(SHUT_RD)` was called: the program reads no more.
    pub const NO_MORE: u64 = 1 << 1;
    /// The program was told of the reset, which happens once.
    pub const TOLD: u64 = 1 << 2;
    /// `shutdown(SHUT_WR)` was called: the program sends no more.
    pub const FINISHED: u64 = 1 << 3;
    /// Close means reset: `SO_LINGER` with time 0.
    pub const ABORT: u64 = 1 << 4;
    /// The program's socket is of `AF_INET6`, whatever its addresses are.
    pub const SIX: u64 = 1 << 5;
    /// A thread has slept on this endpoint alone.
    pub const ALONE: u64 = 1 << 6;
    /// The first bit without a meaning here: for options that a program sets and may query.
    pub const FREE: u32 = 16;
}

/// Bytes that are prefetched when a connection is reported: a cache line. The rest is prefetched
/// when the connection's turn comes next, or much of it would be evicted again.
const FETCHED: usize = 64;

/// The most bytes of a FIFO for which the program has not set a size.
const MOST: usize = 1 << 20;

/// One side of a connection, as one process holds it. The state is in the family's table and in the
/// arena.
pub struct Endpoint {
    pub(crate) family: Arc<Family>,
    pub(crate) entry: usize,
    place: Place,
    side: Side,
    arena: Arena,
    /// The eventfd that the other side sleeps on. Unset if the other side is the engine, or if it
    /// was not needed yet.
    peer: OnceLock<Hidden>,
    /// The group of endpoints that share an eventfd; 0 for an eventfd of its own.
    group: u32,
    local: Address,
    remote: Address,
    pub(crate) spin: Spin,
    /// Calls that could do nothing. If two threads count at once, one call is lost.
    fruitless: AtomicU32,
}

/// Counts how often one program has woken threads of another one, over all their connections.
pub struct Raises {
    arena: Arena,
    side: Side,
}

impl Raises {
    /// Returns the number. It has changed if a thread was woken, and the caller sees what the waker
    /// did after that.
    #[inline]
    pub fn count(&self) -> u64 {
        self.arena.raised(self.side)
    }
}

impl PartialEq for Raises {
    fn eq(&self, other: &Self) -> bool {
        self.side == other.side && std::ptr::eq(self.arena.words(), other.arena.words())
    }
}

/// One in this many calls that can do nothing checks whether the connection was reset.
const FRUITLESS: u32 = 64;

#[inline]
fn add(word: &AtomicU64, count: usize) {
    // Only the holder of the half's lock writes this word.
    word.store(word.load(Ordering::Relaxed).wrapping_add(count as u64), Ordering::Relaxed);
}

impl Endpoint {
    pub(crate) fn new(
        family: Arc<Family>,
        granted: Granted,
        arena: Arena,
        peer: Option<Hidden>,
        group: u32,
    ) -> Self {
        let Granted { entry: number, place, local, peer: remote } = granted;
        let entry = number as usize;
        let side = if place.side == 0 { Side::Zero } else { Side::One };
        let (spin, peer) = (Spin::default(), peer.map(OnceLock::from).unwrap_or_default());
        let fruitless = AtomicU32::new(0);
        Self { family, entry, place, side, arena, peer, group, local, remote, spin, fruitless }
    }

    /// Initializes the entry of an endpoint that is new to the family.
    pub(crate) fn begin(&self) {
        let words = self.words();
        words[entry::OWN..].iter().for_each(|word| word.store(0, Ordering::Relaxed));
        words[option::HOLDERS].store(1, Ordering::Relaxed);
    }

    /// Takes over an endpoint of this process's image before execve(2): releases locks of that
    /// image's threads, since nobody else does, and this thread may have the id of one of them.
    pub(crate) fn go_on(&self) {
        let words = self.words();
        let me = table::thread();
        for lock in [entry::TX_LOCK, entry::RX_LOCK] {
            let (mine, free) = (u64::from(me), 0);
            let _ = words[lock].compare_exchange(mine, free, Ordering::AcqRel, Ordering::Relaxed);
        }
        let leader = table::low_half(&words[option::SLEEPERS]);
        let _ = leader.compare_exchange(me, 0, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Returns the endpoint's entry in the family's table.
    pub fn number(&self) -> u64 {
        self.entry as u64
    }

    /// Returns the local address.
    pub fn local(&self) -> Address {
        self.local
    }

    /// Returns the peer's address.
    pub fn remote(&self) -> Address {
        self.remote
    }

    /// Returns the history of polling this endpoint.
    pub fn spin(&self) -> &Spin {
        &self.spin
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

    /// Returns the counter of wake-ups by the other side's program.
    pub fn raises(&self) -> Raises {
        Raises { arena: self.arena.clone(), side: self.side }
    }

    /// Returns whether bytes wait here, or the end. Looks at less than [`Endpoint::ready`] does.
    #[inline]
    pub fn is_readable(&self) -> bool {
        let inbox = self.arena.inbox(self.place.stream, self.side);
        let theirs = Tail(inbox.tail.load(Ordering::Acquire));
        let head = Tail(self.words()[entry::RX_HEAD].load(Ordering::Relaxed));
        theirs.position() != head.position() || theirs.is_end()
    }

    /// Returns the family.
    pub fn family(&self) -> &Arc<Family> {
        &self.family
    }

    #[inline]
    pub(crate) fn words(&self) -> &[AtomicU64; entry::WORDS] {
        self.family.table().entry(self.entry)
    }

    /// Returns a word of the endpoint's table entry that only the family uses: see [`option`].
    #[inline]
    pub fn option(&self, word: usize) -> &AtomicU64 {
        &self.words()[word]
    }

    /// Returns whether a bit of [`option::FLAGS`] is set.
    #[inline]
    pub fn has(&self, bit: u64) -> bool {
        self.option(option::FLAGS).load(Ordering::Relaxed) & bit != 0
    }

    /// Sets or clears a bit of [`option::FLAGS`]. Returns whether it was set before.
    pub fn set(&self, bit: u64, on: bool) -> bool {
        let flags = self.option(option::FLAGS);
        let was = if on {
            flags.fetch_or(bit, Ordering::Relaxed)
        } else {
            flags.fetch_and(!bit, Ordering::Relaxed)
        };
        was & bit != 0
    }

    /// Returns the bytes sent and received so far.
    pub fn counts(&self) -> (u64, u64) {
        let words = self.words();
        (words[entry::SENT].load(Ordering::Relaxed), words[entry::RECEIVED].load(Ordering::Relaxed))
    }

    #[inline]
    fn stream(&self) -> Stream<'_> {
        let words = self.words();
        let out = Own { own: &words[entry::TX_TAIL], seen: &words[entry::TX_SEEN] };
        let into = Own { own: &words[entry::RX_HEAD], seen: &words[entry::RX_SEEN] };
        Stream::new(&self.arena, self.place.stream, self.side, out, into)
    }

    #[inline]
    fn lock(&self, half: Half) -> Result<TableGuard<'_>, Errno> {
        let word = if half == Half::Sending { entry::TX_LOCK } else { entry::RX_LOCK };
        table::lock(&self.words()[word])
    }

    #[cold]
    fn tell(&self) {
        if self.place.engine {
            return self.family.signal(self.entry);
        }
        let Some(peer) = self.peer() else { return };
        if self.place.same_tenant {
            // Fails if the counter is full: then the eventfd is readable already.
            let _ = rustix::io::write(peer, &1u64.to_ne_bytes());
        } else if !slipway_peer::eventfd::raise(peer.as_fd()) {
            // Other programs have used up the resources for raising the peer's eventfd without
            // blocking. The engine raises it on request; without an engine all streams have ended.
            let _ = self.family.peer(self.entry);
        }
        self.arena.note_raised(self.side.other());
    }

    /// Returns the eventfd that the peer sleeps on. `None` if nobody holds the other side, or if
    /// the engine is gone, which the peer notices.
    fn peer(&self) -> Option<&Hidden> {
        if self.peer.get().is_none()
            && let Ok(peer) = self.family.peer(self.entry)
        {
            // Another thread may have been faster.
            let _ = self.peer.set(peer);
        }
        self.peer.get()
    }

    /// Returns whether other endpoints sleep on the same eventfd. A shared eventfd is never
    /// drained: a thread that sleeps on it waits for its edge ([`Edge`](crate::Edge)).
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.group != 0
    }

    /// Returns a value that all endpoints with the same shared eventfd have in common, valid as
    /// long as one of them is open. Returns `None` if the endpoint has an eventfd of its own.
    #[inline]
    pub fn group(&self) -> Option<(usize, u32)> {
        self.is_shared().then(|| (Arc::as_ptr(&self.family).addr(), self.group))
    }

    /// Returns the most bytes that the sending FIFO grows to.
    #[inline]
    fn most(&self) -> usize {
        let asked = self.option(option::BUFFERS).load(Ordering::Relaxed) >> 32;
        if asked == 0 { MOST } else { (asked as usize).next_power_of_two().clamp(4096, 4 << 20) }
    }

    /// Has an empty FIFO grow for `wanted` bytes that several calls of [`Endpoint::send`] will
    /// bring, as it grows for one call of so many. The next send returns any error.
    pub fn expect(&self, wanted: usize) {
        if let Ok(_held) = self.lock(Half::Sending) {
            let _ = self.stream().expect(wanted, self.most(), self.regions());
        }
    }

    fn regions(&self) -> Regions<'_> {
        let bits = self.family.table().regions(usize::from(self.place.link));
        Regions::new(bits, self.arena.shape())
    }

    /// Copies as many bytes into the FIFO as there is room for. Returns their number.
    ///
    /// # Errors
    /// `EAGAIN`: there is no room. `EPIPE`: the peer reads no more, or this side has shut its
    /// sending half. `ECONNRESET`, once after a reset; then `EPIPE`. `ENOBUFS`: there is no memory
    /// for a FIFO.
    #[inline]
    pub fn send(&self, from: &[u8]) -> Result<usize, Errno> {
        let _held = self.lock(Half::Sending)?;
        if self.family.is_dead() {
            return Err(self.reset_by(Errno::PIPE));
        }
        let words = self.words();
        let sent = self.stream().write(from, self.most(), self.regions(), || self.tell());
        match sent {
            Ok(0) if !from.is_empty() && self.seems_reset() => Err(self.reset_by(Errno::PIPE)),
            Ok(0) if !from.is_empty() => Err(Errno::AGAIN),
            Ok(count) => {
                add(&words[entry::SENT], count);
                Ok(count)
            }
            Err(Error::Shut) => Err(Errno::PIPE),
            Err(Error::NoMemory) => Err(Errno::NOBUFS),
            Err(Error::Reset | Error::Spoiled) => Err(self.reset_by(Errno::PIPE)),
        }
    }

    /// Reads bytes that have arrived. Returns their number, or 0 at the end of the stream.
    ///
    /// # Errors
    /// `EAGAIN`: there is nothing yet. `ECONNRESET`, once after a reset; then the call returns 0.
    #[inline]
    pub fn recv(&self, into: &mut [u8]) -> Result<usize, Errno> {
        let _held = self.lock(Half::Receiving)?;
        let words = self.words();
        match self.stream().read(into, || self.tell()) {
            Ok(0) if !into.is_empty() => self.why_nothing(),
            Ok(count) => {
                add(&words[entry::RECEIVED], count);
                Ok(count)
            }
            Err(_) => self.end_or_reset(),
        }
    }

    /// Reads as [`Endpoint::recv`] does, but leaves the bytes in the FIFO.
    ///
    /// # Errors
    /// The errors of [`Endpoint::recv`].
    pub fn peek(&self, into: &mut [u8]) -> Result<usize, Errno> {
        let _held = self.lock(Half::Receiving)?;
        match self.stream().peek(0, into) {
            Ok(0) if !into.is_empty() => self.why_nothing(),
            Ok(count) => Ok(count),
            Err(_) => self.end_or_reset(),
        }
    }

    fn why_nothing(&self) -> Result<usize, Errno> {
        match self.stream().available() {
            Ok((_, true)) => Ok(0),
            _ if self.has(option::NO_MORE) => Ok(0),
            Ok(_) if self.seems_reset() => self.end_or_reset(),
            Ok(_) => Err(Errno::AGAIN),
            Err(_) => self.end_or_reset(),
        }
    }

    fn end_or_reset(&self) -> Result<usize, Errno> {
        match self.reset_by(Errno::PIPE) {
            Errno::PIPE => Ok(0),
            errno => Err(errno),
        }
    }

    /// Returns `ECONNRESET` the first time, then `later`.
    fn reset_by(&self, later: Errno) -> Errno {
        if self.set(option::TOLD, true) { later } else { Errno::CONNRESET }
    }

    /// Returns and clears the error for getsockopt(2): `ECONNRESET`, if the program was not told of
    /// the reset yet.
    pub fn take_error(&self) -> Option<Errno> {
        let reset = self.is_reset() && !self.set(option::TOLD, true);
        reset.then_some(Errno::CONNRESET)
    }

    fn is_reset(&self) -> bool {
        let stream = self.stream();
        let theirs = Tail(stream.into.mine.tail.load(Ordering::Acquire));
        self.family.is_dead() || theirs.is_reset() || stream.out.is_reset()
    }

    /// Returns whether a call that could do nothing ends the connection. A peer that spoils the
    /// words of one direction alone resets the connection for poll(2), which looks at both
    /// directions, and a program would call the other direction's function again and again. Looking
    /// at both takes a cache line from the peer's processor, so only some calls do.
    fn seems_reset(&self) -> bool {
        let calls = self.fruitless.load(Ordering::Relaxed).wrapping_add(1);
        self.fruitless.store(calls, Ordering::Relaxed);
        self.family.is_dead() || (calls.is_multiple_of(FRUITLESS) && self.is_reset())
    }

    /// Returns the number of bytes that have arrived and were not read.
    pub fn arrived(&self) -> usize {
        let stream = self.stream();
        let theirs = Tail(stream.into.mine.tail.load(Ordering::Acquire)).position();
        let count = theirs.wrapping_sub(stream.into.position()) & ((1 << 36) - 1);
        usize::try_from(count).unwrap_or(0).min(4 << 20)
    }

    /// Returns the number of bytes that were sent and that the peer has not read.
    pub fn unread(&self) -> usize {
        let stream = self.stream();
        let head = stream.out.mine.head.load(Ordering::Acquire);
        let count = stream.out.tail().position().wrapping_sub(head) & ((1 << 36) - 1);
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

    /// Returns the bits of poll(2) that are set: IN, OUT, RDHUP, HUP, ERR. Takes no lock and raises
    /// no eventfd.
    #[inline]
    pub fn ready(&self) -> i16 {
        const IN: i16 = 1;
        const OUT: i16 = 4;
        const ERR: i16 = 8;
        const HUP: i16 = 0x10;
        const RDHUP: i16 = 0x2000;
        let mut bits = 0;
        let stream = self.stream();
        let theirs = Tail(stream.into.mine.tail.load(Ordering::Acquire));
        if theirs.position() != stream.into.position() {
            bits |= IN;
        }
        let flags = self.option(option::FLAGS).load(Ordering::Relaxed);
        let ended = theirs.is_end() || flags & option::NO_MORE != 0;
        if ended {
            bits |= IN | RDHUP;
        }
        let finished = stream.out.tail().is_end();
        let shut = stream.out.is_shut();
        if ended && finished {
            bits |= HUP | OUT;
        }
        if finished || shut {
            bits |= OUT;
        } else {
            let size = stream.out.tail().size();
            let left = if stream.out.is_pinched() { 0 } else { size / 2 };
            if size == 0 || self.unread() as u64 <= left {
                bits |= OUT;
            }
        }
        if self.is_reset() {
            bits |= IN | OUT | RDHUP | HUP;
            if flags & option::TOLD == 0 {
                bits |= ERR;
            }
        }
        bits
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

    /// Ends the sending half: the peer reads the rest, and then the end.
    pub fn finish(&self) {
        let Ok(_held) = self.lock(Half::Sending) else { return };
        self.set(option::FINISHED, true);
        if !self.stream().out.tail().is_end() && self.stream().out.finish() {
            self.tell();
        }
    }

    /// Ends the receiving half; bytes that arrive nevertheless can be read.
    pub fn want_no_more(&self) {
        self.set(option::NO_MORE, true);
        self.rouse();
    }

    /// Counts another process as a holder: before fork(2), or before execve(2) in a child that
    /// shares this process's memory.
    pub fn hold(&self) {
        self.option(option::HOLDERS).fetch_add(1, Ordering::Relaxed);
    }

    /// Takes back [`Endpoint::hold`] if the other process was not created.
    pub fn let_go(&self) {
        self.option(option::HOLDERS).fetch_sub(1, Ordering::Relaxed);
    }

    /// Closes the endpoint in this process. The last process of the family ends the stream as TCP
    /// would: in order, or with a reset if bytes were left unread.
    pub fn close(&self) {
        let holders = self.option(option::HOLDERS).fetch_sub(1, Ordering::AcqRel) & 0xffff_ffff;
        if holders == 1 {
            self.end();
        }
        // The other holders may have ended without closing it, which only the engine knows.
        self.family.close(self.entry, self.is_shared(), holders > 1);
    }

    fn end(&self) {
        let (Ok(_receiving), Ok(_sending)) = (self.lock(Half::Receiving), self.lock(Half::Sending))
        else {
            return;
        };
        let stream = self.stream();
        let unread = stream.available().is_ok_and(|(count, _)| count > 0);
        let told = if unread || self.has(option::ABORT) {
            stream.out.reset() | stream.into.reset()
        } else if stream.out.tail().is_end() {
            stream.into.shut()
        } else {
            stream.out.finish() | stream.into.shut()
        };
        if told {
            self.tell();
        }
    }
}
