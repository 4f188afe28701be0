//! Time and what is learnt from it: clocks that tests can turn, timelines of stages.
//!
//! - [`Clock`]: the time a device or a decorator sees; [`ManualClock`] is turned by hand, so that
//!   device tests run in virtual time.
//! - [`Timeline`]: the stages of one start, on a shared time axis.
//! - [`Histogram`]: counts of values by size, for percentiles.
//!
//! Not here yet: trace rings.
//!
//! Dependencies: `serde`, since timelines and histograms are printed and kept as JSON.

mod clock;
mod histogram;
mod timeline;

pub use clock::{Clock, ManualClock, MonotonicClock};
pub use histogram::Histogram;
pub use timeline::{Stage, Timeline};
