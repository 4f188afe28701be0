//! Measurements of control groups: from the request for a group to a process inside, with its
//! limits in force (RunD-V, section IV.A and figure 13), in turn (ABAB, never AABB).
//!
//! - [`CgroupLoad`]: the number of groups, and of the threads that ask for them;
//! - [`CgroupWay`]: a way to a group, which is the subject. Each request of [`Way::Create`] makes
//!   the group, sets its limits and moves a process in, as a runtime does without preparation;
//!   [`Way::Pool`] takes a group of Slipway's pool instead of making one, in the order of
//!   arrival. [`Way::CreateFifo`] and [`Way::PoolNoFifo`] show what that order does to each alone.
//!   In [`Way::CreateSelf`] and [`Way::PoolSelf`] the process moves itself, as Slipway's VMMs do.
//!   [`Way::Mkdir`] and [`Way::Take`] are the first step of each alone: what RunD-V's figures of
//!   creation compare;
//! - [`Version`] says where the groups are: [`Joint`] is RunD-V's one hierarchy of all controllers;
//! - [`Measurement::take`](crate::Measurement::take) runs a [`CgroupPlan`]; [`CgroupReport`] is
//!   everything measured, as JSON; [`cgroup_table`] and [`cgroup_plot`] show it.
//!
//! [`idle`] measures what groups cost their host while their processes sleep.
//!
//! The processes that are moved sleep. They are started before the first turn, and are moved back
//! after each, which is not part of a turn. The groups are removed then, too, and the next turn
//! waits for the kernel to release them.

pub mod idle;
mod joint;
mod load;
mod mover;
mod paper;
mod plot;
mod releases;
mod report;
mod sleepers;
mod subjects;
mod table;

pub use joint::Joint;
pub use load::CgroupLoad;
pub use plot::cgroup_plot;
pub use report::{CgroupExtra, CgroupPlan, CgroupReport, CgroupSubject};
pub use sleepers::Sleepers;
pub use subjects::{CgroupMeasured, CgroupWay, Version, Way};
pub use table::{cgroup_differences, cgroup_table};
