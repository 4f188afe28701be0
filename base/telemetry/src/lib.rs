//! Time and what is learnt from it: clocks that tests can turn, timelines of stages, traces.
//!
//! - [`Clock`]: the time a device or a decorator sees; [`ManualClock`] is turned by hand, so that
//!   device tests run in virtual time.
//! - [`stamp_clock`]: the cheapest precise clock, for stamps on a data path; [`monotonic_ns`]: the
//!   axis that all processes share; [`realtime_ns`]: the wall clock.
//! - [`Timeline`]: the stages of one start, on a shared time axis.
//! - [`Histogram`]: counts of values by size, for percentiles.
//! - [`Durations`]: counts of durations in a few fixed buckets, for monitoring.
//! - [`trace`]: spans of calls and their parts, for OpenTelemetry.
//!
//! Dependencies: `serde`, since timelines and histograms are printed and kept as JSON; `rustix`
//! for the kernel's clock and random ids.
#![allow(unsafe_code)] // reading the processor's time stamp counter

mod clock;
mod durations;
mod histogram;
mod timeline;
pub mod trace;
mod tsc;

pub use clock::{Clock, ManualClock, MonotonicClock, monotonic_ns, realtime_ns};
pub use durations::{BOUNDS_NS, Durations};
pub use histogram::Histogram;
pub use timeline::{Stage, Timeline};
pub use tsc::stamp_clock;
