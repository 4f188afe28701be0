//! Measurements of memory that is given late: recycled pages beside new ones, in turn (ABAB, never
//! AABB).
//!
//! - [`MemoryLoad`]: memory of a size, in pages of a size, that a sandbox's process takes and
//!   touches, all of it or some pages; or accesses of a device to memory of the pool;
//! - [`MemorySubject`]: a subject. [`Giver`] is a source of a sandbox's memory: the kernel, the
//!   pool, FastIOV's baselines, a template. [`Gated`] is memory that a device accesses;
//! - [`serve_user`] is the sandbox's process: this program again, which only takes memory as a VMM
//!   does and writes to each page;
//! - [`MemoryReport`] is everything measured by a [`MemoryPlan`]; [`memory_table`] shows it.

mod gated;
mod giver;
mod host;
mod load;
mod report;
mod table;
mod template;
mod user;

pub use crate::keeping::Keeping;
pub use gated::{Gate, Gated};
pub use giver::{Giver, Source};
pub use load::{MemoryLoad, Operation, PageSize};
pub use report::{MemoryMeasured, MemoryPlan, MemoryReport, MemorySubject};
pub use table::memory_table;
pub use user::serve as serve_user;
