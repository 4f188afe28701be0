//! Measurements of fair shares: tenants that always have something to send, on executors of set
//! rates.
//!
//! The scheduler, the pipes and the bytes are the engine's own ([`slipway_warp`]). Executors are
//! simulated on a core that really copies, checksums and seals, and end each job when hardware of
//! their rate would. Time is real, and every byte that arrives is checked.
//!
//! - [`Mix`]: executors and tenants; [`Mix::talk`] is the example of SG-IOV's slides,
//!   [`Mix::random`] makes others;
//! - [`Executors`], the subject, runs the example, random mixes, and mixes with a tenant that
//!   floods (a [`DrfLoad`]); [`DrfReport`] has each tenant's rate beside that by the scheduler's
//!   own formula and by an independent script;
//! - [`drf_table`] and [`drf_plot`] show the report.

mod engine;
mod mix;
mod plot;
mod report;
mod script;
mod table;

pub use mix::{DrfExecutor, DrfTenant, Mix, Work};
pub use plot::drf_plot;
pub use report::{DrfCase, DrfLoad, DrfMeasured, DrfPlan, DrfReport, DrfSubject, Executors};
pub use table::drf_table;
