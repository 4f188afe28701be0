//! Arguments of `slipway port`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum, ValueHint};

use super::AlwaysJson;
use crate::size::{
    MaxRate, parse_bit_rate, parse_duration, parse_fraction, parse_max_rate, parse_size, parse_vlan,
};

/// Name and settings of a new memory port.
#[derive(Clone, Debug, Args)]
pub struct PortArgs {
    /// Letters, digits, "-" and "_"; no other memory port of this node has it
    pub name: String,
    /// Network, whose switch it is a port of; it comes up for the port
    #[arg(long, value_name = "NAME", default_value = "default", visible_alias = "switch")]
    pub network: String,
    /// MAC address of the port: frames from any other are dropped [default: any, and the switch
    /// learns]
    #[arg(long, value_name = "ADDRESS")]
    pub mac: Option<String>,
    /// Frames that each of its two rings holds: a power of two, 16 to 32768 [default: 512]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(16..=32768))]
    pub slots: Option<u32>,
    /// Bytes that a slot of a ring holds, a multiple of 64, 64 to 65536; longer frames take several
    /// [default: 2048, or more if the network's packets are longer]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(64..=65536))]
    pub slot_size: Option<u32>,
    /// User and group that may attach beside root, in numbers
    #[arg(long, value_name = "UID[:GID]")]
    pub owner: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum PortCommand {
    /// Make a memory port of a network and print its socket's path
    ///
    /// A program of this host attaches there, one at a time, and shares packet rings with the
    /// network's switch: `slipway pktgen`, or any that uses the crate slipway-port or the C header
    /// slipway_port.h. The port stays until `port rm`, also over restarts of the daemon; its
    /// programs then attach anew.
    Create(PortArgs),
    /// Remove memory ports, also under their programs
    Rm {
        /// Names
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// List ports with their addresses
    Ls {
        /// Only of this network, or only this port: a sandbox, or a name or number as the list
        /// prints it; NETWORK/PORT if it is in several
        #[arg(value_name = "NETWORK|PORT")]
        only: Option<String>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Print what passed each port, and what was dropped and why
    Stats {
        /// Only of this network, or only this port: a sandbox, or a name or number as `port ls`
        /// prints it; NETWORK/PORT if it is in several
        #[arg(value_name = "NETWORK|PORT")]
        only: Option<String>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Make a port's link worse, as `tc netem` does: lose, delay or slow down its frames
    ///
    /// It lasts until --clear, until the port goes, or until the daemon ends. What is dropped is
    /// counted: `port stats` has it under loss and queue.
    Impair(ImpairArgs),
    /// Capture what passes a port, as a pcapng file, until Ctrl-C
    ///
    /// Frames are captured as whoever is at the port sends and receives them: with `port impair`,
    /// before and after what that does. Capturing slows nothing; frames that there is no room for
    /// are counted.
    Capture(CaptureArgs),
    /// Count what passes a port by kind, and print the headers of some of it, until Ctrl-C
    Trace(TraceArgs),
    /// Print all that is known of ports, as JSON: addresses, settings, what passed; of an e1000
    /// also exits by register, kicks and interrupts
    Inspect {
        /// Ports: sandboxes, or names or numbers as `port ls` prints them; NETWORK/PORT if one is
        /// in several
        #[arg(required = true)]
        ports: Vec<String>,
        #[command(flatten)]
        json: AlwaysJson,
    },
    /// Change settings of a port, as `ip link set … vf` does, until its sandbox ends; what is not
    /// named stays as it is
    Set(PortSetArgs),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switched {
    On,
    Off,
}

impl Switched {
    /// Returns whether it is on.
    pub fn is_on(self) -> bool {
        self == Self::On
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PortLinkArg {
    /// The peer has a carrier while its network is there
    Auto,
    /// The peer has a carrier even when its network is gone
    On,
    /// The peer has no carrier, and nothing passes
    Off,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("setting").required(true).multiple(true))]
pub struct PortSetArgs {
    /// Port: a sandbox, or a name or number as `port ls` prints it; NETWORK/PORT if it is in
    /// several
    pub port: String,
    /// Drop frames from other addresses than the port's own, MAC and IP
    #[arg(
        long,
        visible_alias = "spoof-check",
        value_enum,
        group = "setting",
        value_name = "on|off"
    )]
    pub mac_spoof_check: Option<Switched>,
    /// Give it frames for stations that nobody knows, and let it advertise routes
    #[arg(long, value_enum, group = "setting", value_name = "on|off")]
    pub trust: Option<Switched>,
    /// All of its frames are of this VLAN, and have no tag; with "none" it has its own tags
    #[arg(long, value_name = "N|none", value_parser = parse_vlan, group = "setting")]
    pub vlan: Option<u32>,
    /// State of its link
    #[arg(long, value_enum, group = "setting", value_name = "auto|on|off")]
    pub link: Option<PortLinkArg>,
    /// Most that it may send, bits per second, as 100Mbit
    #[arg(long, value_name = "RATE|none", value_parser = parse_max_rate, group = "setting")]
    pub max_rate: Option<MaxRate>,
    /// Most that it receives, bits per second; what comes faster waits for some ms, and is dropped
    /// if it would wait for longer
    #[arg(long, value_name = "RATE|none", value_parser = parse_max_rate, group = "setting")]
    pub receive_rate: Option<MaxRate>,
}

/// A direction, as the program or VM at the port sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Direction {
    /// Frames that it sends and frames that it receives
    Both,
    /// Frames that it sends
    Sent,
    /// Frames that it receives
    Received,
}

#[derive(Debug, Args)]
pub struct ImpairArgs {
    /// Port: a sandbox, or a name or number as `port ls` prints it; NETWORK/PORT if it is in
    /// several
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
    /// Port: a sandbox, or a name or number as `port ls` prints it; NETWORK/PORT if it is in
    /// several
    pub port: String,
    /// File to write, in pcapng; - is standard output, as for `| tcpdump -r -`
    #[arg(short, long, value_name = "FILE", default_value = "-", value_hint = ValueHint::FilePath)]
    pub write: PathBuf,
    /// Most bytes of each frame [default: all]
    #[arg(
        short,
        long,
        value_name = "BYTES",
        value_parser = clap::value_parser!(u32).range(1..=262_144),
    )]
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
    /// Port: a sandbox, or a name or number as `port ls` prints it; NETWORK/PORT if it is in
    /// several
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
