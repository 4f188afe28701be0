//! Measurements of disks: the same loads on several subjects, in turn.
//!
//! - [`Workload`]: pattern, block size, depth and threads, under one short name;
//! - [`Subject`]: a target of measurements. [`native`] has those that need no VM: a driver of ours
//!   on a vfio-user socket, and the bare queue pair, which no target can beat;
//! - [`Plan`]: loads and rounds. In a round every subject has one turn, so that influences that
//!   drift over minutes (a neighbour on the machine, a clock frequency) affect all of them alike:
//!   ABAB, and never AABB;
//! - [`fio_arguments`] and [`fio_measured`]: fio as the load, on the kernel of a host or a guest;
//!   [`load_command`] and [`load_measured`]: the program `slipway-load`, our user-space driver in a
//!   guest; [`RocksJob`] and [`measure_rocksdb`]: RocksDB as the load, over time;
//! - [`BlockReport`]: everything measured, as JSON; its tables show medians over rounds;
//!   [`BlockComparison`] compares two of them; [`plot`] draws one as bars, [`curves`] over depth
//!   and over time.

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

pub use compare::{BlockComparison, compare_blocks};
pub use curves::curves;
pub use fio::{fio_arguments, fio_arguments_within, fio_measured};
pub use measure::{BlockSubject, Plan, Run, Subject, timed};
pub use plot::plot;
pub use report::{BlockExtra, BlockReport};
pub use rocksdb::{
    RocksJob, RocksLoad, RocksMeasured, RocksPlace, RocksPlan, RocksReport, RocksRun, RocksSubject,
    measure_rocksdb, rocks_measured, rocks_script,
};
pub use slipway_load::{Measured, Pattern, Workload};
pub use table::block_table;
pub use user::{load_command, load_measured};
