//! `slipway socket …`: the socket engine, and what people do with it.

mod cdi;
mod elf;
mod engine;
mod run;
mod show;
mod top;

use anyhow::Result;

use crate::args::SocketCommand;

/// Runs `slipway socket …`.
pub fn command(command: &SocketCommand) -> Result<i32> {
    match command {
        SocketCommand::Run(args) => run::run(args),
        SocketCommand::Ls(args) => show::list(args),
        SocketCommand::Top(args) => top::top(args),
        SocketCommand::Cdi(args) => cdi::describe(args),
        SocketCommand::Engine(args) => engine::serve(args),
        SocketCommand::Check { file } => engine::check(file),
    }
}
