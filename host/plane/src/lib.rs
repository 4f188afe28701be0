//! The plane: NVMe and network functions on vfio-user sockets, served by reactors, managed over
//! gRPC.
//!
//! The pieces:
//! - [`Plane`] owns the reactors and finds every endpoint by its id.
//! - [`slipway_disks`] has the disks: `namespace` asks it for that of a namespace, and `controller`
//!   makes an NVMe controller of them. `endpoint` assembles function and socket and hands the
//!   result to a reactor, which owns it from then on. A hardware function (`slipway-vfio`)
//!   has a thread of its own instead.
//! - `live` gathers `views` of everything that is there, for people who look for a fault.
//! - `snoop` has an endpoint's controller report where the time of its commands goes.
//! - `attach` changes the disks of running endpoints, by messages to their controllers, and the
//!   named disks, which any number of endpoints share. `copy` copies an overlay to a file.
//! - `balance` assigns each endpoint to a reactor, or to several if its controller has lanes, and
//!   moves it if its reactor has too much to do.
//! - [`Plane::fabric`] holds the switches. A network function (`network`) is a port of a switch.
//! - `service` answers the calls of `slipway-plane-api`. It runs on the control thread and touches
//!   no device: it sends messages to reactors and reads counters.
//! - [`Plane::pool`] has recycled memory for sandboxes. Endpoints know it by its files.
//! - `keep` leaves the parts of an endpoint with a keeper process, from which the next daemon
//!   continues.
//!
//! - [`VirtualFunctions`] are pools of endpoints that are made before anybody asks for one.
//!
//! Dependencies: `tokio` and `tonic` for the service, `rustix` for the daemon's user, `serde` and
//! `serde_json` for views, `sha2` for stable addresses, `prost` for stored descriptions,
//! `thiserror` for [`Error`], `tracing` for the daemon's log.

mod attach;
mod balance;
mod controller;
mod copy;
mod door;
mod endpoint;
mod error;
mod id;
mod keep;
mod live;
mod namespace;
mod network;
mod plane;
mod service;
mod settings;
mod snoop;
mod table;
mod template;
mod vf;
pub mod views;

pub use error::Error;
pub use plane::Plane;
pub use service::Service;
pub use settings::Settings;
pub use vf::{VfError, VirtualFunctions};
