//! The packet generator behind `slipway pktgen`.
//!
//! How the pieces meet:
//! - a [`Wire`] sends and receives frames: a memory port, a TAP interface or an interface of the
//!   host;
//! - [`Stream`] makes the frames of one run: UDP over IPv4, with the run, the frame's number and
//!   the time in the payload; [`Probe`] reads the payload back;
//! - [`Sizes`] and [`Pacer`] decide the next frame's length and time;
//! - [`Sequence`] counts lost, late and duplicate frames by their numbers;
//! - [`source`], [`sink`], [`ping`] and [`pong`] are the runs. Each reports every second and at its
//!   end ([`Figures`]).
//!
//! A run uses one thread, on any processor. Latencies are measured between processes of one host,
//! which share a monotonic clock.
//!
//! Not here: TCP, IPv6, VLAN tags, replayed captures, verification of payloads beyond 18 bytes.

mod figures;
mod frame;
mod pacer;
mod received;
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
