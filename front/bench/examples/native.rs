//! Measures the floor and any vfio-user NVMe targets, in turn: `cargo run --release -p
//! slipway-bench --example native -- [NAME=SOCKET]… [WORKLOAD]…`.
//!
//! Quicker to build than `slipway bench block --native`, which also starts targets of its own.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use slipway_bench::block::native::{Bare, Cpus, Session};
use slipway_bench::block::{BlockReport, BlockSubject, Plan, Workload, block_table, timed};
use slipway_bench::{Environment, Times};

const DISK: u64 = 64 << 20;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (targets, names): (Vec<&String>, _) =
        arguments.iter().partition(|argument| argument.contains('='));
    let workloads = names.iter().map(|name| name.parse().map_err(anyhow::Error::msg));
    let mut workloads: Vec<Workload> = workloads.collect::<Result<_>>()?;
    if workloads.is_empty() {
        let usual = ["randread-4k-d1", "randwrite-4k-d1", "randread-4k-d32", "randread-128k-d32"];
        workloads = usual.iter().filter_map(|name| name.parse().ok()).collect();
    }
    let cpus = Cpus::split(1)?;
    let times = Times { warm_up: Duration::from_millis(100), time: Duration::from_millis(500) };
    let bare = Box::new(Bare::new(DISK, cpus.clone()));
    let mut subjects: Vec<Box<BlockSubject>> = vec![timed(bare, times)];
    for target in targets {
        let (name, path) = target.split_once('=').context("NAME=SOCKET")?;
        let mut session = Session::connect(name, Path::new(path), cpus.clone(), &workloads)?;
        session.fill()?;
        subjects.push(timed(Box::new(session), times));
    }
    let plan = Plan::timed(workloads, 5, times);
    let environment = Environment { accelerator: "none".into(), ..Environment::default() };
    let command = arguments.join(" ");
    let mut report = BlockReport::take(environment, command, plan, &mut subjects, |_| {});
    report.extra.disk = "the targets'".to_owned();
    print!("{}", block_table(&report, false));
    Ok(())
}
