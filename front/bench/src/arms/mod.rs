//! Starts of many sandboxes at once in several ways in turn (ABAB, never AABB), as FastIOV
//! compares them (sections 6.2 to 6.4, figures 11 to 14).
//!
//! - [`Arm`] is a way: without a network, with a function that is made when it is needed, with one
//!   of a pool of virtual functions or of hardware, with interfaces of the kernel's, or with one
//!   mechanism switched off, by the order of steps or by a setting of a daemon of its own
//!   ([`Arm::has_own_daemon`]);
//! - [`Point`] is the load: how many sandboxes start at once, and their memory;
//! - [`ArmMeasured`] is the result of a turn: the timelines of the sandboxes that were started
//!   together, and what the processors did meanwhile; [`Singles`] are as many starts one after the
//!   other;
//! - [`Measurement::take`](crate::Measurement::take) runs an [`ArmPlan`]; [`ArmsReport`] is
//!   everything measured, as JSON; [`arms_table`] and [`arms_plot`] show it beside the paper's
//!   values.
//!
//! Not here: starting sandboxes, which the subjects ([`ArmSubject`]) of the caller do.
//!
//! A sandbox's time is from the common request to the end of its last stage: the container runs.
//! Its network comes up beside that, or before ([`ArmExtra::waits`], [`Arm::NoAsync`]).

mod arm;
mod plot;
mod report;
mod table;

pub use arm::Arm;
pub use plot::arms_plot;
pub use report::{
    ArmExtra, ArmMeasured, ArmPlan, ArmSubject, ArmsReport, INTERFACE, Point, RESET, Singles,
};
pub use table::arms_table;
