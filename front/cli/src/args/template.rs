//! Arguments of the commands about templates.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::{MachineArgs, NetworkArgs};
use crate::size::{parse_duration, parse_size};
use crate::volume::VolumeArg;

#[derive(Debug, Subcommand)]
pub enum TemplateCommand {
    /// Boot a machine and save it: `slipway run --from NAME` begins with it. Without --image it has
    /// no container, and any image can be run from it
    Create(Box<TemplateCreateArgs>),
    /// List templates
    Ls {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove templates; what began with one runs on
    Rm {
        /// Names of templates
        #[arg(required = true)]
        names: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub struct TemplateCreateArgs {
    /// Name of the template
    pub name: String,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Forks are pods that give each container with a limit of memory, of at most SIZE, memory of
    /// its own, as with `slipway pod create --bind-memory` [default: forks have no such memory]
    #[arg(long, value_name = "SIZE", value_parser = parse_size,
          conflicts_with_all = ["max_memory", "image"])]
    pub bind_memory: Option<u64>,
    #[command(flatten)]
    pub network: NetworkArgs,
    #[command(flatten)]
    pub container: TemplateContainerArgs,
    /// MTU of the interface, for forks in networks of others, such as a CNI plugin's, with this MTU
    /// [default: that of the network]
    #[arg(long, value_name = "BYTES", conflicts_with_all = ["network", "image"],
          value_parser = clap::value_parser!(u32).range(68..=65535))]
    pub mtu: Option<u32>,
}

/// The container that a template has beside its machine.
#[derive(Debug, Args)]
pub struct TemplateContainerArgs {
    /// Start a container of this image, and save the machine with it: `slipway run --from NAME`
    /// goes on with the container. It is a snapshot then, for `slipway snapshot ls` and `rm`
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// Save it once this command line has ended with status 0 in the container; any other status is
    /// an error. The image's /bin/sh runs it
    #[arg(long, value_name = "COMMAND", requires = "image", conflicts_with = "probe")]
    pub after: Option<String>,
    /// Save it once this command line ends with status 0 in the container: it is run again and
    /// again. The image's /bin/sh runs it
    #[arg(long, value_name = "COMMAND", requires = "image")]
    pub probe: Option<String>,
    /// The longest time that --after or --probe may take
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub timeout: Duration,
    /// Environment of the container, NAME=VALUE; NAME alone takes the value from here. Each fork
    /// has it, secrets included
    #[arg(short, long, value_name = "NAME[=VALUE]", requires = "image")]
    pub env: Vec<String>,
    /// A volume of the container, as `slipway run` has it, but no directory or file of the host
    #[arg(
        short,
        long,
        value_name = "NAME:SIZE[:4k][:/DIR]|file:PATH[:ro][:4k][:/DIR]",
        requires = "image"
    )]
    pub volume: Vec<VolumeArg>,
    /// Command and arguments of the container, instead of the image's
    #[arg(last = true, requires = "image")]
    pub command: Vec<String>,
}
