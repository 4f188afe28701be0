//! One side of a connection.

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
use crate::table::{self, Held};

/// A half of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// What arrives.
    Receiving,
    /// What is sent.
    Sending,
}

/// Words of the entry that are the family's own, and bits in the first of them.
pub mod option {
    use slipway_sgiov_spec::table::entry::OWN;

    /// Bits, below.
    pub const FLAGS: usize = OWN;
    /// Who sleeps on the eventfd for all (low half), and how many sleep on the futex (high half).
    pub const SLEEPERS: usize = OWN + 1;
    /// A futex: changes when the eventfd was emptied.
    pub const TURN: usize = OWN + 2;
    /// Milliseconds that receiving (low half) and sending (high half) may wait; 0: for ever.
    pub const TIMEOUTS: usize = OWN + 3;
    /// Sizes of buffers that were asked for: receiving (low half), sending (high half).
    pub const BUFFERS: usize = OWN + 4;
    /// Processes that have the endpoint, at most; high half: `SO_RCVLOWAT`.
    pub const HOLDERS: usize = OWN + 5;

    /// `O_NONBLOCK`.
    pub const NONBLOCK: u64 = 1;
    /// Nothing more is wanted: `shutdown(SHUT_RD)`.
    pub const NO_MORE: u64 = 1 << 1;
    /// That it was reset was told, which happens once.
    pub const TOLD: u64 = 1 << 2;
    /// Nothing more will be sent: `shutdown(SHUT_WR)`.
    pub const FINISHED: u64 = 1 << 3;
    /// Close means reset: `SO_LINGER` with time 0.
    pub const ABORT: u64 = 1 << 4;
    /// Its socket is of `AF_INET6`, whatever its addresses are.
    pub const SIX: u64 = 1 << 5;
    /// A thread slept on it, and on nothing else.
    pub const ALONE: u64 = 1 << 6;
    /// The first of the bits that mean nothing here: what a program set and may ask for.
    pub const FREE: u32 = 16;
}

/// Bytes that are fetched when a connection is reported: a line. The rest is fetched when its turn comes next, or much
/// of it would be gone from the caches again.
const FETCHED: usize = 64;

/// The most that a FIFO grows to, where the program did not say.
const MOST: usize = 1 << 20;

/// One side of a connection, as one process has it. Its state is in the family's table and in the arena.
pub struct Endpoint {
    pub(crate) family: Arc<Family>,
    pub(crate) entry: usize,
    place: Place,
    side: Side,
    arena: Arena,
    /// What the other side sleeps on. None: it is the engine, or nobody asked yet.
    peer: OnceLock<Hidden>,
    /// Those that sleep on the same eventfd; 0: none.
    group: u32,
    local: Address,
    remote: Address,
    pub(crate) spin: Spin,
    /// Counts calls that could do nothing. Two threads may count at once: then one call is not counted.
    fruitless: AtomicU32,
}

/// Of so many calls that can do nothing, one looks whether the connection was reset.
const FRUITLESS: u32 = 64;

#[inline]
fn add(word: &AtomicU64, count: usize) {
    // Under the half's lock.
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

    /// Nobody of the family had it before.
    pub(crate) fn begin(&self) {
        let words = self.words();
        words[entry::OWN..].iter().for_each(|word| word.store(0, Ordering::Relaxed));
        words[option::HOLDERS].store(1, Ordering::Relaxed);
    }

    /// The image of this process before execve(2) had it: what its threads had locked nobody unlocks, and this
    /// one may have the id of one of them.
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

    /// Its entry in the family's table.
    pub fn number(&self) -> u64 {
        self.entry as u64
    }

    /// The own address.
    pub fn local(&self) -> Address {
        self.local
    }

    /// The other side's address.
    pub fn remote(&self) -> Address {
        self.remote
    }

    /// What was learnt about waiting for it.
    pub fn spin(&self) -> &Spin {
        &self.spin
    }

    /// What changes when something arrives, or is read by the other side.
    pub fn marks(&self) -> (u64, u64) {
        let inbox = self.arena.inbox(self.place.stream, self.side);
        (inbox.tail.load(Ordering::Acquire), inbox.head.load(Ordering::Acquire))
    }

    /// The family.
    pub fn family(&self) -> &Arc<Family> {
        &self.family
    }

    #[inline]
    pub(crate) fn words(&self) -> &[AtomicU64; entry::WORDS] {
        self.family.table().entry(self.entry)
    }

    /// A word of the family's own: see [`option`].
    #[inline]
    pub fn option(&self, word: usize) -> &AtomicU64 {
        &self.words()[word]
    }

    /// Whether a bit of [`option::FLAGS`] is set.
    #[inline]
    pub fn has(&self, bit: u64) -> bool {
        self.option(option::FLAGS).load(Ordering::Relaxed) & bit != 0
    }

    /// Sets a bit of [`option::FLAGS`], or clears it. What it was.
    pub fn set(&self, bit: u64, on: bool) -> bool {
        let flags = self.option(option::FLAGS);
        let was = if on {
            flags.fetch_or(bit, Ordering::Relaxed)
        } else {
            flags.fetch_and(!bit, Ordering::Relaxed)
        };
        was & bit != 0
    }

    /// Bytes sent and received so far.
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
    fn lock(&self, half: Half) -> Result<Held<'_>, Errno> {
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
            // Fails when the counter is full: then it is readable already.
            let _ = rustix::io::write(peer, &1u64.to_ne_bytes());
        } else if !slipway_peer::eventfd::raise(peer.as_fd()) {
            // Others have taken all that this thread could raise it by without waiting for the peer. The engine raises it
            // for who asks; without an engine all streams have ended.
            let _ = self.family.peer(self.entry);
        }
    }

    /// What the other side sleeps on. None: nobody does, or the engine is gone, which the other side notices.
    fn peer(&self) -> Option<&Hidden> {
        if self.peer.get().is_none()
            && let Ok(peer) = self.family.peer(self.entry)
        {
            // Another thread may have been faster.
            let _ = self.peer.set(peer);
        }
        self.peer.get()
    }

    /// Whether other endpoints sleep on the same eventfd. Then nobody empties it: whoever sleeps on it waits for
    /// its edge ([`Edge`](crate::Edge)).
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.group != 0
    }

    /// What those have in common that sleep on the same eventfd, as long as one of them is open. None: it has one of
    /// its own.
    #[inline]
    pub fn group(&self) -> Option<(usize, u32)> {
        self.is_shared().then(|| (Arc::as_ptr(&self.family).addr(), self.group))
    }

    /// The most that the sending FIFO grows to.
    #[inline]
    fn most(&self) -> usize {
        let asked = self.option(option::BUFFERS).load(Ordering::Relaxed) >> 32;
        if asked == 0 { MOST } else { (asked as usize).next_power_of_two().clamp(4096, 4 << 20) }
    }

    /// Copies what there is room for into the FIFO.
    ///
    /// # Errors
    /// `EAGAIN`: there is no room. `EPIPE`: the other side reads no more, or this one has said that nothing
    /// comes. `ECONNRESET`, once; then `EPIPE`. `ENOBUFS`: there is no memory for a FIFO.
    #[inline]
    pub fn send(&self, from: &[u8]) -> Result<usize, Errno> {
        let _held = self.lock(Half::Sending)?;
        if self.family.is_dead() {
            return Err(self.reset_by(Errno::PIPE));
        }
        let words = self.words();
        let regions = Regions::new(
            self.family.table().regions(usize::from(self.place.link)),
            self.arena.shape(),
        );
        let sent = self.stream().write(from, self.most(), regions, || self.tell());
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

    /// Takes what has arrived; 0: nothing more comes.
    ///
    /// # Errors
    /// `EAGAIN`: there is nothing yet. `ECONNRESET`, once; then it is the end.
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

    /// As [`Endpoint::recv`], but what has arrived stays.
    ///
    /// # Errors
    /// As for [`Endpoint::recv`].
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

    /// `ECONNRESET` the first time, then `later`.
    fn reset_by(&self, later: Errno) -> Errno {
        if self.set(option::TOLD, true) { later } else { Errno::CONNRESET }
    }

    /// The error that getsockopt(2) takes away: `ECONNRESET`, if nobody was told.
    pub fn take_error(&self) -> Option<Errno> {
        let reset = self.is_reset() && !self.set(option::TOLD, true);
        reset.then_some(Errno::CONNRESET)
    }

    fn is_reset(&self) -> bool {
        let stream = self.stream();
        let theirs = Tail(stream.into.mine.tail.load(Ordering::Acquire));
        self.family.is_dead() || theirs.is_reset() || stream.out.is_reset()
    }

    /// Returns whether a call that could do nothing ends the connection. A peer that spoils the words of one direction
    /// alone resets it for poll(2), which looks at both, and a program would call the other direction's function again and
    /// again. Looking at both takes a line from the peer's processor, so only some calls do.
    fn seems_reset(&self) -> bool {
        let calls = self.fruitless.load(Ordering::Relaxed).wrapping_add(1);
        self.fruitless.store(calls, Ordering::Relaxed);
        self.family.is_dead() || (calls.is_multiple_of(FRUITLESS) && self.is_reset())
    }

    /// Bytes that have arrived and were not read.
    pub fn arrived(&self) -> usize {
        let stream = self.stream();
        let theirs = Tail(stream.into.mine.tail.load(Ordering::Acquire)).position();
        let count = theirs.wrapping_sub(stream.into.position()) & ((1 << 36) - 1);
        usize::try_from(count).unwrap_or(0).min(4 << 20)
    }

    /// Bytes that were sent and not read by the other side.
    pub fn unread(&self) -> usize {
        let stream = self.stream();
        let head = stream.out.mine.head.load(Ordering::Acquire);
        let count = stream.out.tail().position().wrapping_sub(head) & ((1 << 36) - 1);
        usize::try_from(count).unwrap_or(0)
    }

    /// Has the processor fetch what [`Endpoint::ready`] and a transfer look at, for who will call them soon.
    #[inline]
    pub fn fetch(&self) {
        fetch(self.words(), entry::WORDS * 8);
        let inbox = self.arena.inbox(self.place.stream, self.side);
        fetch(inbox.tail, 1);
        fetch(inbox.data_wanted, 1);
    }

    /// The same for the first bytes that have arrived.
    #[inline]
    pub fn fetch_data(&self) {
        self.stream().fetch_data(FETCHED);
    }

    /// Where the next bytes that are read lie: for [`crate::fetch`] and for nothing else.
    #[inline]
    pub fn next_data(&self) -> *const u8 {
        self.stream().next_data().map_or(std::ptr::null(), |(at, _)| at)
    }

    /// Where the next bytes that are sent would go: for [`crate::fetch_to_write`] and for nothing else.
    #[inline]
    pub fn next_room(&self) -> *const u8 {
        self.stream().next_room()
    }

    /// The bits of poll(2) that are set: IN, OUT, RDHUP, HUP, ERR. Takes no lock and tells nobody.
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

    /// Asks for the eventfd to be raised when `least` bytes more than none can be read, or there is room to
    /// send. True: so it is already, and it may not be raised. Costs a barrier of all processors.
    pub fn arm(&self, half: Half, least: usize) -> bool {
        let Ok(_held) = self.lock(half) else { return true };
        let stream = self.stream();
        let done = match half {
            Half::Receiving => stream.arm_data(least),
            Half::Sending => stream.arm_space(),
        };
        done.unwrap_or(true) || self.is_reset()
    }

    /// The first part of [`Endpoint::arm`], for who arms many: [`crate::heavy`] must follow, once for all, and then
    /// [`Endpoint::is_armed`] for each.
    pub fn wish(&self, half: Half, least: usize) {
        let Ok(_held) = self.lock(half) else { return };
        match half {
            Half::Receiving => self.stream().wish_data(least),
            Half::Sending => self.stream().wish_space(),
        }
    }

    /// The last part of [`Endpoint::arm`]: whether it is to be waited for.
    pub fn is_armed(&self, half: Half, least: usize) -> bool {
        let Ok(_held) = self.lock(half) else { return false };
        let there = match half {
            Half::Receiving => self.stream().is_data_there(least),
            Half::Sending => self.stream().is_space_there(),
        };
        !there.unwrap_or(true) && !self.is_reset()
    }

    /// Nothing more will be sent.
    pub fn finish(&self) {
        let Ok(_held) = self.lock(Half::Sending) else { return };
        self.set(option::FINISHED, true);
        if !self.stream().out.tail().is_end() && self.stream().out.finish() {
            self.tell();
        }
    }

    /// Nothing more is wanted; what comes nevertheless can be read.
    pub fn want_no_more(&self) {
        self.set(option::NO_MORE, true);
        self.rouse();
    }

    /// Another process has it from now on: before fork(2), or execve(2) in a child that has this process's memory.
    pub fn hold(&self) {
        self.option(option::HOLDERS).fetch_add(1, Ordering::Relaxed);
    }

    /// It has not after all.
    pub fn let_go(&self) {
        self.option(option::HOLDERS).fetch_sub(1, Ordering::Relaxed);
    }

    /// This process is done with it. The last one of the family ends the stream as TCP would: in order, or
    /// with a reset when something was left unread.
    pub fn close(&self) {
        let holders = self.option(option::HOLDERS).fetch_sub(1, Ordering::AcqRel) & 0xffff_ffff;
        if holders == 1 {
            self.end();
        }
        self.family.close(self.entry, self.is_shared());
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
