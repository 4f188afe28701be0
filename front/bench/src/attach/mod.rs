//! Measurements of attachments of virtual functions (VFs): many owners ask at once, in turn with
//! one lock, with a lock for each VF, and with a pool (ABAB, never AABB).
//!
//! The devices are hollow: no hardware is behind them. The scrub is real: it zeroes memory that the
//! last owner wrote to. The function-level reset is a wait of a stated length, since its time is
//! the device's (100 ms by the PCIe specification). The locks, the pool, its ledger and its threads
//! are the real ones.
//!
//! - [`AttachLoad`]: the number of owners, the bytes of a scrub, the wait of a reset;
//! - [`AttachSubject`]: a subject. [`OneLock`] is VFIO's devset before FastIOV, [`VfLocks`] its
//!   locks after FastIOV (section 4.2.1), [`Pooled`] the pool of `slipway-vf-pool`;
//! - [`Measurement::take`](crate::Measurement::take) runs an [`AttachPlan`]; [`AttachReport`] is
//!   everything measured, as JSON; [`attach_table`] and [`attach_plot`] show it.

mod hollow;
mod load;
mod plot;
mod report;
mod subjects;
mod table;

pub use load::AttachLoad;
pub use plot::attach_plot;
pub use report::{AttachMeasured, AttachPlan, AttachReport, AttachSubject};
pub use subjects::{OneLock, Pooled, VfLocks};
pub use table::attach_table;
