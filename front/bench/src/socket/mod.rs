//! Measurements of sockets: the same loads over several ways from one program to another, in turn (ABAB,
//! never AABB).
//!
//! - [`SocketLoad`]: what is sent, in messages of what size, over how many sockets;
//! - [`Way`]: what is measured. All have the same two programs ([`peer`]), each on a processor of its own; what
//!   differs is where they are ([`Net`]), whether they have TLS, and which library is loaded before them;
//! - [`measure_sockets`] runs a [`SocketPlan`]; [`SocketReport`] is everything measured, as JSON, with
//!   medians over the rounds; [`socket_table`] and [`socket_plot`] show it; [`compare_sockets`] sets two
//!   side by side.
//!
//! Between two engines what they do to a byte is also measured alone, part by part ([`Parts`]).
//!
//! [`App`]s are programs as they are, over the same ways: iperf3, wrk and nginx, Redis.
//!
//! Fair shares are measured by [`drf`], without programs.
//!
//! Processor time is that of both programs, of the engines where there are any, and of the kernel's threads for
//! what it does between them. It is read from outside, from the clocks that the kernel keeps.
//!
//! TLS is the system's OpenSSL, loaded at run time ([`peer::OpenSsl`]): it is what is measured against, so
//! it should be the library itself, and nothing of Slipway links to it.

mod apps;
mod board;
mod compare;
mod cost;
pub mod drf;
mod engine;
mod links;
mod load;
mod net;
mod parts;
pub mod peer;
mod plot;
mod report;
mod table;
mod turn;
mod way;

pub use apps::{App, AppRun};
pub use compare::compare_sockets;
pub use cost::Cost;
pub use engine::{Build, Engines};
pub use load::{BadSocketLoad, Pace, SocketLoad, Traffic};
pub use net::Net;
pub use parts::{Parts, PartsRun};
pub use plot::socket_plot;
pub use report::{
    SocketFigures, SocketMeasured, SocketPlan, SocketReport, SocketRun, SocketTurn, measure_apps,
    measure_sockets,
};
pub use table::socket_table;
pub use way::{Certificate, Way};

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, memfd_create};

/// A file in memory: whatever ends this process, nothing is left of it.
fn memory_file(name: &str) -> Result<File> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC).context("a file in memory")?;
    Ok(file.into())
}

/// Where other processes find a file of this one's, as long as this one lives.
fn path_of(file: &impl AsRawFd) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}
