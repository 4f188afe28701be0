//! Decorators of disks: for tests (faults, delays) and for statistics (traces).

mod delay;
mod fault;
mod trace;

pub use delay::DelayDisk;
pub use fault::{FaultDisk, FaultRule};
pub use trace::{DiskStats, Figures, TraceDisk};
