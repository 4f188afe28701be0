//! Density: what a node's sandboxes take of its memory while more and more of them idle, as RunD-V
//! measures it (figures 6, 14 and 15), and what further containers in one of them take.
//!
//! - [`Processes`] are Slipway's processes on the host; [`Taken`] is the memory that they have at a
//!   moment, by [`Rollup`]s of the kernel's, and [`Cpu`] the processor time that they have used;
//! - [`DensityPoint`] is what was measured with a number of sandboxes, or of containers in one;
//!   [`Series`] is all of that, with a [`Quantity`]'s [line](crate::Line) through the points and
//!   the value of that line where nothing was measured, the model's;
//! - [`DensityReport`] is everything measured, as JSON; [`density_table`] and [`density_plot`] show
//!   it; [`compare_density`] compares two.
//!
//! Not here: starting sandboxes, which the caller does.

mod compare;
mod host;
mod plot;
mod report;
mod rollup;
mod series;
mod table;

pub use compare::compare_density;
pub use host::{Cpu, PoolMemory, Processes, Taken, available_bytes, shortage};
pub use plot::density_plot;
pub use report::DensityReport;
pub use rollup::Rollup;
pub use series::{Burst, DensityPoint, MODEL, MODELS, Quantity, Series};
pub use table::density_table;
