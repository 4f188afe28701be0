//! Links between socket engines: streams whose listener is at another node.
//!
//! A program writes into a FIFO that its engine reads. The engine sends the bytes as sealed records
//! over a TCP connection to the other program's engine, which writes them into that program's FIFO.
//! `slipway_sgiov_spec::link` specifies the protocol.
//!
//! # How the pieces meet
//! - [`Settings`]: the name of this engine, and which addresses are at which other engine;
//! - [`Links`]: all connections of an engine. Its owner opens streams ([`Links::open`]), answers
//!   those that other engines ask for ([`Event::Asked`]), attaches the [`End`] of a local FIFO to
//!   each, and reports FIFOs whose program signalled ([`Links::stir`]). `Links` has no thread and
//!   never waits: the owner calls [`Links::turn`] as long as there is work, then [`Links::rest`] or
//!   [`Links::doze`], and sleeps on [`Links::descriptor`] and on the descriptors of programs'
//!   signals;
//! - [`Carrier`]: a task, on a reactor of its own, that owns a `Links` and takes the signals of
//!   families: the data plane of an engine whose owner is the signal plane;
//! - a connection belongs to one other engine and one tenant, and few connections serve all of
//!   their streams: first a handshake (rustls, TLS 1.3, certificates on both sides), then records
//!   that hold frames of many streams.
//!
//! # The path of a byte
//! The sending engine copies a byte from the source FIFO into the record that it fills, seals the
//! record in place and sends it. The receiving engine opens the record in place and copies the byte
//! into the sink FIFO. So each engine has one copy, one pass of AES-GCM and the kernel's TCP for
//! each byte, and copy and cipher find the byte in the cache. A record is as long as there are
//! bytes, up to [`Settings::record`]; short messages of many streams share one.
//!
//! # Flow control
//! The peer of a stream may send [`Settings::window`] bytes at first, and is granted more as the
//! program reads. The window grows, and the FIFO with it, up to [`Settings::fifo`], if the peer has
//! used up the window and the program reads what arrives. A program that does not read stops nobody
//! but its own sender: bytes that arrive for it were granted and have their place, in the FIFO or,
//! while the FIFO is small and cannot grow, in a buffer beside it.
//!
//! # Fairness
//! The scheduler of `slipway_warp::share` chooses the next connection: dominant resource fairness
//! among tenants, by weight. The core's time (sealing and opening, sending and receiving, as
//! measured) is one resource, and so is each way to another engine whose rate the settings say. A
//! connection has a queue entry for each direction, and is served one quantum: what one recv(2)
//! returns, or up to a record of each of its streams that has bytes, in turn, as far as there is
//! room. So many streams get no more than one. All connections of a tenant together keep the
//! tenant's own rate, if it has one. [`Links::shares`] reports the shares.
//!
//! # Sleep
//! Sleeping without missing a signal costs a barrier on every processor. So a stream asks its
//! program once for a signal, and not again before the signal came; and an engine whose last sleeps
//! were short sleeps at most a millisecond and without that barrier ([`Links::doze`]). A connection
//! that receives much wakes the engine only when enough bytes are there or a fifth of a millisecond
//! has passed.
//!
//! # Failures
//! A connection that breaks, or that received nothing for [`Settings::silence_ms`], ends its
//! streams with ECONNRESET. The next [`Links::open`] connects anew; after failures, at most once in
//! an interval that grows up to a second. A record that does not open, an invalid frame, and bytes
//! beyond the credit end the connection; nothing of a record that does not open reaches a program.
//! Log lines are limited to one a second, after a burst of five.
//!
//! Out of scope: who may open what (the owner asks its policy), names of tenants, sockets other
//! than kernel TCP. `MSG_ZEROCOPY` is not used: over loopback and veth the kernel copies all the
//! same.
//!
//! Dependencies: `rustls` with `ring`, which the tree has for registries, for the handshake and the
//! exporter; `ipnet` and `serde` for the settings; `rustix` for sockets and their epoll, `libc` for
//! the one socket option that `rustix` lacks; `tracing` for the log.

mod backoff;
mod carrier;
mod coalescing;
mod connection;
mod error;
mod event;
mod frames;
mod handshake;
mod identity;
mod links;
mod logs;
mod patience;
mod receiver;
mod renewal;
mod sender;
mod settings;
mod shares;
mod socket;
mod stream;

#[cfg(feature = "fuzz")]
pub mod fuzz;

pub use carrier::{Carrier, Command, News, start_carrier};
pub use connection::Report;
pub use error::LinksError;
pub use event::{Ended, Event, StreamId};
pub use identity::{Identity, IdentityError};
pub use links::Links;
pub use renewal::{Renewal, Share};
pub use settings::{Cipher, Peer, Settings, SettingsError};
pub use shares::{ExecutorCapacity, ResourceShare, TenantShare, View as SharesView};
pub use stream::End;
