//! Arguments of the commands about sandboxes that exist, and about images.

use clap::{Args, Subcommand};

use super::LazyArg;
use crate::size::{CpuCount, Tail, parse_cpus, parse_size, parse_tail};

#[derive(Debug, Args)]
pub struct PsArgs {
    /// Those that have ended, too; they are always listed
    #[arg(short, long, hide = true)]
    pub all: bool,
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
    /// Sandbox: name, id, or the beginning of an id; a container of a pod as POD/CONTAINER
    pub name: String,
    /// Go on as it writes, until it ends
    #[arg(short, long)]
    pub follow: bool,
    /// Only the last N lines; "all" is as without this option
    #[arg(short = 'n', long, value_name = "N|all", value_parser = parse_tail)]
    pub tail: Option<Tail>,
    /// Put the time before each line
    #[arg(short, long)]
    pub timestamps: bool,
}

#[derive(Debug, Args)]
pub struct NameArg {
    /// Sandbox: name, id, or the beginning of an id; a container of a pod as POD/CONTAINER
    pub name: String,
}

#[derive(Debug, Args)]
pub struct NamesArg {
    /// Sandboxes: names, ids, or the beginnings of ids; containers of pods as POD/CONTAINER
    #[arg(required = true)]
    pub names: Vec<String>,
}

#[derive(Debug, Args)]
pub struct PauseArgs {
    #[command(flatten)]
    pub names: NamesArg,
    /// Write the sandbox's memory, or that of a pod with all of its containers, to a file and give
    /// it back to the host; `slipway resume` has the sandbox come back
    #[arg(long)]
    pub to_file: bool,
}

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Sandboxes: names, ids, or the beginnings of ids; containers of pods as POD/CONTAINER. With
    /// --live also endpoints by their ids [default with --live: everything]
    #[arg(required_unless_present = "live")]
    pub names: Vec<String>,
    /// The live objects of the daemon's plane instead: endpoints, queues and lanes of NVMe
    /// controllers, rings of network functions, ports of switches, sockets, and the threads that
    /// serve them
    #[arg(long)]
    pub live: bool,
    /// As JSON, which it always is without --live
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("change").required(true).multiple(true))]
pub struct UpdateArgs {
    /// Virtual CPUs, whole ones: from the number that it began with to its --max-cpus. Of a
    /// container of a pod: the CPUs whose time it may use, also a part of one, as 0.5
    #[arg(long, value_name = "N", value_parser = parse_cpus, group = "change")]
    pub cpus: Option<CpuCount>,
    /// Memory, as 512M or 2G: from what it began with to its --max-memory, in blocks of 2 MiB or
    /// more; what its programs use cannot be taken away. Of a container of a pod: its limit, for
    /// which the pod's memory grows, as far as there is room, and shrinks
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size, group = "change")]
    pub memory: Option<u64>,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Sandbox: name, id, or the beginning of an id; a container of a pod as POD/CONTAINER
    pub name: String,
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
    /// Sandboxes: names, ids, or the beginnings of ids; containers of pods as POD/CONTAINER
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
        #[command(flatten)]
        lazy: LazyArg,
    },
    /// Take in an image from this machine
    Import {
        /// oci:DIR[:TAG], oci-archive:FILE, docker-archive:FILE, dir:DIR (a plain root folder), or
        /// layers:FILE[:FILE…] (EROFS files of a snapshotter, the uppermost first)
        source: String,
        /// Name it
        name: Option<String>,
        /// Take names that other images here have; without it such an import is refused
        #[arg(long)]
        replace: bool,
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
    /// Mark an image as used now, and print its digest; nothing if there is no such image
    Touch {
        /// Reference or digest
        image: String,
    },
}
