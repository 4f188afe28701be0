//! The socket engine: it introduces programs of one node to each other, whose sockets are devices (SG-IOV).
//!
//! A program's library connects to the engine's socket ([`slipway_sgiov_spec`]). The engine gives it a table
//! for its sockets, knows who listens where, makes the memory through which two programs talk
//! (`slipway_ring::cross`), and cleans up behind those who end. It takes no part in any transfer.
//!
//! - [`Engine`]: the socket, and one thread that serves it;
//! - `broker`: who is there and who is connected to whom, without the socket;
//! - `place`: the programs' socket, the administrator's, and the lock; `accounts`: whom what the engine holds counts against;
//! - `peer`, `namespace`: tenants are network namespaces, and the kernel says who is in which;
//! - [`Policy`]: who may reach whom across them; [`remote`]: streams to other nodes, by
//!   [`Carrier`], which `slipway_link` is behind;
//! - `keeper`: eventfds of connections beyond what one table of descriptors holds;
//! - `guests` (a feature): guests' socket functions, and streams with a guest at one end; `ways`: both kinds of carriers
//!   side by side;
//! - [`guest`]: what this engine is in a guest, whose streams to other machines go through such a function;
//! - `table`: a family's memory from the engine's side; `wire`: messages.
//!
//! # Hostile programs
//! Whoever may open the socket is served, and nobody is believed: messages have one length each and are
//! decoded whole or not at all; a process that does not keep to the protocol is hung up on; nothing waits for
//! a client, and one that does not take its replies goes; each client has a few requests done a turn. What
//! a process holds is what its connection was given, and ends with the connection. A family's table and the
//! arenas that it shares are its claims about its own streams; no offset in them is used unchecked. No message
//! names a tenant: it is the network namespace of the process that connected, by its pidfd.
//!
//! # Not here
//! Links to other nodes (`slipway_link`); what a guest's function looks like to the guest (`slipway_sgiov_function`).
//!
//! Dependencies: `rustix` (sockets, epoll, memfd), `libc` (socket options and ioctls that `rustix` has
//! not), `serde` with `serde_json` (reports) and `toml` (policy), `ipnet` (networks of the policy), `thiserror`,
//! `tracing` (the log).
#![allow(unsafe_code)] // socket options and ioctls

#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;

mod accounts;
mod address;
mod ask;
mod broker;
#[cfg(feature = "links")]
mod carrier;
mod function;
pub mod guest;
#[cfg(feature = "guests")]
mod guests;
mod keeper;
mod log;
mod namespace;
mod peer;
mod place;
mod policy;
mod reload;
pub mod remote;
mod sealed;
mod server;
mod slab;
mod table;
mod ways;
mod wire;

pub use accounts::{AllLimits, Limits};
pub use ask::{is_served, raise_descriptor_limit, reload, report, serve_function};
pub use broker::{ConnectionReport, FamilyReport, ListenerReport, Reloads, Report, TenantReport};
#[cfg(feature = "links")]
pub use carrier::{Carrier, CarrierError};
pub use function::{Function, Memory};
#[cfg(feature = "guests")]
pub use guests::GuestReport;
pub use keeper::ends_within;
pub use place::{SHARED, administration, folder};
pub use policy::{Policy, PolicyError, Tenant};
pub use reload::{Reload, Renewal};
pub use server::{Engine, Error, Settings, Stop};
#[cfg(feature = "links")]
pub use slipway_link::{
    ExecutorCapacity, ResourceShare, Settings as LinkSettings, SharesView, TenantShare,
};
