//! What the engine asks of whoever carries streams to other nodes ([`Remote`]), and what it gives it: the
//! engine's side of a stream ([`Line`]), and a family's signals ([`Source`]).
//!
//! A carrier moves bytes on threads of its own. The engine's thread calls it, and never waits in a call; what
//! the carrier has to say it keeps until it is asked ([`Remote::events`]), after its descriptor became
//! readable.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use slipway_ram::Lasting;
use slipway_ring::cross::{Arena, Side, Signals, Spoiled, Tail};
use slipway_sgiov_spec::{Address, table};

use crate::table::{ENTRIES, LINKS, Table};

/// The engine's side of a stream.
#[derive(Clone)]
pub struct Line {
    /// The arena that has it.
    pub arena: Arena,
    /// Its number there.
    pub stream: u32,
    /// The engine's side.
    pub side: Side,
    /// What the family sleeps on; to be raised with `slipway_eventfd::raise` when a call says so.
    pub eventfd: Arc<OwnedFd>,
    /// The family of the other side.
    pub family: u32,
    /// Its entry there: what its signals say.
    pub entry: u32,
    /// Who has which region of what the engine writes there: the same for all streams of the arena.
    pub regions: Arc<[AtomicU64]>,
}

/// What a look at a family's signals gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// There were no more.
    All,
    /// There may be more.
    Some,
    /// Signals were lost for want of room: every stream of the family is to be looked at.
    Lost,
}

/// A family's signals to the engine.
///
/// The family raises a signal, full barrier, loads *asleep*, and rings if that is 1. The engine's thread stores
/// *asleep* = 1, full barrier, looks for signals, and sleeps if there is none. Of two such stores with a full
/// barrier before the loads at least one is seen.
pub struct Source {
    memory: Lasting,
    signals: Signals,
    bell: Arc<OwnedFd>,
}

impl Source {
    pub(crate) fn new(of: &Table, bell: Arc<OwnedFd>) -> Option<Self> {
        let first = table::signals(ENTRIES as usize, LINKS.into());
        let (_, rest) = of.memory().split(first)?;
        let signals = Signals::new(rest, table::SIGNALS)?;
        Some(Self { memory: of.memory().clone(), signals, bell })
    }

    /// Readable when the family rang: to be emptied with `slipway_eventfd::drain`.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Takes up to `most` signals: numbers of entries, of which any may be none.
    ///
    /// # Errors
    /// [`Spoiled`]: the family moved a counter where it cannot be. No signal of it can be believed any more.
    pub fn take(&mut self, most: usize, mut each: impl FnMut(u32)) -> Result<Taken, Spoiled> {
        if self.memory.words()[table::OVERFLOW / 8].swap(0, Ordering::AcqRel) != 0 {
            return Ok(Taken::Lost);
        }
        for _ in 0..most {
            let Some(event) = self.signals.take()? else { return Ok(Taken::All) };
            if let Ok(entry) = u32::try_from(event) {
                each(entry);
            }
        }
        Ok(Taken::Some)
    }

    /// Asks to be rung for the next signal. True: there is one, and nobody may ring. After it was rung for, or
    /// has found something, the engine is awake and rings are not asked for.
    pub fn rest(&mut self) -> bool {
        let words = self.memory.words();
        let asleep = &words[table::ASLEEP / 8];
        asleep.store(1, Ordering::Relaxed);
        // Pairs with the barrier of who raises: it sees *asleep*, or its signal is seen here.
        fence(Ordering::SeqCst);
        let some =
            self.signals.is_raised() || words[table::OVERFLOW / 8].load(Ordering::Relaxed) != 0;
        if some {
            asleep.store(0, Ordering::Relaxed);
        }
        some
    }
}

/// What a carrier tells.
#[derive(Debug)]
pub enum Event {
    /// [`Remote::connect`] has succeeded.
    Connected {
        /// The connection.
        connection: u32,
    },
    /// It has not. The engine's side of the stream is of no use any more.
    Refused {
        /// The connection.
        connection: u32,
        /// A number of errno(3).
        errno: u32,
    },
    /// Another node's program wants to connect: the engine answers with [`Remote::answer`].
    Incoming {
        /// The carrier's number for it.
        incoming: u64,
        /// The tenant on this node that it is for, by name.
        tenant: String,
        /// Who connects.
        from: Address,
        /// Where to.
        to: Address,
    },
    /// No thread of the carrier's will touch the stream any more; both its halves are finished. An event of this
    /// kind comes once for each connection that was connected, after the family's side or the other node's
    /// has ended.
    Ended {
        /// The connection.
        connection: u32,
        /// The last word of the engine's producer: its region is given back.
        last: Tail,
    },
}

/// Who carries streams to other nodes.
pub trait Remote: Send {
    /// Whether the carrier has a way to `to` for the tenant: then [`Remote::connect`] is asked, else the kernel.
    fn is_for(&self, tenant: &str, to: &Address) -> bool;

    /// A family is there. Its signals name entries of streams that were written to, read from, or ended.
    fn family(&mut self, family: u32, source: Source);

    /// A family has ended. What streams it has are finished by now: the carrier goes on to deliver what was
    /// written before.
    fn family_ended(&mut self, family: u32);

    /// Connect `line` of connection `connection` to `to`. [`Event::Connected`] or [`Event::Refused`] follows.
    fn connect(&mut self, connection: u32, tenant: &str, from: Address, to: Address, line: Line);

    /// The answer to [`Event::Incoming`]: the connection and the engine's side of it, or a number of errno(3).
    fn answer(&mut self, incoming: u64, answer: Result<(u32, Line), u32>);

    /// The family's side of the connection was closed; its last words are in the arena. The carrier finishes
    /// what is under way and tells [`Event::Ended`].
    fn closed(&mut self, connection: u32);

    /// Readable when there are events; the carrier empties it in [`Remote::events`].
    fn wakes(&self) -> BorrowedFd<'_>;

    /// What there is to tell.
    fn events(&mut self) -> Vec<Event>;
}
