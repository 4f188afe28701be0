//! `slipway socket …`

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

/// Where an engine's socket is unless somebody says otherwise.
pub const ENGINE: &str = "/run/slipway/socket.sock";

#[derive(Debug, Subcommand)]
pub enum SocketCommand {
    /// Run the engine in the foreground
    Engine(SocketEngineArgs),
}

#[derive(Debug, Args)]
pub struct SocketEngineArgs {
    /// Path of its socket
    #[arg(long, value_name = "PATH", env = "SLIPWAY_SOCKET", default_value = ENGINE, value_hint = ValueHint::FilePath)]
    pub socket: PathBuf,
    /// End when the last program that attached has ended
    #[arg(long)]
    pub ends_when_idle: bool,
}
