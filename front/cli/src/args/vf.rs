//! Arguments of `slipway vf` and `slipway device-plugin`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

use super::AlwaysJson;
use super::disk::DiskArg;
use crate::pci::parse_address;
use crate::size::{parse_bit_rate, parse_size, parse_vlan};

#[derive(Debug, Subcommand)]
pub enum VfCommand {
    /// Make a pool of virtual functions, and wait until they are ready. The pool is there until it
    /// is removed, also after the daemon's end
    Create(Box<VfCreateArgs>),
    /// List pools
    Ls {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Print all that is known of pools and their functions, as JSON
    Inspect {
        /// Names of pools
        #[arg(required = true)]
        pools: Vec<String>,
        #[command(flatten)]
        json: AlwaysJson,
    },
    /// Give an owner a function that is ready, and print its number and its socket
    Take {
        /// Name of the pool
        pool: String,
        /// Owner, as KIND:ID; one owner has one function of a pool. Functions of an owner
        /// process:PID-STARTTIME (field 22 of /proc/PID/stat) return when the daemon starts and the
        /// process is gone
        #[arg(long, value_name = "KIND:ID")]
        owner: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Take a function back from its owner: its client is disconnected, and it is reset and emptied
    Return {
        /// Name of the pool
        pool: String,
        /// Owner, as `take` got it
        #[arg(long, value_name = "KIND:ID")]
        owner: String,
    },
    /// Take back the functions of all owners of a kind but these, whatever the pool: the others are
    /// gone
    Reconcile {
        /// Kind of owners, as "sandbox"
        #[arg(long, value_name = "KIND")]
        kind: String,
        /// Ids of owners that live
        ids: Vec<String>,
    },
    /// Close functions as soon as nobody has them
    Drain(VfNumberArgs),
    /// End a drain, and try functions that failed again at once
    Resume(VfNumberArgs),
    /// Reset a devset as a whole, if nobody has a function of it
    Reset {
        /// Name of the pool
        pool: String,
        /// Number of the devset
        #[arg(long, value_name = "N", default_value_t = 0)]
        set: u32,
    },
    /// Close the functions of pools and remove the pools
    Rm {
        /// Names of pools
        #[arg(required = true)]
        pools: Vec<String>,
    },
    /// Move a damaged ledger away and begin an empty one; pools are to be made again
    Rebuild,
}

#[derive(Debug, Args)]
pub struct VfCreateArgs {
    /// Name of the pool: letters, digits, '-' and '_', at most 32
    pub pool: String,
    /// Functions are NVMe controllers with such a disk each: ram:SIZE or overlay:PATH. Each owner
    /// finds it empty
    #[arg(
        long,
        value_name = "DISK",
        required_unless_present_any = ["switch", "pci", "pci_of"],
        conflicts_with_all = ["switch", "pci", "pci_of"]
    )]
    pub disk: Option<DiskArg>,
    /// The most memory of the host that what an owner writes to an overlay takes [default: the
    /// settings' layers_bytes]
    #[arg(long, value_name = "SIZE", requires = "disk", value_parser = parse_size)]
    pub layers: Option<u64>,
    /// Functions are network interfaces on ports of this switch
    #[arg(long, value_name = "SWITCH", conflicts_with_all = ["pci", "pci_of"])]
    pub switch: Option<String>,
    /// Bytes in a packet of a network interface [default: 1500]
    #[arg(long, value_name = "BYTES", requires = "switch")]
    pub mtu: Option<u32>,
    /// Functions are these virtual functions of hardware, by their PCI addresses. Each leaves its
    /// driver until the pool is removed
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',', value_parser = parse_address,
          conflicts_with = "pci_of", group = "hardware")]
    pub pci: Vec<String>,
    /// Functions are all virtual functions of the physical function at this PCI address, which
    /// exist already (sriov_numvfs)
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address, group = "hardware")]
    pub pci_of: Option<String>,
    /// The device tags the frames of each function with this VLAN, 1 to 4094, and gives it those of
    /// that VLAN alone, untagged: by the physical function, until the pool is removed [default: as
    /// it is]
    #[arg(long, value_name = "VLAN", value_parser = parse_vlan, requires = "hardware")]
    pub vlan: Option<u32>,
    /// Most that each function sends in a second, as 100Mbit, rounded down to whole megabits: by
    /// the physical function, until the pool is removed [default: as it is]
    #[arg(long, value_name = "RATE", value_parser = parse_bit_rate, requires = "hardware")]
    pub max_rate: Option<u64>,
    /// Functions, 1 to 1024; of hardware, as many as there are
    #[arg(long, value_name = "N", default_value_t = 8, conflicts_with_all = ["pci", "pci_of"],
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub count: u32,
    /// Functions that are reset together where one alone cannot be [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub set_size: Option<u32>,
    /// Only this user may connect, as UID or UID:GID [default: root]
    #[arg(long, value_name = "UID[:GID]")]
    pub user: Option<String>,
}

#[derive(Debug, Args)]
pub struct VfNumberArgs {
    /// Name of the pool
    pub pool: String,
    /// Number of the function [default: all]
    #[arg(long, value_name = "N")]
    pub vf: Option<u32>,
}

#[derive(Debug, Args)]
pub struct DevicePluginArgs {
    /// Names of pools, and "sockets" for the socket functions of the settings' pod_sockets
    /// [default: all, those that are made later too]
    pub pools: Vec<String>,
    /// Kubelet's directory for device plugins
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet/device-plugins",
          value_hint = ValueHint::DirPath)]
    pub kubelet: PathBuf,
    /// Print what would be advertised now, and end
    #[arg(long)]
    pub show: bool,
    /// With --show: as JSON
    #[arg(long, requires = "show")]
    pub json: bool,
}
