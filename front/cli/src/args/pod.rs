//! Arguments of the commands about pods.

use clap::{Args, Subcommand};

use super::run::host_name;
use super::{ExecArgs, MachineArgs, NetworkArgs, RmArgs, RunArgs};
use crate::size::parse_size;

#[derive(Debug, Subcommand)]
pub enum PodCommand {
    /// Make a pod: a sandbox to which containers are added, and in which they share network, IPC,
    /// host name and /dev/shm
    Create(Box<PodCreateArgs>),
    /// Run a command in a new container of a pod: `slipway run --pod POD`
    Run(Box<PodRunArgs>),
    /// List pods and their containers
    Ps(PodPsArgs),
    /// Run one more command in a running container, POD/CONTAINER
    Exec(Box<ExecArgs>),
    /// Remove pods, or containers of pods (POD/CONTAINER), that have ended
    Rm(RmArgs),
}

#[derive(Debug, Args)]
pub struct PodCreateArgs {
    /// Name of the pod [default: made up]
    pub name: Option<String>,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Begin with the machine of a template in place of booting; `slipway template` makes one, with
    /// the same memory, CPUs, kernel and kind of network. "auto": with one that the node makes
    /// after the first start. "none": boot, as without this option
    #[arg(long, value_name = "TEMPLATE")]
    pub from: Option<String>,
    #[command(flatten)]
    pub network: NetworkArgs,
    /// The most containers that the pod has at a time, those that have ended not counted [default:
    /// 256, those that have ended counted]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub max_containers: Option<u32>,
    /// Give each container with a limit of memory, of at most SIZE, memory of its own: it comes
    /// before the container begins and goes back whole when it has ended; eight at a time, on
    /// slipway-vmm only [default: containers share the pod's memory]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "max_memory")]
    pub bind_memory: Option<u64>,
    /// Host name in the pod: labels of letters, digits and '-', with dots between them, 64
    /// characters at most [default: the pod's name]
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    pub hostname: Option<String>,
    /// Label, key=value
    #[arg(short, long, value_name = "KEY=VALUE")]
    pub label: Vec<String>,
}

#[derive(Debug, Args)]
pub struct PodRunArgs {
    /// Pod: name, id, or the beginning of an id
    #[arg(id = "target", value_name = "POD", group = "in_pod")]
    #[arg(conflicts_with_all = ["count", "from"])]
    pub pod: String,
    #[command(flatten)]
    pub run: RunArgs,
}

#[derive(Debug, Args)]
pub struct PodPsArgs {
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Only this pod
    pub name: Option<String>,
}
