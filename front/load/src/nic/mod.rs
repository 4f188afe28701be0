//! Loads on network interfaces of guests.
//!
//! - [`NicLoad`]: the data, its two ends, CPUs of a guest, the offered rate;
//! - [`send`] and [`receive`] are the two ends, on ordinary sockets.

mod load;
mod traffic;

pub use load::{Ends, NicLoad, Traffic, parse_count};
pub use traffic::{Counted, receive, send};
