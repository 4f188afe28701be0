//! Arguments of `slipway snoop`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum, ValueHint};

use crate::size::parse_duration;

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
    pub by: Option<Grouping>,
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
    /// Returns the endpoint or sandbox to trace, or an empty string when the overhead is measured.
    pub fn target(&self) -> &str {
        self.target.as_deref().unwrap_or_default()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Grouping {
    /// Opcodes together
    Queue,
    /// Queues together
    Opcode,
}
