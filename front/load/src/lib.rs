//! Loads that run in guests as well as on the host, and the program `slipway-load`.
//!
//! `slipway bench` copies the program into its guests. So this crate has what both ends of a
//! measurement need, and no more: the program is linked statically, by itself.
//!
//! - [`Workload`] is a load on a disk, and [`Measured`] its result. [`native`] runs one by a small
//!   NVMe driver of ours: [`native::load_function`] does so on a PCI function of the machine that
//!   it runs in, once [`native::take`] has taken the function from the kernel. Other ways to reach
//!   a controller use the same parts from `slipway-bench`: [`native::controller`],
//!   [`native::bell`] and [`native::load`];
//! - [`nic`] has a load on a network interface, and its two ends;
//! - [`Times`] are the times of one turn; [`Waiting`] is the time for which a thread of a load
//!   waits for its processor;
//! - [`saved_as_typed!`] makes serde save a load as the text that people type.
//!
//! Not here: subjects, rounds, reports, tables and pictures (`slipway-bench`); fio's and RocksDB's
//! loads, whose programs are in the guest's image.
//!
//! Dependencies: `slipway-nvme` for its driver (feature `driver`) and `slipway-nvme-spec` for
//! commands, `slipway-ram` for the memory that a controller reaches and for its registers,
//! `slipway-telemetry` for clocks and histograms; `rustix` for processors, huge pages and device
//! numbers, `serde` and `serde_json` for results, which a guest prints, `anyhow` for errors that
//! are shown and never matched on. No runtime, no client of vfio-user: a guest has its functions.
//!
//! `unsafe`: in a test only, which makes a network namespace.

mod loads;
mod measured;
pub mod native;
pub mod nic;
mod times;
mod waiting;
mod workload;

pub use measured::Measured;
pub use times::Times;
pub use waiting::Waiting;
pub use workload::{Pattern, Workload, block_name};
