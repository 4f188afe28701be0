//! Arguments of `slipway endpoint` and `slipway disk`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};

use super::AlwaysJson;
use super::disk::DiskArg;
use crate::size::{parse_block_size, parse_duration, parse_size};

#[derive(Debug, Subcommand)]
pub enum EndpointCommand {
    /// Serve an NVMe controller on a vfio-user socket, until it is removed
    Create(EndpointArgs),
    /// List endpoints, those of sandboxes included
    Ls {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Give an endpoint, or a sandbox, one more disk while it runs
    Attach {
        /// Endpoint by its id, or sandbox by its name, id, or the beginning of its id
        #[arg(value_name = "ENDPOINT|SANDBOX")]
        endpoint: String,
        /// Name of a disk, with ":ro" behind it to refuse writes; or a disk of its own, as --disk
        /// of `endpoint create` takes it
        #[arg(value_name = "DISK")]
        disk: DiskArg,
        /// Number of the namespace [default: the lowest that is free]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
        nsid: Option<u32>,
    },
    /// Limit an endpoint's I/O from now on; without options, lift its limits
    Limit {
        /// Endpoint by its id, or sandbox by its name, id, or the beginning of its id
        #[arg(value_name = "ENDPOINT|SANDBOX")]
        endpoint: String,
        #[command(flatten)]
        limits: LimitArgs,
    },
    /// Take a disk away from an endpoint; what it is working on ends first
    Detach {
        /// Endpoint by its id, or sandbox by its name, id, or the beginning of its id
        #[arg(value_name = "ENDPOINT|SANDBOX")]
        endpoint: String,
        /// Name of a disk, or number of a namespace
        #[arg(value_name = "DISK")]
        disk: String,
    },
    /// Disconnect clients and remove endpoints; that of a sandbox goes with the sandbox
    Rm {
        /// Ids of endpoints
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Print all that is known of endpoints, as JSON
    Inspect {
        /// Endpoints by their ids, or sandboxes by their names, ids, or the beginnings of ids
        #[arg(required = true, value_name = "ENDPOINT|SANDBOX")]
        endpoints: Vec<String>,
        #[command(flatten)]
        json: AlwaysJson,
    },
}

#[derive(Debug, Args)]
pub struct LimitArgs {
    /// Commands per second
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub iops: Option<u64>,
    /// Commands that may come at once after a pause [default: a tenth of a second's]
    #[arg(long, value_name = "N", requires = "iops",
          value_parser = clap::value_parser!(u64).range(1..))]
    pub iops_burst: Option<u64>,
    /// Bytes per second, as 100M
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub bandwidth: Option<u64>,
    /// Bytes that may come at once after a pause [default: a tenth of a second's]
    #[arg(long, value_name = "SIZE", requires = "bandwidth", value_parser = parse_size)]
    pub bandwidth_burst: Option<u64>,
}

#[derive(Debug, Args)]
pub struct EndpointArgs {
    /// Id of the endpoint
    pub id: String,
    /// Path of the socket; SPDK's initiator wants DIR/cntrl
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub socket: PathBuf,
    /// Disks, in the order of their namespaces: ram:SIZE, null:SIZE, file:PATH[:ro|:pin] (a file, a
    /// block device, or an NVMe namespace by passthrough: /dev/ngXnY; with ":pin" the client's
    /// memory that data is read into or written from is pinned, which spares the kernel time for
    /// each command), overlay:PATH (volatile copy-on-write), or disk:NAME[:ro] (one that `disk
    /// create` made). More can be attached later
    #[arg(long, value_name = "DISK")]
    pub disk: Vec<DiskArg>,
    /// Bytes of a logical block of these disks, 512 or 4096 [default: 512]
    #[arg(long, value_name = "BYTES", value_parser = parse_block_size)]
    pub block_size: Option<u32>,
    /// Only this user may connect, as UID or UID:GID [default: root]
    #[arg(long, value_name = "UID[:GID]")]
    pub owner: Option<String>,
    /// Doorbells in a page that clients map, for user-space drivers; without it they are messages
    #[arg(long)]
    pub mapped_doorbells: bool,
    /// Longest time between two looks at mapped doorbells while nobody uses them: the first command
    /// after a pause waits for up to as long, and a shorter one takes more CPU [default: 20ms]
    #[arg(long, value_name = "TIME", value_parser = parse_duration, requires = "mapped_doorbells")]
    pub sweep_period: Option<Duration>,
    /// Threads of the daemon (`reactors` in its settings) that the controller's I/O queues are
    /// spread over. Worth it for a client that keeps several queues busy. Disks: not overlays. At
    /// most 16 where endpoints outlive the daemon (`keeper`)
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    pub lanes: u32,
    #[command(flatten)]
    pub limits: LimitArgs,
}

#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Make a disk that endpoints can share: each has it under the same names, and none is in
    /// another's way. Who writes at the same time as others needs a file system made for that
    Create {
        /// Name: letters, digits, '-', '_' and '.', not digits alone
        name: String,
        /// ram:SIZE, null:SIZE, or file:PATH[:ro|:pin] (a regular file or a block device)
        #[arg(value_name = "DISK")]
        disk: DiskArg,
        /// Bytes of a logical block, 512 or 4096 [default: 512]
        #[arg(long, value_name = "BYTES", value_parser = parse_block_size)]
        block_size: Option<u32>,
    },
    /// List named disks and who has them
    Ls {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Change a disk's size under those who have it; their guests are told
    Resize {
        /// Name of the disk
        name: String,
        /// As 512M or 2G; without it, the size that its file or device has by now
        #[arg(value_parser = parse_size)]
        size: Option<u64>,
        /// Allow a smaller size: what lies behind it is lost
        #[arg(long)]
        shrink: bool,
    },
    /// Remove disks that no endpoint has; files stay
    Rm {
        /// Names
        #[arg(required = true)]
        names: Vec<String>,
    },
}
