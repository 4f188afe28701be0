//! Cross-FIFO: byte streams between two sides of a bus that need not trust each other (SG-IOV).
//!
//! A FIFO's producer writes bytes and its counter to memory on the consumer's side, and the
//! consumer writes its counter to memory on the producer's side, so each side polls its own memory
//! only. [`index`] has the words and their checks, [`Arena`] the memory of many streams between the
//! same two parties, [`Stream`] one stream, and [`Signals`] a FIFO of events for any number of
//! streams.
//!
//! # An arena
//! A memfd, sealed against shrinking, or a piece of a guest's memory. Its sides are 0 and 1. All
//! numbers are little-endian; an arena is used by processes of one machine, or by a machine and its
//! guest.
//!
//! | offset | what |
//! |---|---|
//! | 0 | magic, `u64`: the bytes `slipfifo` |
//! | 8 | version, `u64`: 1 |
//! | 16 | streams, `u64`: 1 to 2^20 |
//! | 24 | pages of an area, `u64`, of 4,096 bytes: at least as many as streams, below 2^22 |
//! | 32 | `u64`: 1 if its sides are on different machines, a guest and its host ([`Arena::within`]) |
//! | 64, 128 | `u64`: how often side 0, side 1 was woken |
//! | 4,096 | for each stream the inboxes of side 0 and of side 1, 128 bytes each |
//! | after them, at a multiple of 4,096 | the area that side 0 writes |
//! | after it | the area that side 1 writes |
//!
//! and of an inbox
//!
//! | offset | what |
//! |---|---|
//! | 0 | tail of the other side as a producer ([`index::Tail`]) |
//! | 8 | head of the other side as a consumer |
//! | 16 | time of the other side's last write into an empty FIFO, if this side wants to know |
//! | 64 | the other side's wish for data: the position that it waits for |
//! | 72 | the other side's wish for space: the position up to which its data is to be read |
//! | 80 | 1 if the other side wants to know that time of this one |
//!
//! The rest is unused: wishes are rare, and a look for one does not wait for the cache line of the
//! counters.
//!
//! # Memory
//! Pages of an area cost nothing until they are written. The producer's counter has the place and
//! the length of a FIFO, so that a FIFO grows, shrinks and moves while it is empty
//! ([`index::Sending::place`]). Page *n* of an area is stream *n*'s own, so that every stream has
//! one; [`Regions`] allocates larger regions behind those. Released pages are punched out of the
//! file ([`Arena::punch`]).
//!
//! # Waking a sleeper
//! The users agree on the way: an eventfd per stream and side, or a signal. `outside.rs` has the
//! barriers: the sleeper pays for both sides. A side that is about to sleep on many streams makes
//! all its wishes, passes one barrier ([`heavy`]), and looks at all streams.

mod arena;
mod fetch;
pub mod index;
mod outside;
mod regions;
mod signals;
mod stream;
mod transfer;

pub use arena::{Arena, Shape, Side};
pub use fetch::{fetch, fetch_to_write};
pub use index::{Own, Region, Spoiled, Tail};
pub use outside::{heavy, is_told_surely};
pub use regions::Regions;
pub use signals::{Full, Signals};
pub use stream::{Error, Stream};
pub use transfer::Fault;
