//! Time and what is learnt from it: clocks that tests can turn, timelines of stages.
//!
//! - [`Clock`]: the time a device or a decorator sees; [`ManualClock`] is turned by hand, so that
//!   device tests run in virtual time.
//! - [`Timeline`]: the stages of one start, on a shared time axis.
//!
//! Not here yet: histograms and trace rings.
//!
//! Dependencies: `serde`, since timelines are printed and kept as JSON.

mod clock;
mod timeline;

pub use clock::{Clock, ManualClock, MonotonicClock};
pub use timeline::{Stage, Timeline};
