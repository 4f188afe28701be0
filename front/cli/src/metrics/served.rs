//! Metrics of functions that `slipway function serve` serves.
//!
//! Each server is a process of root's, and tells its figures at its own socket.

use std::fmt;
use std::time::Duration;

use prometheus_client::encoding::DescriptorEncoder;
use slipway_runtime::Config;

use super::encoding::{Sum, counters, gauges};
use crate::function::{Status, statuses};

/// The longest wait for all servers, which are asked at the same time.
const PATIENCE: Duration = Duration::from_secs(1);

/// Asks the servers of all functions.
pub(super) async fn ask(config: &Config) -> Vec<Status> {
    // The folder cannot be read: there is no function whose figures are known.
    statuses(config, PATIENCE).await.unwrap_or_default()
}

/// Returns whether the server has told its figures. Those of others are zeros, which would look
/// like a restart.
fn is_up(function: &Status) -> bool {
    matches!(function.state.as_str(), "serving" | "ending")
}

/// Encodes the figures of each function.
pub(super) fn encode(to: &mut DescriptorEncoder<'_>, functions: &[Status]) -> fmt::Result {
    let up = functions.iter();
    let up = up.map(|one| ([("function", one.about.name.as_str())], u64::from(is_up(one))));
    gauges(to, ("function_up", "Whether a function's server answers", None), up)?;
    let known = || functions.iter().filter(|one| is_up(one));
    let present: [Sum<Status>; 4] = [
        ("function_sandboxes", "Sandboxes of a function", |one| one.sandboxes.len() as u64),
        ("function_replicas", "Replicas in a function's sandboxes", |one| one.replicas.into()),
        ("function_running_invocations", "Invocations in replicas", |one| one.busy.into()),
        ("function_waiting_invocations", "Invocations that wait for a replica", |one| {
            one.waiting as u64
        }),
    ];
    for (name, help, value) in present {
        let all = known().map(|one| ([("function", one.about.name.as_str())], value(one)));
        gauges(to, (name, help, None), all)?;
    }
    let sums: [Sum<Status>; 7] = [
        ("function_invocations", "Invocations that a replica was given", |one| one.invocations),
        ("function_failed_invocations", "Invocations that failed in a replica", |one| one.failed),
        ("function_refused_invocations", "Invocations that no replica had", |one| one.refused),
        ("function_forked_invocations", "Invocations that were forks of a zygote", |one| {
            one.forked
        }),
        ("function_made_replicas", "Replicas that were begun", |one| one.replicas_made),
        ("function_removed_replicas", "Replicas that were removed again", |one| one.recycled),
        ("function_made_sandboxes", "Sandboxes that were begun", |one| one.sandboxes_made),
    ];
    for (name, help, value) in sums {
        let all = known().map(|one| ([("function", one.about.name.as_str())], value(one)));
        counters(to, (name, help), all)?;
    }
    Ok(())
}
