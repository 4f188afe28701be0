//! Arguments of `slipway bench density`.

use clap::{Args, ValueEnum};

use super::MachineArgs;
use super::report::{ReportArgs, seconds};

/// The VMM of sandboxes that `bench density` deploys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DensityEngine {
    /// QEMU.
    Qemu,
    /// Slipway's own VMM.
    Vmm,
    /// Hollow sandboxes, in which no guest code runs.
    Hollow,
}

impl DensityEngine {
    /// Returns the name of the VMM in records of sandboxes.
    pub fn program(self) -> &'static str {
        match self {
            Self::Qemu => "qemu",
            Self::Vmm => "slipway-vmm",
            Self::Hollow => "slipway-hollow",
        }
    }
}

#[derive(Debug, Args)]
pub struct DensityArgs {
    /// Image with a program `sleep`, in the cache or to be fetched
    #[arg(required_unless_present = "report")]
    pub image: Option<String>,
    /// Numbers of sandboxes that are deployed, in ascending order, as many as fit; 0: further ones
    /// start beside none
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "1,2,4,8",
        value_parser = clap::value_parser!(u32).range(0..=4096),
    )]
    pub deployed: Vec<u32>,
    /// Then: numbers of containers in one pod
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        value_parser = clap::value_parser!(u32).range(1..=40),
    )]
    pub replicas: Vec<u32>,
    /// Numbers of further sandboxes that are started at once beside those deployed, and removed
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "1",
        value_parser = clap::value_parser!(u32).range(1..=1000),
    )]
    pub burst: Vec<u32>,
    /// Rounds of such starts for each number of sandboxes
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Sandboxes begin with a template, which is made for the measurement, in place of booting
    #[arg(long)]
    pub fork: bool,
    /// Kind of sandboxes: guests on a VMM, which the daemon's settings choose and which must be
    /// this one, or hollow sandboxes, in which no guest code runs [default: what the daemon runs]
    #[arg(long, value_enum)]
    pub engine: Option<DensityEngine>,
    /// Network that the sandboxes join, or "none"
    #[arg(long, value_name = "NAME|none", default_value = "none")]
    pub network: String,
    /// Seconds for which sandboxes are left alone while their processor time is counted
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS", value_parser = seconds)]
    pub idle: f64,
    #[command(flatten)]
    pub machine: MachineArgs,
    #[command(flatten)]
    pub report: ReportArgs,
}
