//! Measurements of the cost of idle control groups to their host (RunD-V, section IV.A2: the
//! scheduler walks over the groups for per-entity load tracking).
//!
//! - [`IdleLoad`]: the number of groups, and how often the process of each is woken;
//! - [`IdleGroups`], the subject: the same processes, all of them in one group, a group for each,
//!   or a group for each without the controller `cpu`, which the scheduler does not know of. What
//!   the processes and their wakes cost is the same for all three, so the difference is that of the
//!   groups;
//! - [`IdleReport`] is everything measured, as JSON; [`idle_table`] shows it.
//!
//! Two things are measured one after the other: the time for which the host's processors are not
//! idle, and the time that a program which never sleeps loses to interrupts and to the scheduler.

mod host;
mod load;
mod report;
mod subjects;
mod table;

pub use load::IdleLoad;
pub use report::{IdlePlan, IdleReport, IdleSubject};
pub use subjects::{Grouping, IdleGroups, IdleMeasured};
pub use table::idle_table;
