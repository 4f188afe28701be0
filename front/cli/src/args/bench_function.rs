//! Arguments of `slipway bench function`.

use clap::Args;

use super::MachineArgs;
use super::report::ReportArgs;
use crate::size::parse_size;

#[derive(Debug, Args)]
pub struct BenchFunctionArgs {
    /// Image with a program `sleep`, in the cache or to be fetched
    #[arg(required_unless_present_any = ["report", "list"])]
    pub image: Option<String>,
    /// Command of an invocation, and its arguments [default: true]
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<String>,
    /// Only these loads, as s4-q24: sandboxes that are there, with a replica each, and requests at
    /// once [default: those of RunD-V's figures 16 to 18]
    #[arg(long, value_name = "LOAD", value_delimiter = ',')]
    pub load: Vec<slipway_bench::function::FunctionLoad>,
    /// Only these subjects [default: all]; --list shows them
    #[arg(long, value_name = "SUBJECT", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Turns of each subject with each load
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// The most replicas in a sandbox, where there may be several
    #[arg(long, value_name = "N", default_value_t = 8,
          value_parser = clap::value_parser!(u32).range(1..=24))]
    pub replicas_per_sandbox: u32,
    /// The most sandboxes of a function; a function has at most 160 places for replicas
    #[arg(long, value_name = "N", default_value_t = 32,
          value_parser = clap::value_parser!(u32).range(1..=160))]
    pub max_sandboxes: u32,
    /// Limit of the memory of a replica and its invocations [default: the sandbox's memory]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub replica_memory: Option<u64>,
    /// Give each replica SIZE of memory of its own, as slipway function serve does
    #[arg(long, value_name = "SIZE", value_parser = parse_size,
          conflicts_with_all = ["replica_memory", "max_memory"])]
    pub bind_memory: Option<u64>,
    /// Template that sandboxes begin with; "auto": one that the node makes after the first start;
    /// "none": they boot
    #[arg(long, value_name = "TEMPLATE|auto|none", default_value = "auto")]
    pub from: String,
    /// Network that the sandboxes join, or "none"
    #[arg(long, value_name = "NAME|none", default_value = "none")]
    pub network: String,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// One small load, two turns at most: shows that everything works
    #[arg(long)]
    pub quick: bool,
    /// List subjects and loads
    #[arg(long)]
    pub list: bool,
    #[command(flatten)]
    pub report: ReportArgs,
}
