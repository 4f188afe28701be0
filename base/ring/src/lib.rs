//! Rings in shared memory, between two processes that need not trust each other: packet rings,
//! which this page describes, and byte streams and signals ([`cross`]).
//!
//! A [`Link`] is a memfd, sealed against shrinking, with two rings of *slots*, one each way. A ring
//! has one producer and one consumer. The slots from the tail up to the head are the consumer's,
//! the others are the producer's. Head and tail count slots from the link's beginning and never
//! wrap (2^64). Each side writes only one of them, and uses a private copy of it.
//!
//! # Layout
//! All numbers are little-endian; a link is used by processes of one machine.
//!
//! | offset | content |
//! |---|---|
//! | 0 | magic, `u64`: the bytes `slipring` |
//! | 8 | version, `u64`: 2 |
//! | 16 | slots of each ring, `u64`: a power of two, 16 to 32,768 |
//! | 24 | payload of a slot in bytes, `u64`: a multiple of 64, 64 to 65,536 |
//! | 4,096 | the ring whose consumer is the link's *server* |
//! | after it, at a multiple of 4,096 | the ring whose consumer is the *peer* |
//!
//! and of a ring
//!
//! | offset | content | written by |
//! |---|---|---|
//! | 0 | head, `u64`: slots produced | producer |
//! | 8 | asleep, `u64`: 1 if a move of the head must wake the consumer | consumer; producer sets 0 |
//! | 64 | tail, `u64`: slots consumed | consumer |
//! | 128 | a descriptor of 8 bytes for each slot ([`Descriptor`]) | producer |
//! | after them, at a multiple of 64 | the slots, *stride* bytes apart | producer |
//!
//! A producer reads the word `asleep` whenever it has moved the head, and the consumer writes it
//! only before it sleeps. So the word lies in the head's cache line, and a server of many rings
//! needs no further line for it. The stride is the payload and 64 bytes: so the beginnings of
//! slots, which are all that small packets touch, spread over the sets of a cache.
//!
//! # Trust
//! Each side reads the other's counter once. An impossible counter is [`Broken`]: the link is
//! useless from then on, and nothing else has happened. A descriptor is one word, read once.
//! Payload may change while it is read, whatever the counters say: it is copied first and checked
//! then.
//!
//! # Attaching
//! A memory port of another process is reached over a Unix socket of type `SOCK_SEQPACKET`. The
//! client sends one message, [`Hello`]:
//!
//! | offset | content |
//! |---|---|
//! | 0 | magic, `u64`: the bytes `slipport` |
//! | 8 | version, `u32`: 1 |
//! | 12 | [`Takes`], `u32`: bit 0 checksum to be filled in; bits 1 to 3 to be cut (below); else 0 |
//!
//! Bits 1 to 3 mean frames to be cut: TCP over IPv4, TCP over IPv6, UDP. The client gets one
//! message back, [`Welcome`]:
//!
//! | offset | content |
//! |---|---|
//! | 0 | magic, `u64`: the bytes `slipport` |
//! | 8 | version, `u32`: the server's |
//! | 12 | status, `u32`: 0, or a number of errno(3) (below) |
//! | 16 | MAC address of the port, 6 bytes; zeros if none is assigned |
//! | 22 | 10 bytes of 0 |
//!
//! The status is `EBUSY` if another client has the port, `EPROTONOSUPPORT` for another version,
//! `EINVAL` for unknown bits, `EAGAIN` if the server cannot wake clients, `ENOMEM`, or `EMFILE`.
//! With status 0 come three descriptors (`SCM_RIGHTS`): the link, whose *peer* the client is; an
//! eventfd that the client writes to when the server sleeps; an eventfd that the server writes to
//! when the client sleeps. The link is new each time. The client has the port for as long as its
//! socket is open, and when the server closes the socket, or dies, the link is dead: the client
//! connects anew.
//!
//! `include/slipway_port.h` of `host/port` has the same in C.
//!
//! # Sleeping
//! [`sleep`] has the protocol, for rings and for any other word of shared memory, and the argument
//! that no wake-up is lost; `tests/sleep.rs` checks every interleaving with loom. The users of a
//! ring choose how a sleeper is woken (an eventfd).
//!
//! Dependencies: `thiserror` for errors, `rustix` for fallocate(2).

#![allow(unsafe_code)] // copies to and from memory of two processes

pub mod cross;
mod descriptor;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod hello;
pub mod layout;
mod link;
mod outside;
mod ring;
pub mod sleep;

pub use descriptor::{Descriptor, Segmentation};
pub use hello::{Hello, PROTOCOL, Takes, Welcome};
pub use layout::Geometry;
pub use link::Link;
pub use ring::{Broken, Consumer, Producer};
pub use sleep::barrier;
