//! `slipway socket …`

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};

use crate::size::parse_duration;

/// Where an engine's policy is.
pub const POLICY: &str = "/etc/slipway/socket.toml";

/// Where container runtimes look for it.
const CDI: &str = "/etc/cdi/slipway.json";

/// Where engines of other nodes are named.
pub const LINKS: &str = "/etc/slipway/links.toml";

#[derive(Debug, Subcommand)]
pub enum SocketCommand {
    /// Run a program whose sockets are devices: it talks to others of this node past the kernel
    ///
    /// The program is not changed: a library in front of the C library takes its calls. What does
    /// not concern another such program goes to the kernel as before, and so does all of a program
    /// that is linked statically or written in Go. Starts an engine if none runs, which ends after
    /// the last program.
    Run(SocketRunArgs),
    /// List programs, listeners and connections of the engine
    Ls(SocketLsArgs),
    /// Show what each tenant sends and receives, live
    Top(SocketTopArgs),
    /// Describe the library and the engine's socket to container runtimes, as a CDI device
    ///
    /// Container runtimes that know the Container Device Interface (Podman, Docker, containerd,
    /// CRI-O) give a container the sockets of this node's engine by `--device
    /// slipway.io/socket=glibc`, or `=musl` for images such as Alpine's. Its tenant is its network
    /// namespace.
    Cdi(SocketCdiArgs),
    /// Run the engine in the foreground
    ///
    /// SIGHUP has it read its policy and its links anew, as `slipway socket reload` does.
    Engine(SocketEngineArgs),
    /// Have the engine read its policy, its links and their certificates anew
    ///
    /// All of it or, if something is wrong, nothing: then the engine goes on as before and this
    /// command says why. Connections that are there stay, but for those through links to engines
    /// that are named no more.
    Reload {
        #[command(flatten)]
        engine: SocketArg,
    },
    /// Check a policy file, and say what is wrong in which line
    Check {
        /// The file; what lies in the folder of the same name that ends with .d belongs to it
        #[arg(value_name = "FILE", default_value = POLICY, value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
}

#[derive(Debug, Args)]
pub struct SocketArg {
    /// Path of the engine's socket [default: socket.sock in the run directory]
    #[arg(
        long = "engine",
        value_name = "PATH",
        env = "SLIPWAY_SOCKET",
        value_hint = ValueHint::FilePath,
    )]
    pub socket: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct SocketRunArgs {
    #[command(flatten)]
    pub engine: SocketArg,
    /// The library [default: beside this program, in ../lib, ../lib/slipway, /usr/lib/slipway]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub library: Option<PathBuf>,
    /// Program and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_hint = ValueHint::CommandWithArguments,
    )]
    pub program: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct SocketCdiArgs {
    #[command(flatten)]
    pub engine: SocketArg,
    /// Where to write the description; "-" prints it
    #[arg(short, long, value_name = "FILE", default_value = CDI, value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
}

#[derive(Debug, Args)]
pub struct SocketLsArgs {
    #[command(flatten)]
    pub engine: SocketArg,
    /// As JSON, with all that is known
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct SocketTopArgs {
    #[command(flatten)]
    pub engine: SocketArg,
    /// Between two looks, as 500ms or 2s
    #[arg(short, long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    pub interval: Duration,
    /// End after so many tables [default: when interrupted]
    #[arg(short = 'n', long, value_name = "N")]
    pub count: Option<u32>,
    /// As JSON: a line for each look
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct SocketEngineArgs {
    /// Path of its socket [default: socket.sock in the run directory]
    #[arg(long, value_name = "PATH", env = "SLIPWAY_SOCKET", value_hint = ValueHint::FilePath)]
    pub socket: Option<PathBuf>,
    /// Rules on who may reach whom across network namespaces; a file that is not there says nobody
    #[arg(long, value_name = "FILE", default_value = POLICY, value_hint = ValueHint::FilePath)]
    pub policy: PathBuf,
    /// Engines of other nodes, and the certificate to show them; without the file there are none
    #[arg(long, value_name = "FILE", default_value = LINKS, value_hint = ValueHint::FilePath)]
    pub links: PathBuf,
    /// Let programs listen that do not show the kernel's own listening socket of the same address,
    /// which proves that the address is theirs; the library shows it
    #[arg(long)]
    pub no_proof: bool,
    /// Sockets that it is prepared for: it wants as many descriptors, and if it has fewer it has
    /// some of them in threads with tables of their own
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    pub sockets: u64,
    /// End when the last program that attached has ended, or when none attaches within a minute
    #[arg(long)]
    pub ends_when_idle: bool,
}
