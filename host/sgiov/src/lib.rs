//! The socket engine: it introduces programs of one node to each other, whose sockets are devices
//! (SG-IOV).
//!
//! A program's library connects to the engine's socket ([`slipway_sgiov_spec`]). The engine gives
//! the program a table for its sockets, knows which programs listen at which addresses, makes the
//! memory through which two programs talk (`slipway_ring::cross`), and cleans up after programs
//! that end. Between two programs of the node it takes no part in any transfer. Of a stream to
//! another node or to a guest the engine itself moves the bytes ([`NodeCarrier`], `guests`).
//!
//! - [`Engine`]: the socket, and one thread that serves it;
//! - `broker`: the programs and their connections, without the socket;
//! - `place`: the programs' socket, the administrator's socket, and the lock; `doors`: connections
//!   that are accepted there; `idle`: the end of an engine that nobody needs;
//! - `accounts`: the accounts that everything the engine holds counts against;
//! - `peer`, `namespace`: tenants are network namespaces, and the kernel says which process is in
//!   which;
//! - [`Policy`]: which tenants may reach each other; [`remote`]: streams to other nodes, by
//!   [`NodeCarrier`], which uses `slipway_link`;
//! - `eventfds`: eventfds of connections beyond what one table of descriptors holds;
//! - `guests` (a feature): guests' socket functions, and streams with a guest at one end;
//! - `carriers`: the carriers to other nodes and to guests side by side;
//! - [`guest`]: the engine inside a guest, where streams to other machines go through the guest's
//!   socket function;
//! - `table`: a family's table from the engine's side; `wire`: messages.
//!
//! # Hostile programs
//! The engine serves every process that may open its socket, and trusts none. Each message has one
//! length and is decoded whole or not at all. A process that violates the protocol is disconnected.
//! The engine never waits for a client, disconnects a client that does not take its replies, and
//! carries out a few requests of each client per turn. A process holds what its connection was
//! given, and loses it with the connection. A family's table and the arenas that it shares are its
//! claims about its own streams; the engine checks every offset in them before use. No message
//! names a tenant: the tenant is the network namespace of the process that connected, which the
//! engine finds by the process's pidfd.
//!
//! # Not here
//! Links to other nodes (`slipway_link`); the device that a guest sees as its socket function
//! (`slipway_sgiov_function`).
//!
//! Dependencies: `rustix` (sockets, epoll, memfd), `libc` (socket options and ioctls that `rustix`
//! lacks), `serde` with `serde_json` (reports) and `toml` (policy), `ipnet` (networks of the
//! policy), `thiserror`, `tracing` (the log).
#![allow(unsafe_code)] // socket options and ioctls

#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;

mod accounts;
mod address;
mod ask;
mod broker;
mod carriers;
mod doors;
mod error;
mod eventfds;
mod function;
pub mod guest;
#[cfg(feature = "guests")]
mod guests;
mod idle;
mod log;
mod namespace;
#[cfg(feature = "links")]
mod node_carrier;
mod peer;
mod place;
mod policy;
mod ports;
mod reload;
pub mod remote;
mod sealed;
mod server;
mod slab;
mod table;
mod wire;

pub use accounts::{AllLimits, Limits};
pub use ask::{is_served, raise_descriptor_limit, reload, report, serve_function};
pub use broker::{ConnectionReport, FamilyReport, ListenerReport, Reloads, Report, TenantReport};
pub use error::Error;
pub use eventfds::ends_within;
pub use function::{Function, Memory};
#[cfg(feature = "guests")]
pub use guests::GuestReport;
#[cfg(feature = "links")]
pub use node_carrier::{CarrierError, NodeCarrier};
pub use place::{SHARED, administration, folder};
pub use policy::{Policy, PolicyError, Tenant};
pub use reload::{Reload, Renewal};
pub use server::{Engine, Settings, Stop};
#[cfg(feature = "links")]
pub use slipway_link::{
    ExecutorCapacity, ResourceShare, Settings as LinkSettings, SharesView, TenantShare,
};
