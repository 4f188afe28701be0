//! Links between socket engines: streams whose listener is at another node.
//!
//! A program's FIFO ends at its engine; what it holds goes as sealed records over a TCP connection to the
//! engine of the other program, and into that one's FIFO. What the engines say to each other is in
//! `slipway_sgiov_spec::link`.
//!
//! # How the pieces meet
//! - [`Settings`]: who this engine is, and which addresses are at which other one;
//! - [`Links`]: all connections of an engine. Its owner opens streams ([`Links::open`]), answers those that
//!   other engines ask for ([`Event::Asked`]), attaches the [`End`] of a local FIFO to each, and says which
//!   FIFO stirred ([`Links::stir`]). No thread, no waiting: the owner calls [`Links::turn`] as long as there is
//!   work, then [`Links::rest`] or [`Links::doze`], and sleeps on [`Links::descriptor`] and on what tells of signals;
//! - [`Carrier`]: a thread that does so, and takes families' signals: the data plane of an engine whose owner is
//!   the signal plane.
//! - a connection belongs to one other engine and one tenant, and few serve all of their streams: handshake
//!   (rustls, TLS 1.3, certificates on both sides), then records in which the frames of many streams lie.
//!
//! # A byte's way
//! Copied from the source FIFO into the record that is being filled, sealed there in place, sent; received,
//! opened in place, copied into the sink FIFO. So an engine has one copy, one pass of AES-GCM and the kernel's
//! TCP for each byte, and the two first meet in the cache. Records are as long as there are bytes, up to
//! [`Settings::record`]; short messages of many streams share one.
//!
//! # Flow
//! A stream's other side may send [`Settings::window`] bytes at first, and is granted more as the program reads.
//! The window of one that has used it up, and whose program reads what comes, grows, and its FIFO with it, up to
//! [`Settings::fifo`]. Whoever does not read stops nobody but its own sender: what comes for it was granted and
//! has its place, in the FIFO or, while that is small and cannot grow, beside it.
//!
//! # Fairness
//! Who is next is said by the scheduler of `slipway_warp::share`: dominant resource fairness among tenants, by
//! weight, with the core's time (sealing and opening, sending and receiving, as measured) as one resource, and
//! each way to another engine as one, where the settings say its rate. A connection has a queue for each
//! direction, and is served one quantum: what one recv(2) gives, or each of its streams that has something, in
//! turn, up to a record, as far as there is room. So many streams are no more than one. A tenant's own rate, where
//! it has one, is kept by all of its connections together. [`Links::shares`] shows who has what.
//!
//! # Sleep
//! To fall asleep surely costs a barrier on every processor, so a stream asks its program once to tell, and not
//! again before that has happened; and an engine that is woken soon, as its last sleeps say, sleeps for a
//! millisecond at most without the barrier ([`Links::doze`]). A connection that much comes from does not wake it
//! before there is enough, or a fifth of a millisecond has passed.
//!
//! # When something is wrong
//! A connection that breaks, or from which nothing was heard for [`Settings::silence_ms`], ends its streams
//! with ECONNRESET; the next [`Links::open`] connects anew, at most once in a growing time up to a second while that
//! fails. A record that does not open, a frame that cannot be, and bytes beyond the credit end the connection;
//! nothing of such a record reaches a program. Log lines are limited to a few a second.
//!
//! Not here: who may open what (the owner asks its policy), names of tenants, sockets other than kernel TCP.
//! `MSG_ZEROCOPY` is not used: over loopback and veth the kernel copies all the same.
//!
//! Dependencies: `rustls` with `ring`, which the tree has for registries, for the handshake and the exporter;
//! `ipnet` and `serde` for the settings; `rustix` for sockets and epoll, `libc` for the one option that it has not;
//! `tracing` for the log.

mod backoff;
mod carrier;
mod coalescing;
mod connection;
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
mod stream;

#[cfg(feature = "fuzz")]
pub mod fuzz;

pub use carrier::{Carrier, Command, News};
pub use connection::Report;
pub use identity::{Identity, IdentityError};
pub use links::{Ended, Event, Links, LinksError, StreamId};
pub use renewal::{Renewal, Share};
pub use settings::{Cipher, Peer, Settings, SettingsError};
pub use shares::{ExecutorCapacity, ResourceShare, TenantShare, View as SharesView};
pub use stream::End;
