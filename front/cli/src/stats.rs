//! `slipway stats`: the figures of running sandboxes.
//!
//! A new figure is a field of `StatsReply` in `sandbox.proto`, which `stats` of `sandbox/runtime`
//! (`service`) fills in. One that the guest knows is a field of `StatsReply` in `agent.proto` too,
//! which the agent's `stats` fills in; an earlier agent leaves it 0. `stats_json` has every figure
//! but those of `group`, which only containerd gets; `HEADER` and `stats_row` have those of the
//! table, which the tests below read. containerd's form of them is in `front/shim` (`stats`).
//!
//! A figure of a container's control group is a field of `GroupStats`, or of a message in it, in
//! both protos. `group.rs` of `sandbox/agent` reads it, and `service/groups.rs` of
//! `sandbox/runtime` passes it on.
//!
//! `docs/observe.md` or the page of the figure's subject says what it counts. A figure for
//! monitoring is a metric as well: `metrics/figures.rs`. `12-pods.sh` of `tests/e2e` reads
//! `slipway stats --json`.

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::Result;
use slipway_runtime::{SandboxClient, v1};

use crate::args::StatsArgs;
use crate::client::refused;
use crate::manage::{list, named, runs};
use crate::out::FAILURE;
use crate::size::show;
use crate::table::table;

/// The header of the table.
const HEADER: [&str; 8] = [
    "NAME",
    "VMM CPU",
    "VMM MEMORY",
    "GUEST MEMORY",
    "ROOT LAYERS",
    "PROCESSES",
    "READ",
    "WRITTEN",
];

/// Runs `slipway stats`. Returns the exit status: 1 if a sandbox that was named has no figures.
pub async fn stats(mut client: SandboxClient, args: &StatsArgs) -> Result<i32> {
    loop {
        let rows = measure(&mut client, &args.names).await?;
        if is_refused(&args.names, rows.len()) {
            return Ok(FAILURE);
        }
        if args.json {
            crate::out::json(&rows.iter().map(stats_json).collect::<Vec<_>>())?;
        } else {
            if args.follow && std::io::stdout().is_terminal() {
                // Escape sequences: cursor home, clear the screen.
                crate::out::draw(format_args!("\x1b[H\x1b[2J"));
            }
            let rows: Vec<_> = rows.iter().map(stats_row).collect();
            crate::out::print(format_args!("{}", table(HEADER, &rows)));
        }
        if !args.follow {
            return Ok(if rows.len() < args.names.len() { FAILURE } else { 0 });
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
}

/// Returns whether sandboxes were named and none of them has figures: their errors say all.
fn is_refused(names: &[String], rows: usize) -> bool {
    rows == 0 && !names.is_empty()
}

async fn measure(
    client: &mut SandboxClient,
    names: &[String],
) -> Result<Vec<(String, v1::StatsReply)>> {
    let wanted = if names.is_empty() {
        let all = list(client).await?;
        all.into_iter().filter(runs).map(|one| one.name).collect()
    } else {
        names.to_vec()
    };
    let mut rows = Vec::new();
    for name in wanted {
        match client.stats(named(&name)).await {
            Ok(reply) => rows.push((name, reply.into_inner())),
            // A sandbox that has just ended must not hide the figures of the others.
            Err(status) if names.is_empty() => tracing::debug!(%status, name, "no figures"),
            Err(status) => crate::complain(&refused(status)),
        }
    }
    Ok(rows)
}

fn stats_row((name, stats): &(String, v1::StatsReply)) -> [String; 8] {
    let used = stats.memory_total_bytes.saturating_sub(stats.memory_available_bytes);
    [
        name.clone(),
        format!("{:.1} s", stats.vmm_cpu_ns as f64 / 1e9),
        show(stats.vmm_resident_bytes),
        format!("{} of {}", show(used), show(stats.memory_total_bytes)),
        layers(stats),
        stats.processes.to_string(),
        show(stats.read_bytes),
        show(stats.written_bytes),
    ]
}

/// Formats the memory of root layers with its bound: "1.0 MiB of 4.0 GiB". Containers of pods have
/// none of their own.
fn layers(stats: &v1::StatsReply) -> String {
    match (stats.layers_bytes, stats.layers_limit_bytes) {
        (0, 0) => String::new(),
        (held, 0) => show(held),
        (held, most) => format!("{} of {}", show(held), show(most)),
    }
}

fn stats_json((name, stats): &(String, v1::StatsReply)) -> serde_json::Value {
    serde_json::json!({
        "name": name,
        "vmm_cpu_ns": stats.vmm_cpu_ns,
        "vmm_resident_bytes": stats.vmm_resident_bytes,
        "memory_total_bytes": stats.memory_total_bytes,
        "memory_available_bytes": stats.memory_available_bytes,
        "guest_cpu_busy_ns": stats.guest_cpu_busy_ns,
        "processes": stats.processes,
        "read_bytes": stats.read_bytes,
        "written_bytes": stats.written_bytes,
        "reads": stats.reads,
        "writes": stats.writes,
        "layers_bytes": stats.layers_bytes,
        "layers_limit_bytes": stats.layers_limit_bytes,
        "layers_refused_writes": stats.layers_refused_writes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_table_is_of_a_node_where_nothing_runs() {
        let names = ["nosuch".to_owned()];
        assert!(is_refused(&names, 0) && !is_refused(&names, 1) && !is_refused(&[], 0));
    }

    #[test]
    fn root_layers_are_shown_with_their_bound() {
        let shown = |layers_bytes, layers_limit_bytes| {
            layers(&v1::StatsReply { layers_bytes, layers_limit_bytes, ..Default::default() })
        };
        assert_eq!(shown(0, 0), "");
        assert_eq!(shown(1 << 20, 0), show(1 << 20));
        assert_eq!(shown(0, 1 << 30), format!("{} of {}", show(0), show(1 << 30)));
    }
}
