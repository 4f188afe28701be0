//! The papers' experiments: measurements and their presentation.
//!
//! Each benchmark is a module with its loads, subjects, results and tables:
//! - [`block`]: disks, under our own driver, fio and RocksDB;
//! - [`packet`]: the switch;
//! - [`nic`]: guests' network interfaces;
//! - [`socket`]: ways from one program to another;
//! - [`vmm`]: the start of a VMM;
//! - [`memory`]: recycled memory for sandboxes;
//! - [`attach`]: the time until many owners have virtual functions;
//! - [`roots`]: the time until many owners have roots;
//! - [`cgroups`]: the time until a process is in a control group, and what idle groups cost;
//! - [`arms`]: starts of many sandboxes, with functions and without them;
//! - [`density`]: the memory and the processor time of the host that idle sandboxes take;
//! - [`function`]: bursts of requests to a function that scales.
//!
//! They share the model of measurements: a [`Measurement`] takes the turns of [`Subject`]s with
//! loads, and compares [`Figure`]s of the results. A [`Watch`] looks at the machine during each
//! turn, and says why the turn is void if the machine was busy with something else.
//!
//! The stages of a sandbox's start are shown apart, by pure functions of
//! [`slipway_telemetry::Timeline`]s. The caller starts the sandboxes, prints the strings and writes
//! the files.
//! - [`aligned`] moves timelines of a clock onto the time axis of one run;
//! - [`statistics`] computes mean, p50, p99 and share of each stage, as in FastIOV's Table 1;
//!   [`table`] shows them;
//! - [`bars`] and [`svg`] draw one bar for each sandbox on a shared time axis, as in FastIOV's
//!   Figure 5, in the terminal and as a picture;
//! - [`latency_svg`] draws the same kind of bars for the layers of a latency;
//! - [`compare`] tells which stages of two reports ([`arms::ArmsReport`]) differ by more than the
//!   noise.
//!
//! Stages may overlap (the guest brings its NVMe function up while its kernel boots). So the shares
//! of a table may add up to more than 100 %, and both pictures show stages that run at the same
//! time; see [`bars`] and [`svg`].
//!
//! Not here: starting sandboxes and targets, terminals (the caller gives the width and whether to
//! use colour), files.
//!
//! Dependencies: `plotters` writes SVG (its SVG back end only: no fonts, no bitmaps), `serde` and
//! `serde_json` for reports, `anyhow` for errors that are shown and never matched on;
//! `slipway-load` for the loads that run in guests, too; `rustix` for clocks and shared memory,
//! `zerocopy` for queue entries, `slipway-warp` for the work of two socket engines on each byte,
//! `tempfile` for a peer's socket and for a guest's kernel; `kvm-ioctls` and `kvm-bindings` for KVM
//! without a VMM; `slipway-pool` with its wire and `slipway-keeper` for memory of a pool;
//! `slipway-vf-pool` for virtual functions; `slipway-hypervisor` for VMMs as sandboxes have them,
//! which needs `tokio`, and `slipway-vmm` for an address of its machine; `slipway-plane-api` for
//! the functions of such VMs, and for tests the plane itself.
//!
//! `libc` for loads on sockets, whose calls must be the C library's, as any program's are; for the
//! processes that move themselves into control groups; and for the clocks of other processes.
//!
//! `unsafe`: the advice to use huge pages for the floor's disk; peers that end with this process,
//! and network namespaces for them; processes that are forks of this one; for sockets a page shared
//! with their load, epoll, the clocks of other processes, and OpenSSL; a guest's memory; VMMs that
//! end with this process; memory that is touched as a guest does.

pub mod arms;
pub mod attach;
mod bars;
pub mod block;
pub mod cgroups;
mod compare;
mod cpu_time;
mod curves;
pub mod density;
mod duration;
mod environment;
mod figure;
pub mod function;
mod gate;
mod groups;
mod json;
mod keeping;
mod line;
mod loads;
mod measurement;
mod meminfo;
pub mod memory;
pub mod nic;
mod outside;
pub mod packet;
mod palette;
mod panels;
mod presentation;
mod program;
pub mod roots;
mod slices;
pub mod socket;
mod statistics;
mod svg;
mod table;
mod turns;
pub mod vmm;
mod watch;

pub use bars::bars;
pub use compare::{Basis, Comparison, StageComparison, Verdict, compare};
pub use duration::human;
pub use environment::Environment;
pub use figure::{Figure, OverRounds};
pub use json::SavedReport;
pub use line::Line;
pub use measurement::{AnySubject, Measured, Measurement, NoExtra, Plan, Run, Subject};
pub use outside::Own;
pub use program::{BENCH, end_with_this_thread, slipway};
pub use slices::aligned;
pub use slipway_load::Times;
pub use statistics::{StageStatistics, Statistics, percentile, statistics};
pub use svg::{latency_svg, svg};
pub use table::table;
pub use turns::{
    Described, Fault, LeftOut, NOT_TRIED, Subjects, Turn, Turns, fault_lines, take_turns, void_note,
};
pub use watch::{Watch, busy_ns};

#[cfg(test)]
mod pictures;
#[cfg(test)]
mod samples;
