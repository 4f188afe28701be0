//! Measurements of sockets: the same loads over several ways from one program to another, in turn
//! (ABAB, never AABB).
//!
//! - [`SocketLoad`]: the traffic, the size of messages, and the number of sockets;
//! - [`Way`]: a subject. All ways have the same two programs ([`peer`]), each on a processor of its
//!   own. They differ in the network between the programs ([`Net`]), in the use of TLS, and in the
//!   library that is preloaded;
//! - [`SocketReport`] is everything measured by a [`SocketPlan`]; [`socket_table`] shows it.
//!
//! The work of two linked engines on each byte is also measured alone, part by part ([`Parts`]).
//!
//! [`App`]s are existing programs over the same ways: iperf3, wrk and nginx, Redis, memcached.
//!
//! Fair shares are measured by [`drf`], without programs.
//!
//! Processor time includes both programs, the engines if there are any, and the kernel's threads
//! for work between them. It is read from outside, from the kernel's clocks.
//!
//! TLS is the system's OpenSSL, loaded at run time ([`peer::OpenSsl`]): the comparison should be
//! with the library itself, and nothing of Slipway links to it.

mod apps;
mod board;
mod cost;
pub mod drf;
mod engine;
mod links;
mod load;
mod measured;
mod net;
mod parts;
pub mod peer;
mod report;
mod table;
mod turn;
mod way;

pub use apps::{App, AppRun};
pub use cost::Cost;
pub use engine::{Build, Engines};
pub use load::{Pace, SocketLoad, Traffic};
pub use measured::{Parts, SocketMeasured};
pub use net::Net;
pub use report::{SocketExtra, SocketPlan, SocketReport, SocketSubject, measure_apps};
pub use table::socket_table;
pub use way::{Certificate, Way};

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, memfd_create};

/// Makes a file in memory, which disappears with this process in whatever way that ends.
fn memory_file(name: &str) -> Result<File> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC).context("a file in memory")?;
    Ok(file.into())
}

/// Returns the path by which other processes can open a file of this process, as long as it lives.
fn path_of(file: &impl AsRawFd) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}
