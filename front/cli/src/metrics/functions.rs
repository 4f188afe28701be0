//! Metrics of the pools of virtual functions.

use std::fmt;

use prometheus_client::encoding::DescriptorEncoder;
use slipway_plane_api::vf_v1;

use super::encoding::{Sum, counters, gauges};

/// The states of functions, as the plane names them.
const STATES: [&str; 6] = ["ready", "taken", "being reset", "failed", "not answering", "drained"];

/// Encodes the states of each pool's functions, and what has happened to them.
pub(super) fn encode(to: &mut DescriptorEncoder<'_>, pools: &[vf_v1::Pool]) -> fmt::Result {
    encode_states(to, pools)?;
    let sums: [Sum<vf_v1::Pool>; 6] = [
        ("vf_pool_takes", "Functions that were given to an owner", |pool| {
            pool.vfs.iter().map(|vf| vf.takes).sum()
        }),
        ("vf_pool_refusals", "Requests for a function that got none", |pool| pool.refusals),
        ("vf_pool_resets", "Resets and scrubs that ended well", |pool| pool.resets),
        ("vf_pool_failures", "Operations that failed or did not end in time", |pool| pool.failures),
        ("vf_pool_retries", "Tries of functions that had failed", |pool| pool.retries),
        ("vf_pool_unwritten", "Changes that the ledger did not take", |pool| pool.unwritten),
    ];
    for (name, help, value) in sums {
        let all = pools.iter().map(|pool| ([("pool", pool.name.as_str())], value(pool)));
        counters(to, (name, help), all)?;
    }
    Ok(())
}

/// Encodes the number of functions in each state. States without one have a zero, so that no time
/// series ends.
fn encode_states(to: &mut DescriptorEncoder<'_>, pools: &[vf_v1::Pool]) -> fmt::Result {
    let labels = STATES.map(|state| state.replace(' ', "_"));
    let all = pools.iter().flat_map(|pool| {
        STATES.iter().zip(&labels).map(move |(state, label)| {
            let count = pool.vfs.iter().filter(|vf| vf.state == *state).count() as u64;
            ([("pool", pool.name.as_str()), ("state", label.as_str())], count)
        })
    });
    gauges(to, ("vf_pool_functions", "Functions of a pool, by state", None), all)
}
