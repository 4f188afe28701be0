//! Fair shares, measured: tenants that always have something to send, on executors of set rates.
//!
//! The scheduler, the pipes and the bytes are the engine's own ([`slipway_warp`]); executors are simulated on top
//! of a core that really copies, checksums and seals, and end each job when hardware of their rate would. Time
//! is the machine's. Every byte that arrives is looked at.
//!
//! - [`Mix`]: executors and tenants; [`Mix::talk`] is the example of SG-IOV's slides, [`Mix::random`] others;
//! - [`measure_drf`] runs the example, random mixes, and mixes in which a tenant floods; [`DrfReport`] has what
//!   each tenant got beside the scheduler's own formula and beside a script that knows nothing of it;
//! - [`drf_table`] and [`drf_plot`] show it.

mod engine;
mod mix;
mod plot;
mod report;
mod script;
mod table;

pub use mix::{DrfExecutor, DrfTenant, Mix, Work};
pub use plot::drf_plot;
pub use report::{DrfCase, DrfPlan, DrfReport, measure_drf};
pub use table::drf_table;
