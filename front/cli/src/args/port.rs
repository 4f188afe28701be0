//! Arguments of the `slipway port` commands that take more than a name.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum, ValueHint};

use crate::size::{parse_bit_rate, parse_duration, parse_fraction, parse_size};

/// A direction, as whoever is at the port sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Direction {
    /// What it sends and what it receives
    Both,
    /// What it sends
    Sent,
    /// What it receives
    Received,
}

#[derive(Debug, Args)]
pub struct ImpairArgs {
    /// Port: a sandbox, or a name or number as `port ls` prints it; NETWORK/PORT if it is in several
    pub port: String,
    /// Frames that are lost, at random, as 1%
    #[arg(long, value_name = "PERCENT", value_parser = parse_fraction)]
    pub loss: Option<f64>,
    /// How long every frame takes, as 10ms, at most a minute
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub delay: Option<Duration>,
    /// How much longer or shorter at random, at most the delay; frames keep their order
    #[arg(long, value_name = "TIME", requires = "delay", value_parser = parse_duration)]
    pub jitter: Option<Duration>,
    /// Most bits per second, as 10Mbit (kbit, Mbit, Gbit: powers of 1000)
    #[arg(long, value_name = "RATE", value_parser = parse_bit_rate)]
    pub rate: Option<u64>,
    /// Bytes that may pass at once after a pause [default: a tenth of a second's]
    #[arg(long, value_name = "SIZE", requires = "rate", value_parser = parse_size)]
    pub burst: Option<u64>,
    /// Frames that may wait for the delay, and as many for the rate; what comes then is dropped
    /// [default: 1000]
    #[arg(long, value_name = "FRAMES")]
    pub queue: Option<u32>,
    /// Frames of one direction only; of both, each has all of it for itself
    #[arg(long, value_enum, value_name = "DIRECTION", default_value_t = Direction::Both)]
    pub direction: Direction,
    /// Makes chance the same each time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub seed: Option<u64>,
    /// Take all of it away
    #[arg(long, conflicts_with_all = ["loss", "delay", "rate", "queue", "seed", "direction"])]
    pub clear: bool,
}

#[derive(Debug, Args)]
pub struct CaptureArgs {
    /// Port: a sandbox, or a name or number as `port ls` prints it; NETWORK/PORT if it is in several
    pub port: String,
    /// File to write, in pcapng; - is standard output, as for `| tcpdump -r -`
    #[arg(short, long, value_name = "FILE", default_value = "-", value_hint = ValueHint::FilePath)]
    pub write: PathBuf,
    /// Most bytes of each frame [default: all]
    #[arg(short, long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..=262_144))]
    pub snaplen: Option<u32>,
    /// End after this many frames
    #[arg(short, long, value_name = "FRAMES", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Frames of one direction only
    #[arg(long, value_enum, value_name = "DIRECTION", default_value_t = Direction::Both)]
    pub direction: Direction,
}

#[derive(Debug, Args)]
pub struct TraceArgs {
    /// Port: a sandbox, or a name or number as `port ls` prints it; NETWORK/PORT if it is in several
    pub port: String,
    /// Most frames printed in a second; the others are counted only
    #[arg(long, value_name = "FRAMES", default_value_t = 100,
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub lines: u32,
    /// End after this time, as 10s
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub duration: Option<Duration>,
    /// Frames of one direction only
    #[arg(long, value_enum, value_name = "DIRECTION", default_value_t = Direction::Both)]
    pub direction: Direction,
}
