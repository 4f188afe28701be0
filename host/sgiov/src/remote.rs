//! The interface between the engine and a carrier of streams to other nodes ([`StreamCarrier`]).
//! The engine gives the carrier its side of each stream ([`Line`]), and each family's signals
//! ([`Family`]).
//!
//! A carrier moves bytes on threads of its own. The engine's thread calls it, and a call never
//! waits. A carrier keeps its events until the engine takes them with [`StreamCarrier::events`],
//! after a descriptor of the carrier has become readable.

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
    /// The arena with the stream.
    pub arena: Arena,
    /// The stream's number in the arena.
    pub stream: u32,
    /// The engine's side of the arena.
    pub side: Side,
    /// The eventfd that the family sleeps on. Raise it with `slipway_peer::eventfd::raise` when a
    /// call says so.
    pub eventfd: Arc<OwnedFd>,
    /// The tenant on the other side: the name of its network namespace.
    pub tenant: Arc<str>,
    /// The family on the other side.
    pub family: u32,
    /// The stream's entry in the family's table. The family's signals name it.
    pub entry: u32,
    /// A bit for each region that the engine may write: set if the region is taken. All streams of
    /// the arena share these bits.
    pub regions: Arc<[AtomicU64]>,
}

/// The network namespace on this node that a connection is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destined {
    /// The namespace that the policy gives the tenant of this name.
    Tenant(String),
    /// The namespace with this number, as [`StreamCarrier::listens`] has reported it.
    Namespace(u32),
}

/// An event that a carrier reports.
#[derive(Debug)]
pub enum Event {
    /// [`StreamCarrier::connect`] has succeeded.
    Connected {
        /// The connection.
        connection: u32,
    },
    /// [`StreamCarrier::connect`] has failed. The engine's side of the stream is no longer used.
    Refused {
        /// The connection.
        connection: u32,
        /// The reason, a number of errno(3).
        errno: u32,
    },
    /// A program of another node wants to connect. The engine answers with
    /// [`StreamCarrier::answer`].
    Incoming {
        /// The carrier's number for the request.
        incoming: u64,
        /// The network namespace that the request is for.
        into: Destined,
        /// The source address.
        from: Address,
        /// The destination address.
        to: Address,
    },
    /// A guest's program wants to connect. The engine finds the destination's tenant by the policy,
    /// and answers with [`StreamCarrier::answer`].
    FromGuest {
        /// The carrier's number for the request.
        incoming: u64,
        /// The guest's tenant.
        tenant: String,
        /// The source address.
        from: Address,
        /// The destination address.
        to: Address,
    },
    /// No thread of the carrier will touch the stream any more, and both its halves are finished.
    /// Each connection that was connected has one such event, after the family's side or the other
    /// node's has ended.
    Ended {
        /// The connection.
        connection: u32,
        /// The last tail of the engine's producer, whose region is given back.
        last: Tail,
    },
}

/// A carrier of streams to other nodes.
pub trait StreamCarrier: Send {
    /// Returns whether the carrier has a way to `to` for the tenant. If so the engine calls
    /// [`StreamCarrier::connect`]; if not it leaves the connection to the kernel.
    fn is_for(&self, tenant: &str, to: &Address) -> bool;

    /// Adds a family. Its signals name entries of streams that were written to, read from, or
    /// ended.
    fn family(&mut self, number: u32, family: Family);

    /// Makes an arena for streams of a family that end at the engine, in memory of the carrier's
    /// choice. Nobody else has the arena or will have it. Returns `None` if any memory will do; the
    /// engine then makes the arena.
    fn arena(&mut self) -> Option<std::io::Result<Arena>> {
        None
    }

    /// Takes back an arena of [`StreamCarrier::arena`] that has no stream and will have none.
    fn arena_gone(&mut self, arena: &Arena) {
        let _ = arena;
    }

    /// Reports that a program listens at `at` in the engine's network namespace of this number; an
    /// unspecified address means all addresses of the namespace. Called once for each listener.
    /// Only a carrier that has to announce listeners needs this.
    fn listens(&mut self, namespace: u32, at: Address) {
        let _ = (namespace, at);
    }

    /// Reports that a listener of [`StreamCarrier::listens`] has ended.
    fn listens_no_more(&mut self, namespace: u32, at: Address) {
        let _ = (namespace, at);
    }

    /// Reports that a family has ended. Its streams are finished by now, and the carrier goes on to
    /// deliver what was written before.
    fn family_ended(&mut self, family: u32);

    /// Connects `line` of connection `connection` to `to`. [`Event::Connected`] or
    /// [`Event::Refused`] follows.
    fn connect(&mut self, connection: u32, tenant: &str, from: Address, to: Address, line: Line);

    /// Takes the engine's answer to [`Event::Incoming`] or [`Event::FromGuest`]: the connection and
    /// the engine's side of it, or a number of errno(3).
    fn answer(&mut self, incoming: u64, answer: Result<(u32, Line), u32>);

    /// Reports that the family has closed its side of the connection. That side's halves of the
    /// stream are finished in the arena by now. The carrier delivers the bytes in flight and
    /// reports [`Event::Ended`].
    fn closed(&mut self, connection: u32);

    /// Replaces the settings and certificates of the carrier. A carrier without settings ignores
    /// the call.
    #[cfg(feature = "links")]
    fn renew(&mut self, _renewal: slipway_link::Renewal) {}

    /// Returns the descriptors of which one is readable when there are events: the same ones
    /// as long as the carrier lives. The carrier drains them in [`StreamCarrier::events`].
    fn wakes(&self) -> Vec<BorrowedFd<'_>>;

    /// Takes the events since the last call.
    fn events(&mut self) -> Vec<Event>;

    /// Returns the tenants' shares of the carrier as of the last call, and asks for new ones.
    /// Returns `None` if there was no call before, or if the carrier shares nothing out.
    #[cfg(feature = "links")]
    fn shares(&mut self) -> Option<SharesView> {
        None
    }
}
