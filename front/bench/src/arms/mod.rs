//! Starts of many sandboxes at once in several ways in turn (ABAB, never AABB), as FastIOV
//! compares them (section 6.2, figures 11 and 12).
//!
//! - [`Arm`] is a way: without a network, with a function that is made when it is needed, or with
//!   one of a pool of virtual functions;
//! - [`ArmRound`] is a turn: the timelines of the sandboxes that were started together, and what
//!   the processors did meanwhile;
//! - [`ArmsReport`] is everything measured, as JSON, with figures over the rounds; [`arms_table`]
//!   and [`arms_plot`] show it beside the paper's values; [`compare_arms`] compares two.
//!
//! A sandbox's time is from the common request to the end of its last stage: the container runs.
//! Its network comes up beside that, or before ([`ArmsReport::waits`]).

mod compare;
mod plot;
mod report;
mod table;

pub use compare::compare_arms;
pub use plot::arms_plot;
pub use report::{Arm, ArmFigures, ArmRound, ArmsReport};
pub use table::arms_table;
