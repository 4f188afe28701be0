//! Networks of sandboxes: addresses, names, the way out, and published ports.
//!
//! How the pieces meet:
//! - a [`ledger::Network`] is a name, a subnet and a prefix, kept on disk with the leases of its
//!   sandboxes; [`allocate`] chooses the addresses;
//! - [`Networks`] owns them. A network that is in use is *up*: the plane has a switch for it, whose
//!   TAP port is the host's end and carries the gateway's addresses (`host`), a name server listens
//!   there ([`dns`]), and the packet filter has its rules ([`rules`], `nft`);
//! - [`reach`] decides which addresses beyond the host sandboxes may reach; `forwarding` makes the
//!   host forward their packets and no others;
//! - [`publish`] parses the ports to publish, `proxy` holds them on the host;
//! - `attachment` is a container's interface in a network and in the ledger, `container` its
//!   settings in the container's network namespace;
//! - `namespace` reads the interface that somebody else made in a network namespace, for a sandbox
//!   that has it in place of one in a network, and keeps the host's kernel off its frames;
//! - `operations` counts what CNI plugins ask for;
//! - [`Service`] is the gRPC interface of all this, `slipway-plane-api`'s `network.proto`. This
//!   crate uses the plane and its pools of functions only through their own interfaces.
//!
//! All state outside of the daemon follows from the ledger and can be made again. After a crash the
//! next daemon is told which sandboxes exist ([`Networks::reconcile`]), frees the leases of all
//! others, and makes the interfaces, rules and sockets that are due.
//!
//! Sandboxes share what they use of the daemon itself (DNS queries, connections, flows) by
//! `shares`. A sandbox's name is a name within its network only: one with dots is found below the
//! network's name and nowhere else.
//!
//! Not implemented: networks across hosts, DHCP (the agent configures its interface), a cache of
//! names, the host's firewall (a packet that another table drops stays dropped). Rates of ports are
//! the switch's (`slipway_switch`); this crate passes on those of attachments.
//!
//! Dependencies: `slipway-netlink` for interfaces, `slipway-netns` for namespaces of others and the
//! program `nft` for rules; `ipnet` for subnets; `simple-dns` for the wire format of names (small,
//! without a resolver); `serde` and `serde_json` for the ledger;
//! `rustix` for sockets and random numbers; `tokio` and `tonic` for servers; `thiserror` for
//! [`Error`]; `tracing` for the daemon's log.

pub mod allocate;
mod attachment;
mod container;
pub mod dns;
mod error;
mod forwarding;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod host;
pub mod ledger;
mod mac;
mod namespace;
mod networks;
mod nft;
mod operations;
mod proxy;
pub mod publish;
pub mod reach;
pub mod rules;
mod service;
mod shares;
mod sockets;

pub use error::{Error, Result};
pub use forwarding::OnlyForSandboxes;
pub use mac::Mac;
pub use networks::{FORWARDING_FILE, Networks, Settings};
pub use service::Service;

/// The network of sandboxes that name no network.
pub const DEFAULT_NETWORK: &str = "default";
/// The name that stands for no network at all.
pub const NO_NETWORK: &str = "none";
/// The MTU of a network in bytes, unless the user says otherwise.
pub const DEFAULT_MTU: u32 = 1500;
/// The range of MTUs: the least that IPv6 works with (RFC 8200, section 5), and the most that the
/// switch carries.
pub const MTU: std::ops::RangeInclusive<u32> = 1280..=9000;
