//! `slipway socket …`: the socket engine, and what people do with it.

mod engine;

use anyhow::Result;

use crate::args::SocketCommand;

/// Runs `slipway socket …`.
pub fn command(command: &SocketCommand) -> Result<i32> {
    match command {
        SocketCommand::Engine(args) => engine::serve(args),
    }
}
