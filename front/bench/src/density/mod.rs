//! Density: what a node's sandboxes take of its memory while more and more of them idle, as RunD-V
//! measures it (figures 6, 14 and 15), and what further containers in one of them take.
//!
//! - [`Processes`] are Slipway's processes on the host; [`Taken`] is the memory that they have at a
//!   moment, by [`Rollup`]s of the kernel's, and [`Cpu`] the processor time that they have used;
//! - [`DensityLoad`] is the load: a number of sandboxes or of containers of a pod ([`Unit`]) that
//!   are left alone, or starts beside them;
//! - [`DensityMeasured`] is the result of a turn: what those left alone took ([`Idle`]), and the
//!   times of [`Starts`];
//! - [`Series`] is what a report has about one unit, with a [`Quantity`]'s [line](crate::Line)
//!   through its [`DensityPoint`]s and the value of that line where nothing was measured, the
//!   model's;
//! - [`Measurement::take`](crate::Measurement::take) runs a [`DensityPlan`]; [`DensityReport`] is
//!   everything measured, as JSON; [`density_table`] and [`density_plot`] show it;
//!   [`density_differences`] compares two.
//!
//! Not here: starting sandboxes, which the caller does.

mod host;
mod load;
mod plot;
mod quantity;
mod report;
mod rollup;
mod series;
mod table;

pub use host::{Cpu, PoolMemory, Processes, Taken, available_bytes, shortage};
pub use load::{DensityLoad, Unit};
pub use plot::density_plot;
pub use quantity::Quantity;
pub use report::{
    DensityExtra, DensityMeasured, DensityPlan, DensityReport, DensitySubject, Idle, Starts,
};
pub use rollup::Rollup;
pub use series::{DensityPoint, MODEL, MODELS, Series};
pub use table::{density_differences, density_table};
