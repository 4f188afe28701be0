//! The plane: NVMe functions on vfio-user sockets, served by reactors, managed over gRPC.
//!
//! How the pieces meet:
//! - [`Plane`] owns the reactors and knows every endpoint by its id;
//! - `disk` opens what a namespace is connected to, `endpoint` puts disks, controller and socket
//!   together and hands the result to a reactor, which owns it from then on;
//! - `snoop` has an endpoint's controller tell where the time of its commands goes;
//! - `disks` has the named disks, which any number of endpoints share; `attach` changes what
//!   endpoints have while they run, by messages to their controllers;
//! - `balance` gives each endpoint a reactor, or several if its controller has lanes, and another one
//!   when that has too much to do;
//! - `switches` has the switches; a packet function is a port of one of them, and so is a memory port
//!   (`memory_ports`), at whose socket a program of this host gets its rings;
//! - `ports` changes single ports of them, and `capture` tells what passes one;
//! - `service` answers `slipway-plane-api`'s calls. It runs on the control thread and touches no
//!   device: it talks to reactors by message and reads counters.
//!
//! - `keep` leaves what an endpoint consists of with a keeper process, from which the next daemon
//!   goes on.
//!
//! Not here yet: a pool of virtual functions, a ledger that outlives the process.
//!
//! Dependencies: `tokio` and `tonic` for the service, `rustix` for epoll, `sha2` for stable UUIDs, `thiserror`
//! for [`Error`], `tracing` for the daemon's log.

mod attach;
mod balance;
mod capture;
mod disk;
mod disks;
mod endpoint;
mod keep;
mod memory_ports;
mod network;
mod plane;
mod ports;
mod service;
mod settings;
mod snoop;
mod switches;
mod wakes;

pub use endpoint::Error;
pub use plane::{Plane, Settings};
pub use service::Service;
