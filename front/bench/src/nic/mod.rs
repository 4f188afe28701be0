//! Measurements of guests' network interfaces: the same traffic through several kinds of interface,
//! in turn (ABAB, never AABB), as *Speeding Up Packet I/O in Virtual Machines* compares them.
//!
//! - [`NicLoad`]: the data, its two ends, CPUs of a guest, the offered rate;
//! - [`send`] and [`receive`] are the two ends, on ordinary sockets;
//! - [`NicSubject`]: a subject; its caller has the guests;
//! - [`Measurement::take`](crate::Measurement::take) runs a [`NicPlan`]; [`NicReport`] is
//!   everything measured, as JSON; [`nic_table`] and [`nic_plot`] show it beside the paper's
//!   figures ([`paper`]).

mod paper;
mod plot;
mod report;
mod table;

pub use paper::{PaperFigure, paper};
pub use plot::nic_plot;
pub use report::{NicFigures, NicMeasured, NicPlan, NicReport, NicSubject, NicWork};
pub use slipway_load::Times;
pub use slipway_load::nic::{Counted, Ends, NicLoad, Traffic, receive, send};
pub use table::nic_table;
