//! `slipway metrics`: the node's figures in the text format of OpenMetrics, which Prometheus reads.
//!
//! The figures are asked of the daemon for each answer, so nothing is kept here, and a server of
//! metrics can be restarted at any time. It never starts a daemon.

mod encoding;
mod figures;
mod functions;
mod memory;
mod reactors;
mod serve;
mod served;
mod sockets;

use anyhow::{Context, Result, bail};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use slipway_runtime::Config;

use self::figures::Figures;
use crate::args::MetricsArgs;
use crate::client;

/// Runs `slipway metrics`.
pub async fn metrics(config: &Config, args: &MetricsArgs) -> Result<i32> {
    match args.listen {
        Some(address) => serve::serve(config, address).await,
        None => {
            crate::out::print(format_args!("{}", text(config).await?));
            Ok(0)
        }
    }
}

/// Asks the daemon and formats its figures.
///
/// # Errors
/// If no daemon runs, or it does not answer.
async fn text(config: &Config) -> Result<String> {
    // In a pod of Kubernetes, the node's settings are not there, and so its data directory unknown.
    let Some((channel, _)) = client::connect_any(config).await? else {
        bail!("no daemon runs at {}; `slipway daemon` starts one", config.socket().display());
    };
    let mut registry = Registry::with_prefix("slipway");
    registry.register_collector(Box::new(Figures::ask(channel, config).await?));
    let mut text = String::new();
    encode(&mut text, &registry).context("cannot format the figures")?;
    Ok(text)
}
