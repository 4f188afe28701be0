//! The command line as data: parser, help, completions and man pages all come from here.
#![allow(rustdoc::broken_intra_doc_links)] // these comments are help texts, their brackets usage

mod port;
mod socket;

pub use port::{CaptureArgs, Direction, ImpairArgs, TraceArgs};
pub use socket::{SocketCommand, SocketEngineArgs, SocketLsArgs, SocketRunArgs, SocketTopArgs};

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueHint};

use crate::bench::{DiskKind, Doorbells, Named};
use crate::endpoint::DiskArg;
use crate::pktgen::PktgenCommand;
use crate::size::{
    MaxRate, parse_block_size, parse_duration, parse_max_rate, parse_size, parse_vlan,
};
use crate::volume::VolumeArg;

/// Secure containers, each in a microVM of its own, each on its own NVMe function.
#[derive(Debug, Parser)]
#[command(name = "slipway", version, max_term_width = 100, propagate_version = true)]
pub struct Cli {
    #[command(flatten)]
    pub node: NodeArgs,
    #[command(subcommand)]
    pub command: Command,
}

/// Which node's files and daemon are meant.
#[derive(Clone, Debug, Args)]
pub struct NodeArgs {
    /// Settings; drop-ins are read from config.d beside it
    #[arg(long, global = true, value_name = "FILE", env = "SLIPWAY_CONFIG",
          default_value = slipway_runtime::config::CONFIG_FILE, hide_default_value = true,
          value_hint = ValueHint::FilePath, help_heading = "Node")]
    pub config: PathBuf,
    /// Sockets and locks [default: /run/slipway]
    #[arg(long, global = true, value_name = "DIR", env = "SLIPWAY_RUN_DIR",
          value_hint = ValueHint::DirPath, help_heading = "Node")]
    pub run_dir: Option<PathBuf>,
    /// Images, records, logs, volumes [default: /var/lib/slipway]
    #[arg(long, global = true, value_name = "DIR", env = "SLIPWAY_DATA_DIR",
          value_hint = ValueHint::DirPath, help_heading = "Node")]
    pub data_dir: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a command in a new sandbox
    #[command(visible_alias = "r")]
    Run(Box<RunArgs>),
    /// List sandboxes
    Ps(PsArgs),
    /// Print what a container wrote
    Logs(LogsArgs),
    /// Run one more command in a running container
    Exec(ExecArgs),
    /// Join the standard streams of a running container
    Attach(NameArg),
    /// Wait until containers end and print their exit statuses
    Wait(NamesArg),
    /// Stop running containers: a signal, patience, then SIGKILL
    Stop(StopArgs),
    /// Send a signal to running containers
    Kill(KillArgs),
    /// Remove sandboxes that have ended
    Rm(RmArgs),
    /// Print all that is known of sandboxes, as JSON
    Inspect(NamesArg),
    /// Print what running sandboxes use
    Stats(StatsArgs),
    /// Manage the image cache
    #[command(subcommand)]
    Image(ImageCommand),
    /// Serve NVMe functions to other programs, over vfio-user
    #[command(subcommand)]
    Endpoint(EndpointCommand),
    /// Show where the time of an NVMe function's commands goes, layer by layer
    ///
    /// Tracing costs nothing before and after. Layers: from the doorbell to the command being
    /// fetched, from there to the disk, the disk, from its completion to the interrupt. Of a sandbox
    /// also the guest's block layer and driver, by the tracepoints of its kernel. One command at a
    /// time can snoop on a function.
    Snoop(SnoopArgs),
    /// Manage named disks, which any number of endpoints share
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Manage networks, which sandboxes join
    #[command(subcommand)]
    Network(NetworkCommand),
    /// Manage the ports of the networks' switches: sandboxes, the host's own ends, and memory ports for
    /// programs of this host
    #[command(subcommand)]
    Port(PortCommand),
    /// Generate packets, receive them, and time their way there and back: at memory ports, TAP interfaces and
    /// interfaces of the host
    #[command(subcommand)]
    Pktgen(PktgenCommand),
    /// Sockets between programs of this node, past the kernel
    #[command(subcommand)]
    Socket(SocketCommand),
    /// Say what this host can do, what is missing and the command that mends it
    Doctor(DoctorArgs),
    /// Measure
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Run the node's plane in the foreground (`run` starts one by itself where none runs)
    Daemon(DaemonArgs),
    /// Hold what disks, endpoints and sandboxes consist of while the daemon is restarted (`keeper =
    /// true` in the settings has the daemon start one)
    Keeper,
    /// Print shell completions
    Completions {
        /// For which shell
        shell: clap_complete::Shell,
    },
    /// Write man pages into a directory
    #[command(hide = true)]
    Man {
        /// Where
        dir: PathBuf,
    },
}

#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// Image: a reference ("debian:12"), or a digest in the cache
    pub image: String,
    /// Command and arguments instead of the image's
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<String>,
    /// Start this many sandboxes at once
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub count: u32,
    /// Name of the sandbox; with --count, NAME-1 to NAME-N [default: made up]
    #[arg(long)]
    pub name: Option<String>,
    #[command(flatten)]
    pub machine: MachineArgs,
    #[command(flatten)]
    pub process: ProcessArgs,
    #[command(flatten)]
    pub network: NetworkArgs,
    /// Host name in the container [default: the sandbox's name]
    #[arg(long)]
    pub hostname: Option<String>,
    /// Program instead of the image's entry point; "" removes it
    #[arg(long, value_name = "PROGRAM")]
    pub entrypoint: Option<String>,
    /// Return when the container runs; `logs`, `exec` and `stop` reach it afterwards
    #[arg(short, long, conflicts_with_all = ["interactive", "tty"])]
    pub detach: bool,
    /// Remove the sandbox when it has ended
    #[arg(long)]
    pub rm: bool,
    /// Mount the container's root read-only
    #[arg(long)]
    pub read_only: bool,
    /// Block device in the container: NAME:SIZE makes a scratch volume that goes with the
    /// sandbox, file:PATH[:ro] takes a file or block device of the host, or an NVMe namespace by
    /// passthrough (/dev/ngXnY). It appears as /dev/slipway/NAME (for files: the file's name).
    /// ":4k" gives it logical blocks of 4096 bytes instead of 512; a last ":/DIR" mounts its file
    /// system there
    #[arg(long, value_name = "NAME:SIZE[:4k]|file:PATH[:ro][:4k]")]
    pub volume: Vec<VolumeArg>,
    /// Label, key=value
    #[arg(short, long, value_name = "KEY=VALUE")]
    pub label: Vec<String>,
    /// Limit of the container's processes, name=soft[:hard], as docker has it
    #[arg(long, value_name = "NAME=SOFT[:HARD]")]
    pub ulimit: Vec<String>,
    /// Write the start, stage by stage: a picture (.svg), or data (.json)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub timeline: Option<PathBuf>,
    /// When to fetch the image
    #[arg(long, value_enum, default_value_t = Pull::Missing)]
    pub pull: Pull,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Pull {
    /// When it is not in the cache
    Missing,
    /// Always
    Always,
    /// Never
    Never,
}

#[derive(Clone, Debug, Args)]
pub struct MachineArgs {
    /// Memory of the sandbox, as 512M or 2G [default: 256M]
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// Virtual CPUs [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub cpus: Option<u32>,
    /// Guest kernel instead of the node's
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub kernel: Option<PathBuf>,
    /// How guest code runs: auto, kvm, or tcg (software emulation)
    #[arg(long, value_name = "WORD")]
    pub accel: Option<String>,
}

#[derive(Clone, Debug, Args)]
pub struct NetworkArgs {
    /// Network that the sandbox joins, or "none". The network "default" is made when it is first
    /// needed; `network create` makes others [default: default, on a host that has nft and /dev/net/tun]
    #[arg(long, value_name = "NAME|none")]
    pub network: Option<String>,
    /// Have a port of the host lead to one of the container, as 8080:80, 127.0.0.1:8080:80,
    /// 53:53/udp or 8000-8009:8000-8009; with the container's port alone, any that is free
    #[arg(short, long, value_name = "[[ADDRESS:]HOST:]CONTAINER[/udp]")]
    pub publish: Vec<String>,
    /// Address of the sandbox, IPv4 or IPv6 (or both, one after the other) [default: one that is free]
    #[arg(long, value_name = "ADDRESS")]
    pub ip: Vec<String>,
    /// MAC address of the sandbox's interface [default: made from its IPv4 address]
    #[arg(long, value_name = "ADDRESS")]
    pub mac: Option<String>,
    /// Start the container's process when its network can be used; without this the network comes up
    /// beside it
    #[arg(long)]
    pub wait_network: bool,
    /// Queue pairs of the sandbox's interface [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub queues: Option<u32>,
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
    },
}

/// A new memory port.
#[derive(Clone, Debug, Args)]
pub struct PortArgs {
    /// Letters, digits, "-" and "_"; no other memory port of this node has it
    pub name: String,
    /// Network, whose switch it is a port of; it comes up for the port
    #[arg(long, value_name = "NAME", default_value = "default", visible_alias = "switch")]
    pub network: String,
    /// MAC address of the port: frames from any other are dropped [default: any, and the switch learns]
    #[arg(long, value_name = "ADDRESS")]
    pub mac: Option<String>,
    /// Frames that each of its two rings holds: a power of two, 16 to 32768 [default: 512]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(16..=32768))]
    pub slots: Option<u32>,
    /// Bytes that a slot of a ring holds, a multiple of 64, 64 to 65536; longer frames take several
    /// [default: 2048, or more if the network's packets are longer]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(64..=65536))]
    pub slot_size: Option<u32>,
    /// Who may attach beside root: user and group of the socket, in numbers
    #[arg(long, value_name = "UID[:GID]")]
    pub owner: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum PortCommand {
    /// Make a memory port of a network and print its socket's path
    ///
    /// A program of this host attaches there, one at a time, and shares packet rings with the network's
    /// switch: `slipway pktgen`, or any that uses the crate slipway-port or the C header slipway_port.h.
    /// The port stays until `port rm`, also over restarts of the daemon; its programs then attach anew.
    Create(PortArgs),
    /// Remove memory ports, also under their programs
    Rm {
        /// Names
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// List ports with their addresses
    Ls {
        /// Only of this network
        network: Option<String>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Print what passed each port, and what was dropped and why
    Stats {
        /// Only of this network
        network: Option<String>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Make a port's link worse, as `tc netem` does: lose, delay or slow down its frames
    ///
    /// It lasts until --clear, until the port goes, or until the daemon ends. What is dropped is counted:
    /// `port stats` has it under loss and queue.
    Impair(ImpairArgs),
    /// Capture what passes a port, as a pcapng file, until Ctrl-C
    ///
    /// Frames are captured as whoever is at the port sends and receives them: with `port impair`, before
    /// and after what that does. Capturing slows nothing; frames that there is no room for are counted.
    Capture(CaptureArgs),
    /// Count what passes a port by kind, and print the headers of some of it, until Ctrl-C
    Trace(TraceArgs),
    /// Print all that is known of ports, as JSON: addresses, settings, what passed
    Inspect {
        /// Ports: sandboxes, or names or numbers as `port ls` prints them; NETWORK/PORT if one is in several
        #[arg(required = true)]
        ports: Vec<String>,
    },
    /// Change settings of a port, as `ip link set … vf` does, until its sandbox ends; what is not named
    /// stays as it is
    Set(PortSetArgs),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Switched {
    On,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PortLinkArg {
    /// The peer has a carrier while its network is there
    Auto,
    /// The peer has a carrier even when its network is gone
    On,
    /// The peer has no carrier, and nothing passes
    Off,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("setting").required(true).multiple(true))]
pub struct PortSetArgs {
    /// Port: a sandbox, or a name or number as `port ls` prints it; NETWORK/PORT if it is in several
    pub port: String,
    /// Drop frames from other addresses than the port's own, MAC and IP
    #[arg(
        long,
        visible_alias = "spoof-check",
        value_enum,
        group = "setting",
        value_name = "on|off"
    )]
    pub mac_spoof_check: Option<Switched>,
    /// Give it frames for stations that nobody knows, and let it advertise routes
    #[arg(long, value_enum, group = "setting", value_name = "on|off")]
    pub trust: Option<Switched>,
    /// All of its frames are of this VLAN, and have no tag; with "none" it has its own tags
    #[arg(long, value_name = "N|none", value_parser = parse_vlan, group = "setting")]
    pub vlan: Option<u32>,
    /// State of its link
    #[arg(long, value_enum, group = "setting", value_name = "auto|on|off")]
    pub link: Option<PortLinkArg>,
    /// Most that it may send, bits per second, as 100Mbit
    #[arg(long, value_name = "RATE|none", value_parser = parse_max_rate, group = "setting")]
    pub max_rate: Option<MaxRate>,
}

#[derive(Clone, Debug, Args)]
pub struct ProcessArgs {
    /// Environment, NAME=VALUE; NAME alone takes the value from here
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// Working directory
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// User: name or number, with :GROUP if wanted
    #[arg(short, long, value_name = "USER[:GROUP]")]
    pub user: Option<String>,
    /// Keep standard input open
    #[arg(short, long)]
    pub interactive: bool,
    /// Give it a terminal
    #[arg(short, long)]
    pub tty: bool,
    /// All capabilities and devices
    #[arg(long)]
    pub privileged: bool,
}

#[derive(Debug, Args)]
pub struct PsArgs {
    /// Only those that run
    #[arg(long)]
    pub running: bool,
    /// Only names
    #[arg(short, long)]
    pub quiet: bool,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Sandbox: name, id, or the beginning of an id
    pub name: String,
    /// Go on as it writes, until it ends
    #[arg(short, long)]
    pub follow: bool,
    /// Only the last N lines
    #[arg(short = 'n', long, value_name = "N")]
    pub tail: Option<u64>,
    /// Put the time before each line
    #[arg(short, long)]
    pub timestamps: bool,
}

#[derive(Debug, Args)]
pub struct ExecArgs {
    #[command(flatten)]
    pub process: ProcessArgs,
    /// Sandbox: name, id, or the beginning of an id
    pub name: String,
    /// Command and arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    pub command: Vec<String>,
}

#[derive(Debug, Args)]
pub struct NameArg {
    /// Sandbox: name, id, or the beginning of an id
    pub name: String,
}

#[derive(Debug, Args)]
pub struct NamesArg {
    /// Sandboxes: names, ids, or the beginnings of ids
    #[arg(required = true)]
    pub names: Vec<String>,
}

#[derive(Debug, Args)]
pub struct StopArgs {
    /// Seconds between the image's stop signal and SIGKILL
    #[arg(short, long, default_value_t = 10, value_name = "SECONDS")]
    pub time: u32,
    #[command(flatten)]
    pub names: NamesArg,
}

#[derive(Debug, Args)]
pub struct KillArgs {
    /// Signal by name or number
    #[arg(short, long, default_value = "KILL")]
    pub signal: String,
    #[command(flatten)]
    pub names: NamesArg,
}

#[derive(Debug, Args)]
pub struct RmArgs {
    /// Also those that run
    #[arg(short, long)]
    pub force: bool,
    /// All that have ended
    #[arg(long, conflicts_with = "names")]
    pub all: bool,
    /// Sandboxes: names, ids, or the beginnings of ids
    #[arg(required_unless_present = "all")]
    pub names: Vec<String>,
}

#[derive(Debug, Args)]
pub struct StatsArgs {
    /// Only these sandboxes [default: all that run]
    pub names: Vec<String>,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Again and again, until interrupted
    #[arg(short, long)]
    pub follow: bool,
}

#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Fetch an image from its registry
    Pull {
        /// For example debian:12 or localhost:5000/team/app@sha256:…
        reference: String,
        /// Speak HTTP to the registry (loopback registries need no flag)
        #[arg(long)]
        plain_http: bool,
    },
    /// Take in an image from this machine
    Import {
        /// oci:DIR[:TAG], oci-archive:FILE, docker-archive:FILE, or dir:DIR (a plain root folder)
        source: String,
        /// Name it
        name: Option<String>,
    },
    /// List images
    Ls {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove images
    Rm {
        /// References or digests
        #[arg(required = true)]
        images: Vec<String>,
    },
    /// Remove images that no sandbox uses and that have no name; with --all, named ones too
    Prune {
        /// Named ones too
        #[arg(short, long)]
        all: bool,
    },
}

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
    /// Give an endpoint, or a sandbox by its id, one more disk while it runs
    Attach {
        /// Id of the endpoint
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
        /// Id of the endpoint
        endpoint: String,
        #[command(flatten)]
        limits: LimitArgs,
    },
    /// Take a disk away from an endpoint; what it is working on ends first
    Detach {
        /// Id of the endpoint
        endpoint: String,
        /// Name of a disk, or number of a namespace
        #[arg(value_name = "DISK")]
        disk: String,
    },
    /// Disconnect clients and remove endpoints
    Rm {
        /// Ids
        #[arg(required = true)]
        ids: Vec<String>,
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
    /// block device, or an NVMe namespace by passthrough: /dev/ngXnY; with ":pin" the client's memory that
    /// data is read into or written from is pinned, which spares the kernel time for each command),
    /// overlay:PATH (volatile copy-on-write), or disk:NAME[:ro] (one that `disk create` made). More can be attached later
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
    /// Threads of the daemon (`reactors` in its settings) that the controller's I/O queues are spread
    /// over. Worth it for a client that keeps several queues busy. Disks: not overlays. At most 16 where
    /// endpoints outlive the daemon (`keeper`)
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

#[derive(Debug, Args)]
pub struct SnoopArgs {
    /// Endpoint by its id, or sandbox by its name, id, or the beginning of its id
    #[arg(value_name = "ENDPOINT|SANDBOX", required_unless_present = "measure_overhead")]
    pub target: Option<String>,
    /// Measure instead what snooping costs, with and without in turn: a load of our own on a RAM
    /// disk, or the load that SANDBOX has now, the guest's tracing apart
    #[arg(long, conflicts_with_all = ["duration", "svg", "by"])]
    pub measure_overhead: bool,
    /// Between two tables, as 500ms or 2s
    #[arg(short, long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    pub interval: Duration,
    /// End after this time [default: when interrupted]
    #[arg(short, long, value_name = "TIME", value_parser = parse_duration)]
    pub duration: Option<Duration>,
    /// Only by queue, or only by opcode
    #[arg(long, value_enum, value_name = "WHAT")]
    pub by: Option<By>,
    /// Follow the commands of one doorbell in N [default: all while they are rare, else about one
    /// in 20 us, which costs little]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub every: Option<u32>,
    /// Leave a sandbox's guest alone: without its layers
    #[arg(long)]
    pub no_guest: bool,
    /// As JSON: a line for each interval, and one for all of them together
    #[arg(long)]
    pub json: bool,
    /// Write the picture: mean latencies as stacked bars
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub svg: Option<PathBuf>,
}

impl SnoopArgs {
    /// What is snooped on; nothing when the overhead is measured.
    pub fn target(&self) -> &str {
        self.target.as_deref().unwrap_or_default()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum By {
    /// Opcodes together
    Queue,
    /// Queues together
    Opcode,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Start sandboxes at once, round after round, and say where the time went
    Startup(StartupArgs),
    /// Put loads on disks, configuration by configuration in turn, and say how they compare
    Block(Box<BlockArgs>),
    /// Send frames through the switch, and through what it is measured against, in turn
    Packet(PacketArgs),
    /// Serve one endpoint until standard input ends: what `block` measures
    #[command(hide = true)]
    Target(TargetArgs),
    /// Network functions that `bench packet` measures
    #[command(hide = true)]
    PacketTarget(PacketTargetArgs),
}

#[derive(Debug, Args)]
pub struct BlockArgs {
    /// Without VMs: a small NVMe driver of ours over vfio-user sockets instead of fio in guests
    #[arg(long)]
    pub native: bool,
    /// Only these configurations [default: all]; --list shows them
    #[arg(
        long,
        visible_alias = "configurations",
        value_name = "CONFIGURATION",
        value_delimiter = ','
    )]
    pub only: Vec<String>,
    /// Only these loads, as randread-4k-d32-t1: pattern (randread, randwrite, randrw, read, write),
    /// block size, depth, threads
    #[arg(long, visible_alias = "workloads", value_name = "LOAD", value_delimiter = ',')]
    pub workload: Vec<slipway_bench::block::Workload>,
    /// Every load at each of these depths
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1023))]
    pub depths: Vec<u32>,
    /// Every load with each of these numbers of threads (fio's numjobs)
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: Vec<u32>,
    /// RocksDB (db_bench) in place of fio: fillseq, readrandom, readseq, fillrandom and
    /// readrandomwriterandom on ext4; guests have 1 GiB of memory unless --memory says otherwise
    #[arg(long, conflicts_with_all = ["native", "workload", "depths", "threads"])]
    pub rocksdb: bool,
    /// Keys of a database, with values of 1 KiB [default: 200000]
    #[arg(long, value_name = "N", requires = "rocksdb", value_parser = clap::value_parser!(u64).range(1000..=100_000_000))]
    pub keys: Option<u64>,
    /// Threads that compact, each number with turns of its own [default: 1,10]
    #[arg(long, value_name = "N", value_delimiter = ',', requires = "rocksdb", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub compaction: Vec<u32>,
    /// Image of the guests, with fio (and db_bench) in it [default: made from Debian's packages]
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Disk: ram:SIZE, null:SIZE (--native only), or file:DIR:SIZE (a new file there, removed
    /// afterwards). With guests one file for all, ram: one in /dev/shm [default: ram:64M with
    /// --native, file:/var/tmp:256M with guests, as large as is needed with --rocksdb]
    #[arg(long, value_name = "DISK")]
    pub disk: Option<DiskKind>,
    /// Turns of each configuration with each load
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Seconds of a turn that are measured; of RocksDB's random loads at most 10 times that
    #[arg(long, visible_alias = "runtime", default_value_t = 1.0, value_name = "SECONDS", value_parser = seconds)]
    pub time: f64,
    /// Seconds of load before that
    #[arg(long, default_value_t = 0.2, value_name = "SECONDS", value_parser = seconds)]
    pub warm_up: f64,
    /// Instead: how a quiet client fares, alone and beside each of these loads of a noisy one on
    /// another controller of the same disk and reactor [without LOAD: randread-4k-d128 and
    /// randread-128k-d128]. The quiet one's load is --workload [default: randread-4k-d1]; both clients
    /// share a thread
    #[arg(long, value_name = "LOAD", value_delimiter = ',', num_args = 0.., require_equals = true,
          default_missing_values = ["randread-4k-d128", "randread-128k-d128"],
          conflicts_with_all = ["target", "socket"])]
    pub neighbour: Vec<slipway_bench::block::Workload>,
    /// Three loads (a small database), three short turns at most: shows that everything works, in
    /// seconds with --native, in minutes with guests
    #[arg(long)]
    pub quick: bool,
    /// One more configuration: an NVMe controller that somebody else serves on a vfio-user socket
    #[arg(long, value_name = "NAME=SOCKET")]
    pub socket: Vec<Named>,
    /// Write the disks of --socket first: their content is lost
    #[arg(long)]
    pub fill: bool,
    /// One more configuration: a target from another build of slipway, doorbells mapped
    #[arg(long, value_name = "NAME=PROGRAM")]
    pub target: Vec<Named>,
    /// Show an earlier report instead of measuring
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub report: Option<PathBuf>,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    /// Write the picture: a bar for each load and configuration
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub svg: Option<PathBuf>,
    /// Write curves: IOPS and latency over depth, or operations of RocksDB over time
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub curves: Option<PathBuf>,
    /// Compare with an earlier report: which differences are more than the noise
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub compare: Option<PathBuf>,
    /// Print the report as JSON instead of tables
    #[arg(long)]
    pub json: bool,
    /// List configurations and loads
    #[arg(long)]
    pub list: bool,
}

#[derive(Debug, Args)]
pub struct PacketArgs {
    /// Only these subjects [default: all that are installed]; --list shows them
    #[arg(long, value_name = "SUBJECT", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Only these loads, as 64b-p2 (bytes of a frame, ports of the switch), 64b-p1024-r32 (frames in a
    /// row to one port), 64b-p2-s64x256 (slots of a ring, bytes of each) or 64b-p2-o5M (frames offered
    /// a second; else as many as the source can)
    #[arg(long, value_name = "LOAD", value_delimiter = ',')]
    pub load: Vec<slipway_bench::packet::PacketLoad>,
    /// Turns of each subject with each load
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Seconds of a turn that are measured; whole ones for testpmd, which tells no finer
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS", value_parser = seconds)]
    pub time: f64,
    /// Seconds of load before that
    #[arg(long, default_value_t = 0.2, value_name = "SECONDS", value_parser = seconds)]
    pub warm_up: f64,
    /// Three loads, three short turns at most: shows that everything works, in seconds
    #[arg(long)]
    pub quick: bool,
    /// Show an earlier report instead of measuring
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub report: Option<PathBuf>,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    /// Write the picture: a bar for each load and subject
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub svg: Option<PathBuf>,
    /// Compare with an earlier report: which differences are more than the noise
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub compare: Option<PathBuf>,
    /// Print the report as JSON instead of tables
    #[arg(long)]
    pub json: bool,
    /// List subjects and loads
    #[arg(long)]
    pub list: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().map_err(|_| format!("\"{text}\" is no number of seconds"))?;
    if (0.001..=3600.0).contains(&value) { Ok(value) } else { Err("0.001 to 3600 seconds".into()) }
}

#[derive(Debug, Args)]
pub struct TargetArgs {
    /// Path of the socket
    #[arg(long)]
    pub socket: PathBuf,
    /// As `endpoint create` has it
    #[arg(long)]
    pub disk: DiskArg,
    /// Path of a second controller's socket, on the same disk
    #[arg(long)]
    pub neighbour: Option<PathBuf>,
    /// How clients ring
    #[arg(long, value_enum)]
    pub doorbells: Doorbells,
    /// Processors that it may use
    #[arg(long)]
    pub cpu: Vec<usize>,
    /// Threads that serve
    #[arg(long, default_value_t = 1)]
    pub reactors: u32,
}

#[derive(Debug, Args)]
pub struct PacketTargetArgs {
    /// Where the sockets are
    #[arg(long)]
    pub directory: PathBuf,
    /// Processors that it may use
    #[arg(long)]
    pub cpu: Vec<usize>,
}

#[derive(Debug, Args)]
pub struct StartupArgs {
    /// Image, in the cache or to be fetched
    pub image: String,
    /// Sandboxes at once
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub count: u32,
    /// Rounds
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Write the picture
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Compare with an earlier report
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Print the report as JSON instead of tables
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct DaemonArgs {
    /// End when no sandbox runs and nobody is connected
    #[arg(long)]
    pub ends_when_idle: bool,
    /// Longest time that a thread which serves devices looks for more work before it sleeps, up to a
    /// second: longer answers the first command after a pause sooner and takes more CPU; 0: it sleeps
    /// at once [default: poll_budget_us of the settings, 200us]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub poll_budget: Option<Duration>,
}
