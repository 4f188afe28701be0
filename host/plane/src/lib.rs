//! The plane: NVMe and network functions on vfio-user sockets, served by reactors, managed over
//! gRPC.
//!
//! The pieces:
//! - [`Plane`] owns the reactors and finds every endpoint by its id.
//! - `disk` opens the disk of a namespace. `endpoint` assembles disks, controller and socket and
//!   hands the result to a reactor, which owns it from then on.
//! - `snoop` has an endpoint's controller report where the time of its commands goes.
//! - `disks` holds the named disks, which any number of endpoints share. `attach` changes the disks
//!   of running endpoints, by messages to their controllers.
//! - `balance` assigns each endpoint to a reactor, or to several if its controller has lanes, and
//!   moves it if its reactor has too much to do.
//! - `switches` holds the switches. A packet function is a port of a switch, and so is a memory
//!   port (`memory_ports`), at whose socket a program of this host gets its rings.
//! - `ports` changes single ports of switches, and `capture` records the frames of a port.
//! - `service` answers the calls of `slipway-plane-api`. It runs on the control thread and touches
//!   no device: it sends messages to reactors and reads counters.
//! - `keep` leaves the parts of an endpoint with a keeper process, from which the next daemon
//!   continues.
//!
//! Not implemented: a pool of virtual functions, a ledger that outlives the process.
//!
//! Dependencies: `tokio` and `tonic` for the service, `rustix` for epoll, `sha2` for stable UUIDs,
//! `thiserror` for [`Error`], `tracing` for the daemon's log.

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
