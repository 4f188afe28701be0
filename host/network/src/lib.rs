//! Networks of sandboxes: addresses, names, the way out, and published ports.
//!
//! How the pieces meet:
//! - a [`ledger::Network`] is a name, a subnet and a prefix, kept on disk with the leases of its
//!   sandboxes; [`allocate`] decides who gets which address;
//! - [`Networks`] owns them. A network that is in use is *up*: the plane has a switch for it, whose TAP
//!   port is the host's end and carries the gateway's addresses (`host`), a name server listens there
//!   ([`dns`]), and the packet filter has its rules ([`rules`], `nft`);
//! - [`reach`] says where sandboxes get to beyond the host, `forwarding` has the host pass on their packets
//!   and nothing else;
//! - [`publish`] understands what is to be published, `proxy` holds the ports on the host;
//! - [`Service`] is the gRPC interface of all this, `slipway-plane-api`'s `network.proto`. The plane is
//!   reached by its own interface only.
//!
//! Everything outside of the daemon follows from the ledger and can be made again: after a crash the
//! next daemon is told which sandboxes there are ([`Networks::reconcile`]), gives back the rest, and
//! makes the interfaces, rules and sockets that are due.
//!
//! What sandboxes use of the daemon itself (questions, connections, flows) is shared out among them
//! (`shares`), and a name of a sandbox is a name within its network only: one with dots is found below the
//! network's name and nowhere else.
//!
//! Not here: networks across hosts, DHCP (the agent configures its interface), a cache of names,
//! limits of bandwidth, the host's firewall (a packet that another table drops stays dropped).
//!
//! Dependencies: `slipway-netlink` for interfaces and the program `nft` for rules; `ipnet` for
//! subnets; `simple-dns` for the wire format of names (small, no resolver behind it); `arc-swap` for
//! the names in force; `serde` and `serde_json` for the ledger; `rustix` for sockets and random numbers;
//! `tokio` and `tonic` for servers; `thiserror` for [`Error`]; `tracing` for the daemon's log.

pub mod allocate;
pub mod dns;
mod error;
mod forwarding;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod host;
pub mod ledger;
mod mac;
mod networks;
mod nft;
mod proxy;
pub mod publish;
pub mod reach;
pub mod rules;
mod service;
mod shares;
mod sockets;

pub use error::{Error, Result};
pub use forwarding::Alone;
pub use mac::Mac;
pub use networks::{FORWARDING_FILE, Networks, Settings};
pub use service::Service;

/// The network of sandboxes that name none.
pub const DEFAULT_NETWORK: &str = "default";
/// The word for no network at all.
pub const NO_NETWORK: &str = "none";
/// Bytes in a packet unless somebody says otherwise.
pub const DEFAULT_MTU: u32 = 1500;
/// The least that IPv6 works with (RFC 8200, section 5), and the most that the switch carries.
pub const MTU: std::ops::RangeInclusive<u32> = 1280..=9000;
