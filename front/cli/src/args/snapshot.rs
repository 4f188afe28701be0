//! Arguments of the commands about snapshots, and of `slipway fork`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::AlwaysJson;

#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Save a running sandbox, which goes on: `slipway run --from NAME` begins others with it
    Create {
        /// Sandbox: name, id, or the beginning of an id
        sandbox: String,
        /// Name of the snapshot [default: made up]
        name: Option<String>,
    },
    /// List snapshots
    Ls {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove snapshots; what began with one runs on
    Rm {
        /// Names of snapshots
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Copy a snapshot into a directory, for `slipway snapshot import` here or on another node
    Export {
        /// Name of the snapshot
        name: String,
        /// Directory, which is made; one that exists must be empty
        dir: PathBuf,
    },
    /// Copy a snapshot in from a directory that `slipway snapshot export` has filled
    Import {
        /// Directory
        dir: PathBuf,
        /// Name of the snapshot [default: the name that it had]
        name: Option<String>,
    },
    /// Print all that is known of snapshots, as JSON
    Inspect {
        /// Names of snapshots
        #[arg(required = true)]
        names: Vec<String>,
        #[command(flatten)]
        json: AlwaysJson,
    },
}

#[derive(Debug, Args)]
pub struct ForkArgs {
    /// Sandbox: name, id, or the beginning of an id
    pub sandbox: String,
    /// Begin this many sandboxes
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub count: u32,
    /// Name of the new sandbox; with --count, NAME-1 to NAME-N [default: made up]
    #[arg(long)]
    pub name: Option<String>,
    /// Network that the new sandboxes join [default: default, or none if the sandbox has no
    /// interface]
    #[arg(long, value_name = "NAME")]
    pub network: Option<String>,
    /// Have a port of the host lead to one of the new sandbox, as 8080:80, 127.0.0.1:8080:80,
    /// 53:53/udp or 8000-8009:8000-8009; with the sandbox's port alone, any that is free
    #[arg(short, long, value_name = "[[ADDRESS:]HOST:]CONTAINER[/udp]")]
    pub publish: Vec<String>,
    /// Label of the new sandboxes, key=value
    #[arg(short, long, value_name = "KEY=VALUE")]
    pub label: Vec<String>,
    /// Remove each new sandbox when it has ended
    #[arg(long)]
    pub rm: bool,
}
