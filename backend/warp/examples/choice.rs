//! What it costs to choose who is next, and to book what came of it.
//!
//!     cargo run --release -p slipway-warp --example choice
//!
//! Prints nanoseconds for a job of one stage (queued, chosen, done) and for one of two, among 1 to 1,000 tenants.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use slipway_warp::Class;
use slipway_warp::share::{ChainId, Scheduler, TenantOptions};

const JOBS: u32 = 1_000_000;

fn main() {
    println!("tenants  one stage  two stages");
    for tenants in [1, 2, 16, 100, 1000] {
        println!("{tenants:7} {:7.0} ns {:8.0} ns", cost(tenants, 1), cost(tenants, 2));
    }
}

/// Nanoseconds for a job of so many stages. Every tenant has one waiting, always.
fn cost(tenants: usize, stages: usize) -> f64 {
    let mut scheduler = Scheduler::new();
    let resources = [scheduler.add_resource("core", 1), scheduler.add_resource("link", 1)];
    let executors = [
        scheduler.add_executor("seal", Class::I, resources[0], 4_000_000_000),
        scheduler.add_executor("transport", Class::Z, resources[1], 12_500_000_000),
    ];
    let chains: Vec<ChainId> = (0..tenants)
        .map(|_| {
            let tenant = scheduler.add_tenant(TenantOptions::default()).unwrap();
            scheduler.open(tenant, &executors[..stages]).unwrap()
        })
        .collect();
    for (at, chain) in chains.iter().enumerate() {
        scheduler.push(*chain, 65_536, at).unwrap();
    }
    let (mut now, busy) = (Duration::from_secs(1), Duration::from_micros(16));
    let begin = Instant::now();
    for _ in 0..JOBS {
        for resource in &resources[..stages] {
            let ticket = scheduler.next(*resource, now).unwrap();
            now += busy;
            if let Some(at) = scheduler.done(ticket, 65_536, busy, now) {
                scheduler.push(chains[at], 65_536, at).unwrap();
            }
        }
    }
    begin.elapsed().as_nanos() as f64 / f64::from(JOBS)
}
