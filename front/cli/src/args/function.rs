//! Arguments of the commands about functions.
//!
//! A new option of `function serve` is a field of [`FunctionServeArgs`]. `limits`, `bounds` or
//! `plan` of `function/serve.rs` checks it and passes it on: the first to `Limits` of the
//! scheduler, the second to what a request may be, the third to the sandboxes. What a command is
//! told of its request is in `environment` of `function/http.rs`. Tests: those of `serve.rs`, and
//! `tests/e2e/18-function.sh`; `docs/functions.md` has it, and `SECURITY.md` if it opens something.

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Args, Subcommand, value_parser};

use super::{MachineArgs, Pull};
use crate::size::{parse_duration, parse_size};
use crate::target::Target;

#[derive(Debug, Subcommand)]
pub enum FunctionCommand {
    /// Serve a function until the command is ended: each HTTP request runs COMMAND in a replica of
    /// IMAGE, with the request's body as its standard input, and is answered with its output
    ///
    /// An idle replica has the request; else a sandbox gets one more replica; else there is a new
    /// sandbox; else the request waits. SIGTERM and SIGINT let running invocations end, and remove
    /// all sandboxes. After a crash the next server of the same name takes them over.
    Serve(Box<FunctionServeArgs>),
    /// List the functions that are served, with their sandboxes, replicas and invocations
    Ls {
        /// As JSON, with the figures of each sandbox
        #[arg(long)]
        json: bool,
    },
    /// Invoke a function that this node serves, and print its answer
    Invoke(FunctionInvokeArgs),
    /// Send requests to a URL, and tell how long the answers took
    Load(FunctionLoadArgs),
}

#[derive(Debug, Args)]
pub struct FunctionServeArgs {
    /// Name of the function: at most 40 letters, digits, "-" and "_"
    pub name: String,
    /// Image of the replicas: a reference ("debian:12"), or a digest in the cache
    pub image: String,
    /// Command of an invocation, and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    pub command: Vec<String>,
    /// Where requests are accepted; there is no password
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,
    /// The most invocations in a replica at once
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = value_parser!(u32).range(1..=47))]
    pub concurrency: u32,
    /// The most replicas in a sandbox; with 1, each replica has a sandbox of its own
    #[arg(long, value_name = "N", default_value_t = 8,
          value_parser = value_parser!(u32).range(1..=24))]
    pub replicas_per_sandbox: u32,
    /// Sandboxes that are made ahead and stay, without replicas where there are no requests
    #[arg(long, value_name = "N", default_value_t = 0,
          value_parser = value_parser!(u32).range(..=160))]
    pub min_sandboxes: u32,
    /// The most sandboxes
    #[arg(long, value_name = "N", default_value_t = 4,
          value_parser = value_parser!(u32).range(1..=160))]
    pub max_sandboxes: u32,
    /// The time after which an idle replica is removed, and the last one's sandbox with it
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub keep_alive: Duration,
    /// The most requests that wait for a replica; further ones are answered with 503
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = value_parser!(u32).range(1..=4096))]
    pub queue: u32,
    /// The longest time that a request waits for a replica; then it is answered with 503
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    pub queue_time: Duration,
    /// The longest time of an invocation; then it is answered with 504, and its replica removed
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub timeout: Duration,
    /// Run COMMAND once in each sandbox, up to where it stops itself by SIGSTOP, and answer
    /// requests with forks of it, which read the request's variables at descriptor 3
    #[arg(long, conflicts_with = "replica_memory")]
    pub zygote: bool,
    /// The time in which COMMAND stops itself, at most a minute; one that does not is started anew
    /// for each request
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_ready,
          requires = "zygote")]
    pub ready_timeout: Duration,
    /// The most bytes of a request's body
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = parse_size)]
    pub max_body: u64,
    /// The most bytes of an answer
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = parse_size)]
    pub max_answer: u64,
    /// Limit of the memory of a replica and its invocations [default: the sandbox's memory]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub replica_memory: Option<u64>,
    /// Give each replica SIZE of memory of its own, which is its limit, too: it comes before the
    /// replica begins, and goes back to the host with it; on slipway-vmm only [default: the
    /// sandbox's memory is for all]
    #[arg(long, value_name = "SIZE", value_parser = parse_size,
          conflicts_with_all = ["replica_memory", "max_memory", "zygote"])]
    pub bind_memory: Option<u64>,
    /// Environment of the command, NAME=VALUE; NAME alone takes the value from here
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// Command of the image that sleeps in a replica while nothing is invoked, its words parted by
    /// spaces; "": the image's own command
    #[arg(long, value_name = "COMMAND", default_value = "sleep 2147483647")]
    pub hold_with: String,
    /// Template that sandboxes begin with; "auto": one that the node makes after the first start;
    /// "none": they boot
    #[arg(long, value_name = "TEMPLATE|auto|none", default_value = "auto")]
    pub from: String,
    /// Network that the sandboxes join, or "none" [default: default, on a host that has nft and
    /// /dev/net/tun]
    #[arg(long, value_name = "NAME|none")]
    pub network: Option<String>,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// When to fetch the image
    #[arg(long, value_enum, default_value_t = Pull::Missing)]
    pub pull: Pull,
}

/// Reads the time in which a zygote is to stop itself.
fn parse_ready(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        time if time <= Duration::from_secs(60) => Ok(time),
        _ => Err(format!("\"{text}\" is too long: a minute at most")),
    }
}

#[derive(Debug, Args)]
pub struct FunctionInvokeArgs {
    /// Name of the function
    pub name: String,
    /// Standard input of its command; "-": that of this one [default: empty]
    pub data: Option<String>,
}

#[derive(Debug, Args)]
pub struct FunctionLoadArgs {
    /// URL, as http://127.0.0.1:8080/
    pub url: Target,
    /// Send this many requests a second, at equal distances
    #[arg(long, value_name = "N", required_unless_present = "bursts",
          value_parser = value_parser!(u32).range(1..=10_000))]
    pub rate: Option<u32>,
    /// How long to do so
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub duration: Duration,
    /// Then send this many requests at once, and again when all have answers, as 1,2,4,8
    #[arg(long, value_name = "N,…", value_delimiter = ',',
          value_parser = value_parser!(u32).range(1..=4096))]
    pub bursts: Vec<u32>,
    /// Body of the requests [default: empty]
    #[arg(long, value_name = "TEXT")]
    pub data: Option<String>,
    /// The longest time of a request
    #[arg(long, value_name = "TIME", default_value = "120s", value_parser = parse_duration)]
    pub timeout: Duration,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}
