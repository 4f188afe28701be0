//! What the engine asks of whoever carries streams to other nodes ([`Remote`]), and what it gives it: the
//! engine's side of a stream ([`Line`]), and a family's signals ([`Family`]).
//!
//! A carrier moves bytes on threads of its own. The engine's thread calls it, and never waits in a call; what
//! the carrier has to say it keeps until it is asked ([`Remote::events`]), after its descriptor became
//! readable.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

pub use slipway_family::Family;
#[cfg(feature = "links")]
use slipway_link::SharesView;
use slipway_ring::cross::{Arena, Side, Tail};
use slipway_sgiov_spec::Address;

/// The engine's side of a stream.
#[derive(Clone)]
pub struct Line {
    /// The arena that has it.
    pub arena: Arena,
    /// Its number there.
    pub stream: u32,
    /// The engine's side.
    pub side: Side,
    /// What the family sleeps on; to be raised with `slipway_peer::eventfd::raise` when a call says so.
    pub eventfd: Arc<OwnedFd>,
    /// The family of the other side.
    pub family: u32,
    /// Its entry there: what its signals say.
    pub entry: u32,
    /// Who has which region of what the engine writes there: the same for all streams of the arena.
    pub regions: Arc<[AtomicU64]>,
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
    /// A guest's program wants to connect: as above, but where to is for policy to say.
    FromGuest {
        /// The carrier's number for it.
        incoming: u64,
        /// The guest's tenant.
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
    fn family(&mut self, number: u32, family: Family);

    /// Memory for streams of a family that end at the engine: an arena that nobody else has or will have, from
    /// where the carrier wants it. None: any will do, and the engine makes one.
    fn arena(&mut self) -> Option<std::io::Result<Arena>> {
        None
    }

    /// An arena of [`Remote::arena`]'s has no stream, and will have none.
    fn arena_gone(&mut self, arena: &Arena) {
        let _ = arena;
    }

    /// A program of the tenant listens at `at`, unspecified: at all its addresses. Once for each listener; only
    /// carriers that others have to be told by need to know.
    fn listens(&mut self, tenant: &str, at: Address) {
        let _ = (tenant, at);
    }

    /// It does not any more, as it was said.
    fn listens_no_more(&mut self, tenant: &str, at: Address) {
        let _ = (tenant, at);
    }

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

    /// Goes by other settings and certificates from now on, if it has any.
    #[cfg(feature = "links")]
    fn renew(&mut self, _renewal: slipway_link::Renewal) {}

    /// Readable when there are events; the carrier empties it in [`Remote::events`].
    fn wakes(&self) -> BorrowedFd<'_>;

    /// What there is to tell.
    fn events(&mut self) -> Vec<Event>;

    /// Who had how much of what carries when this was asked last; asks anew. None: not asked before, or there is
    /// nothing that is shared.
    #[cfg(feature = "links")]
    fn shares(&mut self) -> Option<SharesView> {
        None
    }
}
