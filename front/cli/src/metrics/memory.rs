//! Metrics of the pool of memory.

use std::fmt;

use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;
use slipway_plane_api::v1;

use super::encoding::{counters, gauges, single};

/// Encodes the memory of the pool by owner, by the state of its pages and by NUMA node, and what
/// the pool has done.
pub(super) fn encode(to: &mut DescriptorEncoder<'_>, pool: &v1::Pool) -> fmt::Result {
    let bytes = Some(&Unit::Bytes);
    let owners = [("free", pool.free_bytes), ("lent", pool.lent_bytes)];
    let owners = owners.map(|(owner, bytes)| ([("owner", owner)], bytes));
    gauges(to, ("memory_pool", "Memory of the pool, by owner", bytes), owners)?;
    let states = [
        ("absent", pool.absent_bytes),
        ("dirty", pool.dirty_bytes),
        ("busy", pool.busy_bytes),
        ("untouched", pool.untouched_bytes),
        ("clean", pool.clean_bytes),
    ];
    let states = states.map(|(state, bytes)| ([("state", state)], bytes));
    gauges(
        to,
        ("memory_pool_pages", "Memory of the pool, by the state of its pages", bytes),
        states,
    )?;
    let help = "Memory of the pool that is of pages of 2 MiB";
    gauges(to, ("memory_pool_huge", help, bytes), single(pool.huge_bytes))?;
    let help = "Sandboxes that have memory of the pool";
    gauges(to, ("memory_pool_sandboxes", help, None), single(pool.sandboxes))?;
    counters(to, ("memory_pool_faults", "Page faults that the pool served"), single(pool.faults))?;
    let help = "Bytes that the pool zeroed before anybody asked for them";
    counters(to, ("memory_pool_zeroed_ahead_bytes", help), single(pool.zeroed_ahead_bytes))?;
    let help = "Memories that are ready for forks of templates";
    gauges(to, ("memory_pool_spare_forks", help, None), single(pool.spare_forks))?;
    let help = "Pages of the memories that are ready for forks of templates";
    gauges(to, ("memory_pool_spare_pages", help, bytes), single(pool.spare_pages_bytes))?;
    let help = "Forks of templates that were given memory which was ready";
    counters(to, ("memory_pool_spare_forks_given", help), single(pool.spare_forks_given))?;
    encode_nodes(to, &pool.nodes)
}

/// Encodes the memory on each NUMA node. A host with one node has none of these.
fn encode_nodes(to: &mut DescriptorEncoder<'_>, nodes: &[v1::PoolNode]) -> fmt::Result {
    let names: Vec<String> = nodes.iter().map(|one| one.node.to_string()).collect();
    let all = names.iter().zip(nodes).flat_map(|(name, one)| {
        let labels = |owner| [("node", name.as_str()), ("owner", owner)];
        [(labels("free"), one.free_bytes), (labels("lent"), one.lent_bytes)]
    });
    let help = "Memory of the pool on a NUMA node, by owner";
    gauges(to, ("memory_pool_node", help, Some(&Unit::Bytes)), all)
}
