//! `slipway pool`: prints the figures of the pool of memory.

use anyhow::Result;
use slipway_plane_api::v1;
use slipway_runtime::Config;

use crate::args::{NodeArgs, PoolArgs};
use crate::client::{answer, connect_plane};
use crate::size::show;
use crate::table::table;

/// Runs `slipway pool`.
pub async fn pool(node: &NodeArgs, config: &Config, args: &PoolArgs) -> Result<i32> {
    let mut plane = connect_plane(node, config).await?;
    let pool = answer(plane.get_pool(v1::GetPoolRequest {}).await)?.pool;
    if args.json {
        crate::out::json(&pool.as_ref().map(as_json))?;
        return Ok(0);
    }
    match pool {
        Some(pool) => {
            crate::out::print(format_args!("{}", table(["FIGURE", "VALUE"], &rows(&pool))))
        }
        None => crate::say!("no pool: the settings do not say memory = \"pool\""),
    }
    Ok(0)
}

/// Returns the sizes with their names in JSON.
fn sizes(pool: &v1::Pool) -> [(&'static str, u64); 10] {
    [
        ("free_bytes", pool.free_bytes),
        ("lent_bytes", pool.lent_bytes),
        ("huge_bytes", pool.huge_bytes),
        ("absent_bytes", pool.absent_bytes),
        ("dirty_bytes", pool.dirty_bytes),
        ("busy_bytes", pool.busy_bytes),
        ("untouched_bytes", pool.untouched_bytes),
        ("clean_bytes", pool.clean_bytes),
        ("zeroed_ahead_bytes", pool.zeroed_ahead_bytes),
        ("spare_pages_bytes", pool.spare_pages_bytes),
    ]
}

/// Returns the counts with their names in JSON.
fn counts(pool: &v1::Pool) -> [(&'static str, u64); 4] {
    [
        ("sandboxes", pool.sandboxes),
        ("faults", pool.faults),
        ("spare_forks", pool.spare_forks),
        ("spare_forks_given", pool.spare_forks_given),
    ]
}

fn rows(pool: &v1::Pool) -> Vec<[String; 2]> {
    let word = |name: &str| name.trim_end_matches("_bytes").replace('_', " ");
    let sizes = sizes(pool).map(|(name, bytes)| [word(name), show(bytes)]);
    let counts = counts(pool).map(|(name, count)| [word(name), count.to_string()]);
    let nodes = pool.nodes.iter().flat_map(|part| {
        let name = |what| format!("NUMA node {}, {what}", part.node);
        [[name("free"), show(part.free_bytes)], [name("lent"), show(part.lent_bytes)]]
    });
    sizes.into_iter().chain(counts).chain(nodes).collect()
}

fn as_json(pool: &v1::Pool) -> serde_json::Value {
    let figures = sizes(pool).into_iter().chain(counts(pool));
    let figures = figures.map(|(name, value)| (name.to_owned(), value.into()));
    let nodes = pool.nodes.iter().map(|part| {
        let v1::PoolNode { node, free_bytes, lent_bytes } = part;
        serde_json::json!({ "node": node, "free_bytes": free_bytes, "lent_bytes": lent_bytes })
    });
    let nodes = ("nodes".to_owned(), nodes.collect::<Vec<_>>().into());
    figures.chain([nodes]).collect::<serde_json::Map<_, _>>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_shown_if_there_are_several() {
        let nodes = [(0, 1 << 30), (1, 0)];
        let nodes =
            nodes.map(|(node, free_bytes)| v1::PoolNode { node, free_bytes, lent_bytes: 0 });
        let pool = v1::Pool { nodes: nodes.to_vec(), ..Default::default() };
        let first = ["NUMA node 0, free".to_owned(), show(1 << 30)];
        assert!(rows(&pool).contains(&first), "{:?}", rows(&pool));
        assert_eq!(rows(&pool).len(), rows(&v1::Pool::default()).len() + 4);
        assert_eq!(as_json(&pool)["nodes"][0]["free_bytes"], 1 << 30);
        assert_eq!(as_json(&v1::Pool::default())["nodes"].as_array().map(Vec::len), Some(0));
    }

    #[test]
    fn memory_that_is_ready_for_forks_is_shown() {
        let pool = v1::Pool { spare_forks: 2, spare_forks_given: 5, ..v1::Pool::default() };
        let pool = v1::Pool { spare_pages_bytes: 8 << 20, ..pool };
        let pages = show(8 << 20);
        for row in
            [["spare forks", "2"], ["spare forks given", "5"], ["spare pages", pages.as_str()]]
        {
            assert!(rows(&pool).contains(&row.map(str::to_owned)), "{row:?}: {:?}", rows(&pool));
        }
        assert_eq!(as_json(&pool)["spare_pages_bytes"], 8 << 20);
    }
}
