//! The command line as data: parser, help, completions and man pages all come from here.
//!
//! A new command is a variant of `Command`, or of the enum of its group, with its help as doc
//! comment; an arm in `lib.rs`; and a file of its own there unless its group has one. An option is
//! a field of the command's `…Args`, in the group's file in `args/`, with its help as doc comment;
//! the command's file reads it. Completions and manual pages need nothing more. What a command
//! prints for programs is `--json`. A command of the daemon's is a call of `sandbox.proto`
//! (`sandbox/api`) or of the plane's interface. `docs/` has a page for its group. Tests: those of
//! its file for what it prints, and a script of `tests/e2e`; `50-bad-input.sh` has what it refuses.
#![allow(rustdoc::broken_intra_doc_links)] // these comments are help texts, their brackets usage

mod bench;
mod bench_function;
mod cp;
mod density;
mod disk;
mod endpoint;
mod forward;
mod function;
mod json;
mod manage;
mod network;
mod pod;
mod port;
mod report;
mod roots;
mod run;
mod security;
mod snapshot;
mod snoop;
mod socket;
mod startup;
mod template;
mod vf;

pub use bench::{
    AttachArgs, BenchCommand, BlockArgs, CgroupsArgs, MemoryArgs, MemoryUserArgs, PacketArgs,
    PacketModelArg, PacketTargetArgs, SocketArgs, SocketLoadArgs, TargetArgs, VmmArgs,
};
pub use bench_function::BenchFunctionArgs;
pub use cp::{CopyEnd, CpArgs};
pub use density::{DensityArgs, DensityEngine};
pub use disk::{DiskKind, Doorbells};
pub use endpoint::{DiskCommand, EndpointArgs, EndpointCommand, LimitArgs};
pub use forward::{Forward, ForwardArgs};
pub use function::{FunctionCommand, FunctionInvokeArgs, FunctionLoadArgs, FunctionServeArgs};
pub use json::AlwaysJson;
pub use manage::{
    ImageCommand, InspectArgs, KillArgs, LogsArgs, NameArg, NamesArg, PauseArgs, PsArgs, RmArgs,
    StatsArgs, StopArgs, UpdateArgs,
};
pub use network::{NetworkArgs, NetworkCommand};
pub use pod::{PodCommand, PodCreateArgs, PodPsArgs};
pub use port::{
    CaptureArgs, Direction, ImpairArgs, PortArgs, PortCommand, PortLinkArg, PortSetArgs, Switched,
    TraceArgs,
};
pub use report::ReportArgs;
pub use roots::RootsArgs;
pub use run::{ExecArgs, LazyArg, MachineArgs, ProcessArgs, Pull, RunArgs};
pub use security::{CapabilityArg, OptionArg, SecurityArgs, SysctlArg};
pub use snapshot::{ForkArgs, SnapshotCommand};
pub use snoop::{Grouping, SnoopArgs};
pub use socket::{
    LINKS, POLICY, SocketCdiArgs, SocketCommand, SocketEngineArgs, SocketLsArgs, SocketRunArgs,
    SocketTopArgs,
};
pub use startup::{Engine, StartupArgs};
pub use template::{TemplateCommand, TemplateContainerArgs, TemplateCreateArgs};
pub use vf::{DevicePluginArgs, VfCommand, VfCreateArgs, VfNumberArgs};

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueHint};

use crate::pktgen::PktgenCommand;
use crate::size::parse_duration;

/// Secure containers, each in a microVM of its own, each on its own NVMe function.
#[derive(Debug, Parser)]
#[command(name = "slipway", version, max_term_width = 100, propagate_version = true)]
pub struct Cli {
    #[command(flatten)]
    pub node: NodeArgs,
    #[command(subcommand)]
    pub command: Command,
}

/// Measure what Slipway does, beside what others do.
#[derive(Debug, Parser)]
#[command(
    name = "slipway-bench",
    bin_name = "slipway bench",
    version,
    max_term_width = 100,
    propagate_version = true
)]
pub struct BenchCli {
    #[command(flatten)]
    pub node: NodeArgs,
    #[command(subcommand)]
    pub command: BenchCommand,
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
    ///
    /// With TRACEPARENT in the environment (W3C Trace Context), as with `slipway exec` and `slipway
    /// pod`, the daemon's trace of the start is a part of the caller's trace.
    #[command(visible_alias = "r")]
    Run(Box<RunArgs>),
    /// List sandboxes
    Ps(PsArgs),
    /// Print what a container wrote
    Logs(LogsArgs),
    /// Run one more command in a running container
    Exec(ExecArgs),
    /// Copy files and directories between the host and a running container
    ///
    /// SRC and DEST as docker has them: a DEST that is a directory gets SRC under its own name, and
    /// any other DEST is the copy's name. Of a directory whose SRC ends with `/.` only what is in
    /// it is copied. With `-` for the side of the host, a tar archive is read from standard input
    /// and unpacked in the directory DEST, or written to standard output. The image needs no `tar`.
    Cp(CpArgs),
    /// Join the standard streams of a running container
    Attach(NameArg),
    /// Have ports of the host lead to ports of a sandbox that only its own programs reach
    PortForward(ForwardArgs),
    /// Wait until containers end and print their exit statuses
    Wait(NamesArg),
    /// Stop running containers: a signal, patience, then SIGKILL
    Stop(StopArgs),
    /// Send a signal to running containers
    Kill(KillArgs),
    /// Stop the processes of running containers where they are
    Pause(PauseArgs),
    /// Have paused containers go on, and come back from their files
    #[command(visible_alias = "unpause")]
    Resume(NamesArg),
    /// Remove sandboxes that have ended
    Rm(RmArgs),
    /// Print all that is known of sandboxes, as JSON, or what the plane has of them at this moment
    ///
    /// With --live, the threads that own the objects look at them, one after the other, and change
    /// nothing; a thread that does not answer within a second is left out.
    Inspect(InspectArgs),
    /// Print what running sandboxes use
    Stats(StatsArgs),
    /// Give a running sandbox more CPUs or memory, or take some away
    Update(UpdateArgs),
    /// Manage pods: sandboxes with several containers
    #[command(subcommand)]
    Pod(PodCommand),
    /// Manage templates: machines that have booted, with which sandboxes begin
    #[command(subcommand)]
    Template(TemplateCommand),
    /// Manage snapshots: sandboxes that were saved while they ran, with which others begin
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Begin sandboxes as copies of one that runs, and goes on
    ///
    /// It is saved as a snapshot, sandboxes begin with that, and the snapshot is removed. They are
    /// detached; their names are printed as they run.
    Fork(ForkArgs),
    /// Serve named images over HTTP: replicas and sandboxes come and go with their invocations
    #[command(subcommand)]
    Function(FunctionCommand),
    /// Manage the image cache
    #[command(subcommand)]
    Image(ImageCommand),
    /// Serve NVMe functions to other programs, over vfio-user
    #[command(subcommand)]
    Endpoint(EndpointCommand),
    /// Show where the time of an NVMe function's commands goes, layer by layer
    ///
    /// Tracing costs nothing before and after. Layers: from the doorbell to the command being
    /// fetched, from there to the disk, the disk, from its completion to the interrupt. Of a
    /// sandbox also the guest's block layer and driver, by the tracepoints of its kernel. One
    /// command at a time can snoop on a function.
    Snoop(SnoopArgs),
    /// Manage named disks, which any number of endpoints share
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Manage pools of virtual functions, which are reset and empty before they are asked for
    #[command(subcommand)]
    Vf(VfCommand),
    /// Advertise functions of pools and of sockets to the node's kubelet, for which pods of
    /// Slipway's runtime then ask as slipway.dev/POOL
    ///
    /// It serves until it is ended, and waits for a kubelet and a daemon that are not there. Pods
    /// that have functions go on without it.
    DevicePlugin(DevicePluginArgs),
    /// Print the figures of the pool of memory
    Pool(PoolArgs),
    /// Print the node's figures for Prometheus, or serve them
    Metrics(MetricsArgs),
    /// Manage networks, which sandboxes join
    #[command(subcommand)]
    Network(NetworkCommand),
    /// Manage the ports of the networks' switches: sandboxes, the host's own ends, and memory ports
    /// for programs of this host
    #[command(subcommand)]
    Port(PortCommand),
    /// Generate packets, receive them, and time their way there and back: at memory ports, TAP
    /// interfaces and interfaces of the host
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
    /// Fetch what is missing of lazily pulled images, for the disks of sandboxes (the daemon starts
    /// it)
    #[command(hide = true)]
    Fetch,
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

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct PoolArgs {
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct MetricsArgs {
    /// Serve them at http://ADDRESS/metrics until the command is ended, as at 127.0.0.1:9754
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<std::net::SocketAddr>,
}

#[derive(Debug, Args)]
pub struct DaemonArgs {
    /// End when no sandbox runs and nobody is connected
    #[arg(long)]
    pub ends_when_idle: bool,
    /// Longest time that a thread which serves devices looks for more work before it sleeps, up to
    /// a second: longer answers the first command after a pause sooner and takes more CPU; 0: it
    /// sleeps at once [default: poll_budget_us of the settings, 200us]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub poll_budget: Option<Duration>,
    /// Check the settings and end: status 0, or one line that says what is wrong with them
    #[arg(long, conflicts_with = "ends_when_idle")]
    pub check: bool,
}
