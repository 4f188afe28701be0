//! `slipway socket …`: the socket engine and its tools.

mod cdi;
mod elf;
mod engine;
mod reload;
mod run;
mod show;
mod top;

use std::path::PathBuf;

use anyhow::Result;

use crate::args::{NodeArgs, SocketCommand};
use crate::client;

/// Runs `slipway socket …`.
pub fn command(node: &NodeArgs, command: &SocketCommand) -> Result<i32> {
    let at = |named: &Option<PathBuf>| match named {
        Some(path) => Ok(path.clone()),
        None => client::config(node).map(|config| config.run_dir.join("socket.sock")),
    };
    match command {
        SocketCommand::Run(args) => run::run(args, &at(&args.engine.socket)?),
        SocketCommand::Ls(args) => show::list(args, &at(&args.engine.socket)?),
        SocketCommand::Top(args) => top::top(args, &at(&args.engine.socket)?),
        SocketCommand::Cdi(args) => cdi::describe(args, &at(&args.engine.socket)?),
        SocketCommand::Engine(args) => engine::serve(args, &at(&args.socket)?),
        SocketCommand::Reload { engine } => reload::reload(&at(&engine.socket)?),
        SocketCommand::Check { file } => engine::check(file),
    }
}
