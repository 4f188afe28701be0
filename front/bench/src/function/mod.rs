//! Bursts of requests to a function that scales up, out or both (RunD-V, figures 16 to 18).
//!
//! - [`FunctionLoad`]: the number of sandboxes that are there before a burst, and of its requests;
//! - [`FunctionWay`], the subject: the function's server with bounds that let it scale both ways,
//!   by new sandboxes alone, or by new replicas in the sandboxes that are there alone. A turn is a
//!   server of its own, `slipway function serve`, and a burst of `slipway function load`;
//! - [`Measurement::take`](crate::Measurement::take) runs a [`FunctionPlan`]; [`FunctionReport`]
//!   is everything measured, as JSON; [`function_table`] and [`function_plot`] show it.

mod load;
mod plot;
mod report;
mod server;
mod subjects;
mod table;

pub use load::FunctionLoad;
pub use plot::function_plot;
pub use report::{FunctionMeasured, FunctionPlan, FunctionReport, FunctionSubject};
pub use server::FunctionSettings;
pub use subjects::{FunctionWay, Scaling};
pub use table::function_table;
