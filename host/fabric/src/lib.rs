//! The switches of a node: their table, their ports, and what is done to ports while frames pass.
//!
//! The pieces:
//! - [`Fabric`] owns the table of switches. Each switch is a task of a reactor; its ports are
//!   network functions, TAP interfaces, interfaces in network namespaces and memory ports.
//! - `memory_ports`: a port for a program of this host, which gets its rings at a socket.
//! - `uplink`: a port at an interface in a network namespace of the host; `taps`: ports at TAP
//!   interfaces that the fabric makes there, with `tap_settings`, each served by a thread of its
//!   own.
//! - `ports` finds single ports by name and impairs them, `settings` changes their settings, and
//!   `capture` records their frames. `inspect` has views of the switches. `port` converts a port
//!   for the interface, and `rate` a rate.
//!
//! All of this runs on the control thread and on threads of its own, and sends messages to the
//! reactors. Only the threads of `taps` touch frames.
//!
//! Not here: the functions behind ports (`slipway-virtio-net`), addresses and names of networks
//! (`slipway-network`).
//!
//! Dependencies: `slipway-netlink` for the settings of interfaces, `rustix` for the sockets of
//! memory ports, `tokio` for the queues of captures, `tonic` for their errors, `thiserror` for
//! [`Error`], `tracing` for the daemon's log.

mod capture;
mod error;
mod fabric;
mod inspect;
mod memory_ports;
mod port;
mod ports;
mod rate;
mod settings;
mod switch;
mod tap_settings;
mod taps;
mod uplink;

pub use error::Error;
pub use fabric::Fabric;
pub use inspect::InspectedSwitch;
pub use rate::rate;
pub use settings::{link, vlans};
pub use switch::SwitchHandle;
