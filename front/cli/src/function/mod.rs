//! `slipway function`: a named image over HTTP, whose replicas and sandboxes come and go with its
//! invocations.
//!
//! A function is one process, its server, and nothing else: the daemon knows only pods. The server
//! (`serve`) hears of invocations by HTTP (`http`, `seats`) and asks its `dispatcher`, the owner of
//! all state, for a replica. Decisions are made by `scheduler` and `queue`, which know neither
//! sockets nor clocks, and carried out by `fleet`, a client of the daemon that runs each
//! `invocation`, with `zygote` if these are forks. `place` has the files by which root's commands
//! (`ask`) find servers, and `status` the figures that they are told.
//!
//! `load` is the other side: a load of requests to any URL. `exchange` is its client of HTTP, and
//! that of `ask`.

mod ask;
mod dispatcher;
mod exchange;
mod fleet;
mod http;
mod invocation;
mod load;
mod place;
mod queue;
mod scheduler;
mod seats;
mod serve;
mod status;
mod zygote;

use anyhow::Result;
use slipway_runtime::Config;

pub use self::ask::statuses;
pub use self::status::Status;

use crate::args::{FunctionCommand, NodeArgs};

/// Runs a command about functions. Returns the exit status.
pub async fn command(node: &NodeArgs, config: &Config, command: &FunctionCommand) -> Result<i32> {
    match command {
        FunctionCommand::Serve(args) => serve::serve(node, config, args).await,
        FunctionCommand::Ls { json } => ask::list(config, *json).await,
        FunctionCommand::Invoke(args) => ask::invoke(config, args).await,
        FunctionCommand::Load(args) => load::load(args).await,
    }
}
