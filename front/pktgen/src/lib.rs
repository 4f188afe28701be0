//! A packet generator: what `slipway pktgen` does.
//!
//! How the pieces meet:
//! - a [`Wire`] is where frames go and come from: a memory port, a TAP interface or an interface of the
//!   host;
//! - [`Stream`] makes frames of one run: UDP over IPv4 whose payload says which run, which number, and
//!   when; [`Probe`] reads that back;
//! - [`Sizes`] and [`Pacer`] say how long the next frame is and when it is due;
//! - [`Sequence`] tells from the numbers of what arrived how much is lost, late, or twice there;
//! - [`source`], [`sink`], [`ping`] and [`pong`] are the runs, each of which reports every second and at
//!   its end ([`Figures`]).
//!
//! One thread does all of a run, on whatever processor it is. Latencies are between processes of one host,
//! which have one monotonic clock.
//!
//! Not here: TCP, IPv6, tags, replayed captures, payloads that are verified beyond their first 18 bytes.
//!
//! Dependencies: `anyhow` for errors that are shown and never matched on, `serde` for reports, `rustix`
//! for poll(2).

mod figures;
mod frame;
mod pacer;
mod run;
mod sequence;
mod sizes;
mod wire;

pub use figures::{Figures, Latency};
pub use frame::{LONGEST, Probe, SHORTEST, Stream, Vary};
pub use pacer::{Pacer, parse_rate};
pub use run::{Limits, Plan, ping, pong, sink, source};
pub use sequence::Sequence;
pub use sizes::Sizes;
pub use wire::{MemoryWire, PortWire, Wire};
