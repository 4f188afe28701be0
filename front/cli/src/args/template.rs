//! Arguments of the commands about templates.

use clap::{Args, Subcommand};

use super::{MachineArgs, NetworkArgs};

#[derive(Debug, Subcommand)]
pub enum TemplateCommand {
    /// Boot a machine without a container and save it: `slipway run --from NAME` begins with it
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
    #[command(flatten)]
    pub network: NetworkArgs,
    /// MTU of the interface, for forks in networks of others, such as a CNI plugin's, with this MTU
    /// [default: that of the network]
    #[arg(long, value_name = "BYTES", conflicts_with = "network",
          value_parser = clap::value_parser!(u32).range(68..=65535))]
    pub mtu: Option<u32>,
}
