//! Measurements of disks: the same loads on several subjects, in turn.
//!
//! - [`Workload`]: pattern, block size, depth and threads, under one short name;
//! - [`Subject`]: what is measured. [`native`] has those that need no VM: a driver of ours on a
//!   vfio-user socket, and the bare queue pair that no target can beat;
//! - [`measure`]: runs a [`Plan`]. In a round every subject has one turn, so that what drifts over
//!   minutes (a neighbour on the machine, a clock frequency) meets all of them alike: ABAB, and
//!   never AABB;
//! - [`fio_arguments`] and [`fio_measured`]: fio as the load, where the subject is a host's or a
//!   guest's kernel; [`load_command`] and [`load_measured`]: the program `slipway-load`, our user-space
//!   driver in a guest; [`RocksJob`] and [`measure_rocksdb`]: RocksDB as the load, over time;
//! - [`BlockReport`]: everything measured, as JSON; its tables show medians over rounds;
//!   [`BlockComparison`] sets two of them side by side; [`plot`] draws one as bars, [`curves`] over
//!   depth and over time.

mod compare;
mod curves;
mod fio;
mod measure;
pub mod native;
mod plot;
mod report;
mod rocksdb;
mod table;
mod user;
mod workload;

pub use compare::{BlockComparison, compare_blocks};
pub use curves::curves;
pub use fio::{fio_arguments, fio_measured};
pub use measure::{Measured, Plan, Subject, Turn, measure};
pub use plot::plot;
pub use report::{BlockReport, Described, Figures, Run};
pub use rocksdb::{
    RocksJob, RocksLoad, RocksMeasured, RocksPlace, RocksPlan, RocksReport, RocksRun, RocksSubject,
    measure_rocksdb, rocks_measured, rocks_script,
};
pub use table::block_table;
pub use user::{load_command, load_measured};
pub use workload::{Pattern, Workload};
