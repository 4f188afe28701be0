//! Arguments of `slipway pktgen`.
#![allow(rustdoc::broken_intra_doc_links)] // these comments are help texts, their brackets usage

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use slipway_ethernet_spec::Mac;
use slipway_pktgen::{Sizes, parse_rate};

use crate::size::parse_duration;

#[derive(Debug, Subcommand)]
pub enum PktgenCommand {
    /// Send frames to a station
    ///
    /// UDP over IPv4 between addresses of 198.18.0.0/15, which are for benchmarks, to the discard
    /// port. The payload says which run a frame is of, its number and when it was made, so that a
    /// sink can tell what is lost and how long it took.
    Source {
        #[command(flatten)]
        wire: WireArgs,
        #[command(flatten)]
        plan: PlanArgs,
        /// Frames sent at a time
        #[arg(
            long,
            default_value_t = 32,
            value_name = "N",
            value_parser = clap::value_parser!(u32).range(1..=256),
        )]
        burst: u32,
        #[command(flatten)]
        limits: LimitArgs,
    },
    /// Receive what sources send, and tell rates, losses and latencies
    Sink {
        #[command(flatten)]
        wire: WireArgs,
        #[command(flatten)]
        own: OwnArgs,
        #[command(flatten)]
        limits: LimitArgs,
    },
    /// Send frames to a pong, one at a time, and tell how long they take there and back
    Ping {
        #[command(flatten)]
        wire: WireArgs,
        #[command(flatten)]
        plan: PlanArgs,
        /// How long a frame may take to come back before it is lost
        #[arg(long, default_value = "1s", value_name = "TIME", value_parser = parse_duration)]
        timeout: Duration,
        #[command(flatten)]
        limits: LimitArgs,
    },
    /// Send frames of a ping back where they came from
    Pong {
        #[command(flatten)]
        wire: WireArgs,
        #[command(flatten)]
        own: OwnArgs,
        #[command(flatten)]
        limits: LimitArgs,
    },
}

/// Interface that frames are sent to and received from.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub struct WireArgs {
    /// Memory port of a network, as `slipway port create` made it; with a "/" in it, its socket's
    /// path
    #[arg(long, value_name = "NAME")]
    pub port: Option<String>,
    /// TAP interface, made if it is not there, and brought up
    #[arg(long, value_name = "NAME")]
    pub tap: Option<String>,
    /// Interface of the host; give it no addresses, its own stack gets the frames as well
    #[arg(long, value_name = "NAME")]
    pub interface: Option<String>,
}

/// Frames that are sent.
#[derive(Clone, Debug, Args)]
pub struct PlanArgs {
    /// MAC address of the receiver: the one that its sink or pong prints
    #[arg(long, value_name = "ADDRESS")]
    pub to: Mac,
    /// MAC address to send from [default: the port's, if it has one, or a random one]
    #[arg(long, value_name = "ADDRESS")]
    pub from: Option<Mac>,
    /// Frames per second, as 5M, 100k or 20 [default: as fast as can be]
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub rate: Option<f64>,
    /// Bytes of a frame, without the check sequence: one length, several in turn (64,1500), a range
    /// (64-1500), or imix (of twelve frames seven of 64, four of 576, one of 1500)
    #[arg(long, value_name = "BYTES", default_value = "64")]
    pub size: Sizes,
    /// Flows, which follow each other frame by frame
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=16_000_000),
    )]
    pub flows: u32,
    /// Fields that differ between flows: source MAC address, source IP address, source UDP port
    #[arg(long, value_name = "WHAT", value_delimiter = ',', value_enum, default_value = "ip,port")]
    pub vary: Vec<Varied>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Varied {
    /// Source MAC address
    Mac,
    /// Source IP address, of 65,535
    Ip,
    /// Source UDP port, of 64,511
    Port,
}

/// Address of the receiver.
#[derive(Clone, Debug, Args)]
pub struct OwnArgs {
    /// MAC address to receive at [default: the port's, if it has one, or a random one; it is
    /// printed]
    #[arg(long, value_name = "ADDRESS")]
    pub mac: Option<Mac>,
}

/// Conditions that end a run, beside ^C, and the format of reports.
#[derive(Clone, Debug, Args)]
pub struct LimitArgs {
    /// End after so many frames
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// End after this time, as 10s or 500ms
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub time: Option<Duration>,
    /// Print one JSON object at the end instead of a line each second
    #[arg(long)]
    pub json: bool,
}
