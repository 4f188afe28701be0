//! Packet rings in shared memory: a link between two processes that need not trust each other.
//!
//! A [`Link`] is a memfd, sealed against shrinking, with two rings of *slots*, one each way. A ring has
//! one producer and one consumer. The slots from the tail up to the head are the consumer's, the others
//! are the producer's; head and tail count slots from the link's beginning and never wrap (2^64). Each
//! side writes one of them only, and keeps a copy of its own that it goes by.
//!
//! # Layout
//! All numbers are little-endian; a link is used by processes of one machine.
//!
//! | offset | what |
//! |---|---|
//! | 0 | magic, `u64`: the bytes `slipring` |
//! | 8 | version, `u64`: 1 |
//! | 16 | slots of each ring, `u64`: a power of two, 16 to 32,768 |
//! | 24 | payload of a slot in bytes, `u64`: a multiple of 64, 64 to 65,536 |
//! | 4,096 | the ring whose consumer is the link's *server* |
//! | after it, at a multiple of 4,096 | the ring whose consumer is the *peer* |
//!
//! and of a ring
//!
//! | offset | what | written by |
//! |---|---|---|
//! | 0 | head, `u64`: slots produced | producer |
//! | 64 | tail, `u64`: slots consumed | consumer |
//! | 128 | asleep, `u64`; 1: tell me when the head moves | consumer; the producer that tells sets it to 0 |
//! | 192 | a descriptor of 8 bytes for each slot ([`Descriptor`]) | producer |
//! | after them, at a multiple of 64 | the slots, *stride* bytes apart | producer |
//!
//! The stride is the payload and 64 bytes: so the beginnings of slots, which is all that small packets
//! touch, spread over the sets of a cache.
//!
//! # Who believes what
//! Each side reads the other's counter once, and a counter that cannot be is [`Broken`]: the link is of
//! no use any more, and nothing else has happened. A descriptor is one word, read once. Payload may
//! change while it is read, whatever the counters say: it is copied first and judged then.
//!
//! # Sleeping
//! `sleep.rs` has the argument that no wake-up is lost; `tests/sleep.rs` has loom try every
//! interleaving. How a sleeper is told is the users' agreement (an eventfd).
//!
//! Dependencies: `thiserror` for [`Broken`].

#![allow(unsafe_code)] // a prefetch of words that are soon written

mod descriptor;
mod link;
mod outside;
mod ring;
mod sleep;

pub use descriptor::{Descriptor, Segmentation};
pub use link::{Geometry, Link};
pub use ring::{Broken, Consumer, Producer};

/// The full barrier between [`Producer::publish`] and [`Producer::must_tell`].
#[inline]
pub fn barrier() {
    sleep::barrier();
}
