//! One side of a connection.
//!
//! - This file has the endpoint: its words in the family's table, its eventfds, and its end.
//! - `transfer` moves bytes: send, receive, peek.
//! - `readiness` tells whether a transfer would do something, and asks to be woken when it would.
//!
//! Each half has a lock in the table, which a transfer and the arming of a wake-up take. What only
//! looks takes none, and may be outdated when it returns.

mod readiness;
mod transfer;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;
use slipway_ring::cross::{Arena, Own, Side, Stream, Tail};
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
/// All six words have a use. A new value has room in the high half of `TURN`. A new bit has room in
/// `FLAGS`: bits 8 to 15 are free for this crate. From bit `FREE` on the bits are the preload
/// library's, by number in its table `SWITCHES`, which has 11 entries: its next one is `FREE + 11`,
/// and bit 63 the last. A whole word is left before
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
    /// A non-blocking connect(2) returned `EINPROGRESS`, and none was called since.
    pub const CONNECTING: u64 = 1 << 7;
    /// The first bit without a meaning here: for options that a program sets and may query.
    pub const FREE: u32 = 16;
}

/// The largest size of a FIFO in bytes.
const LARGEST_FIFO: usize = 4 << 20;

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

    /// Returns the counter of wake-ups by the other side's program.
    pub fn raises(&self) -> Raises {
        Raises { arena: self.arena.clone(), side: self.side }
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

    /// Returns the FIFOs of both directions.
    #[inline]
    fn stream(&self) -> Stream<'_> {
        let words = self.words();
        let out = Own { own: &words[entry::TX_TAIL], seen: &words[entry::TX_SEEN] };
        let into = Own { own: &words[entry::RX_HEAD], seen: &words[entry::RX_SEEN] };
        Stream::new(&self.arena, self.place.stream, self.side, out, into)
    }

    /// Takes the lock of a half.
    #[inline]
    fn lock(&self, half: Half) -> Result<TableGuard<'_>, Errno> {
        let word = if half == Half::Sending { entry::TX_LOCK } else { entry::RX_LOCK };
        table::lock(&self.words()[word])
    }

    /// Wakes the other side.
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

    /// Returns `ECONNRESET` the first time, then `later`.
    fn reset_by(&self, later: Errno) -> Errno {
        if self.set(option::TOLD, true) { later } else { Errno::CONNRESET }
    }

    /// Leaves `errno` to the next call if it is the error of a reset, for a caller that has moved
    /// bytes before and returns their number: the kernel's calls report a reset afterwards. Without
    /// it, the next call would return the end of the stream, as if all bytes had come.
    pub fn leave_reset(&self, errno: Errno) {
        if errno == Errno::CONNRESET {
            self.set(option::TOLD, false);
        }
    }

    /// Returns and clears the error for getsockopt(2): `ECONNRESET`, if the program was not told of
    /// the reset yet.
    pub fn take_error(&self) -> Option<Errno> {
        let reset = self.is_reset() && !self.set(option::TOLD, true);
        reset.then_some(Errno::CONNRESET)
    }

    /// Returns whether the connection was reset in either direction, or its engine is gone.
    fn is_reset(&self) -> bool {
        let stream = self.stream();
        let theirs = Tail(stream.into.mine.tail.load(Ordering::Acquire));
        self.family.is_dead() || theirs.is_reset() || stream.out.is_reset()
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

    /// Resets the connection at once, for all processes that hold it: they read its end, and send
    /// no more. Threads that sleep on the eventfd need [`Endpoint::wake`].
    pub fn abort(&self) {
        self.set(option::ABORT, true);
        self.end();
        self.want_no_more();
    }

    /// Wakes the threads of this side that sleep on `eventfd`, the endpoint's own, after this side
    /// changed its state.
    pub fn wake(&self, eventfd: BorrowedFd<'_>) {
        if self.place.same_tenant {
            // Fails if the counter is full: then the eventfd is readable already.
            let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
        } else {
            // Fails if other programs have used up the resources for it. Sleeping threads look
            // again by themselves after a second.
            let _ = slipway_peer::eventfd::raise(eventfd);
        }
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

    /// Ends the stream for the last process that held it.
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
