//! Arguments about networks: of `slipway network`, and of a sandbox that joins one.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

use super::AlwaysJson;
use crate::size::parse_duration;

#[derive(Clone, Debug, Default, Args)]
pub struct NetworkArgs {
    /// Network that the sandbox joins, or "none". The network "default" is made when it is first
    /// needed; `network create` makes others [default: default, on a host that has nft and
    /// /dev/net/tun]
    #[arg(long, value_name = "NAME|none")]
    pub network: Option<String>,
    /// Have the sandbox have the interface that another program, such as a CNI plugin, made in this
    /// network namespace of the host, with its addresses and routes: "eth0", or the only one
    #[arg(long, visible_alias = "netns", value_name = "PATH", value_hint = ValueHint::FilePath,
        conflicts_with_all = ["network", "publish", "ip", "mac", "mac_at_port", "sockets"])]
    pub network_namespace: Option<PathBuf>,
    /// Have a port of the host lead to one of the container, as 8080:80, 127.0.0.1:8080:80,
    /// 53:53/udp or 8000-8009:8000-8009; with the container's port alone, any that is free
    #[arg(short, long, value_name = "[[ADDRESS:]HOST:]CONTAINER[/udp]")]
    pub publish: Vec<String>,
    /// Address of the sandbox, IPv4 or IPv6 (or both, one after the other) [default: one that is
    /// free]
    #[arg(long, value_name = "ADDRESS")]
    pub ip: Vec<String>,
    /// MAC address of the sandbox's interface [default: made from its IPv4 address]
    #[arg(long, value_name = "ADDRESS")]
    pub mac: Option<String>,
    /// Have the guest of a sandbox that begins with a template (--from) keep the template's MAC
    /// address, and the port on the switch translate it to the sandbox's own
    #[arg(long)]
    pub mac_at_port: bool,
    /// Start the container's process when its network can be used; without this the network comes
    /// up beside it
    #[arg(long)]
    pub wait_network: bool,
    /// Queue pairs of the sandbox's interface, of which a Linux guest uses one for each CPU that it
    /// has [default: one for each CPU that it begins with]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub queues: Option<u32>,
    /// Kind of the sandbox's interface: "e1000" is Intel's 82540EM, for guests whose kernel has its
    /// driver, and "e1000-csb" the same with a communication status block, for drivers that know it
    /// [default: virtio]
    #[arg(long, value_name = "KIND", value_parser = ["virtio", "e1000", "e1000-csb"])]
    pub nic: Option<String>,
    /// The shortest time between two interrupts of an e1000, as 64us, whatever its driver asks for;
    /// at most 16.7ms [default: as the driver wants]
    #[arg(long, value_name = "TIME", value_parser = parse_duration, requires = "nic")]
    pub nic_interval: Option<std::time::Duration>,
    /// Take the sandbox's interface from this pool of virtual functions (`slipway vf create POOL
    /// --switch NETWORK`), which were made before [default: the settings' `vf_pool`, or one is
    /// made]. Of a pool of hardware (--pci), the sandbox has one function beside its other devices:
    /// the block device /dev/slipway/POOL-0, or a further network interface
    #[arg(long, value_name = "POOL", conflicts_with_all = ["network_namespace", "nic", "queues"])]
    pub vf: Option<String>,
    /// Address of the network interface of hardware that the sandbox has of its pool, as
    /// 10.1.0.2/24
    #[arg(long = "vf-address", value_name = "ADDRESS/PREFIX", requires = "vf")]
    pub vf_addresses: Vec<String>,
    /// Make the TCP sockets of the sandbox's containers devices: among sandboxes of its network and
    /// programs of the host that policy lets it reach, bytes go past both kernels, by the node's
    /// socket engine (`slipway socket engine`; SLIPWAY_SOCKET says where it is). A template has
    /// room for them, and each of its forks that asks has its own
    #[arg(long)]
    pub sockets: bool,
}

#[derive(Debug, Subcommand)]
pub enum NetworkCommand {
    /// Make a network; what is left out is chosen, and overlaps nothing that the host has
    Create {
        /// Letters, digits, "-" and "_"
        name: String,
        /// IPv4 subnet, as 10.1.0.0/24
        #[arg(long, value_name = "SUBNET")]
        subnet: Option<String>,
        /// IPv6 subnet, as fd00:1::/64
        #[arg(long, value_name = "SUBNET")]
        ipv6_subnet: Option<String>,
        /// The host's IPv4 address in it [default: the subnet's first]
        #[arg(long, value_name = "ADDRESS")]
        gateway: Option<String>,
        /// Largest packet in bytes [default: 1500]
        #[arg(long, value_name = "BYTES")]
        mtu: Option<u32>,
        /// Nothing leads out of it but to the host's end, and nothing is published
        #[arg(long)]
        internal: bool,
    },
    /// List networks
    Ls {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove networks that no sandbox uses
    Rm {
        /// Names
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Print all that is known of networks, as JSON: their sandboxes with addresses and ports
    Inspect {
        /// Names
        #[arg(required = true)]
        names: Vec<String>,
        #[command(flatten)]
        json: AlwaysJson,
    },
}
