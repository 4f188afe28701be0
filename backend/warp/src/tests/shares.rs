//! Edge cases of the scheduler: closed chains, removed tenants, failed jobs, caps.

use std::time::Duration;

use crate::Class;
use crate::share::{LimitedBy, Scheduler, ShareError, TenantOptions};

const NOW: Duration = Duration::from_secs(1);
const BUSY: Duration = Duration::from_micros(10);

fn capped(cap: u64) -> TenantOptions {
    TenantOptions { cap: Some(cap), ..TenantOptions::default() }
}

#[test]
fn what_cannot_be_is_refused() {
    let mut scheduler: Scheduler<u32> = Scheduler::new();
    let core = scheduler.add_resource("core", 1);
    let copy = scheduler.add_executor("copy", Class::F, core, 1);
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-9, 1e9] {
        let options = TenantOptions { weight, cap: None };
        assert_eq!(scheduler.add_tenant(options), Err(ShareError::Weight));
    }
    let tenant = scheduler.add_tenant(TenantOptions::default()).unwrap();
    assert_eq!(scheduler.open(tenant, &[]), Err(ShareError::Stages));
    assert_eq!(scheduler.open(tenant, &[copy; 9]), Err(ShareError::Stages));
    let mut other: Scheduler<u32> = Scheduler::new();
    let there = other.add_resource("core", 1);
    other.add_executor("a", Class::F, there, 1);
    let foreign = other.add_executor("b", Class::F, there, 1);
    assert_eq!(scheduler.open(tenant, &[copy, foreign]), Err(ShareError::Stages));
    let chain = scheduler.open(tenant, &[copy]).unwrap();
    scheduler.remove_tenant(tenant);
    assert_eq!(scheduler.open(tenant, &[copy]), Err(ShareError::NoTenant));
    assert_eq!(scheduler.set_options(tenant, capped(1)), Err(ShareError::NoTenant));
    assert_eq!(scheduler.push(chain, 1, 1), Err(ShareError::NoChain));
    assert!(scheduler.next(core, NOW).is_none());
}

#[test]
fn what_a_chain_queued_comes_back_with_its_end_and_its_jobs_after_it() {
    let mut scheduler = Scheduler::new();
    let (core, link) = (scheduler.add_resource("core", 2), scheduler.add_resource("link", 1));
    let seal = scheduler.add_executor("seal", Class::I, core, 1_000_000_000);
    let send = scheduler.add_executor("send", Class::Z, link, 1_000_000_000);
    let tenant = scheduler.add_tenant(TenantOptions::default()).unwrap();
    let chain = scheduler.open(tenant, &[seal, send]).unwrap();
    (0..5).for_each(|item| scheduler.push(chain, 100, item).unwrap());
    let (first, second) = (scheduler.next(core, NOW).unwrap(), scheduler.next(core, NOW).unwrap());
    assert!(scheduler.next(core, NOW).is_none(), "two at once");
    assert_eq!((first.item, second.item, first.executor), (0, 1, seal));
    assert_eq!(scheduler.done(first, 100, BUSY, NOW), None);
    // Items nearest to the chain's end come first.
    assert_eq!(scheduler.close(chain), [0, 2, 3, 4]);
    assert_eq!(scheduler.done(second, 100, BUSY, NOW), Some(1));
    assert!(scheduler.next(core, NOW).is_none() && scheduler.next(link, NOW).is_none());
    // A new chain in the same slot has another id: the old id is invalid.
    let next = scheduler.open(tenant, &[send]).unwrap();
    assert_eq!(scheduler.push(chain, 100, 9), Err(ShareError::NoChain));
    scheduler.push(next, 100, 10).unwrap();
    let ticket = scheduler.next(link, NOW).unwrap();
    assert_eq!(scheduler.remove_tenant(tenant), [] as [i32; 0]);
    assert_eq!(scheduler.failed(ticket, BUSY, NOW), 10);
    // Both resources have room for the next tenant's jobs.
    let tenant = scheduler.add_tenant(TenantOptions::default()).unwrap();
    let chain = scheduler.open(tenant, &[seal]).unwrap();
    (0..3).for_each(|item| scheduler.push(chain, 1, item).unwrap());
    let taken = [scheduler.next(core, NOW), scheduler.next(core, NOW), scheduler.next(core, NOW)];
    assert_eq!(taken.map(|ticket| ticket.map(|ticket| ticket.item)), [Some(0), Some(1), None]);
}

#[test]
fn a_failed_job_makes_room_behind_it() {
    let mut scheduler = Scheduler::new();
    let (core, link) = (scheduler.add_resource("core", 100), scheduler.add_resource("link", 1));
    let seal = scheduler.add_executor("seal", Class::I, core, 1_000_000_000);
    let send = scheduler.add_executor("send", Class::Z, link, 1_000_000_000);
    let tenant = scheduler.add_tenant(TenantOptions::default()).unwrap();
    let chain = scheduler.open(tenant, &[seal, send]).unwrap();
    (0..20).for_each(|item| scheduler.push(chain, 1 << 20, item).unwrap());
    let mut taken = Vec::new();
    while let Some(ticket) = scheduler.next(core, NOW) {
        taken.push(ticket);
    }
    assert_eq!(taken.len(), 4, "no more than the next stage takes");
    let failed = taken.pop().unwrap();
    assert_eq!(scheduler.failed(failed, BUSY, NOW), 3);
    assert_eq!(scheduler.next(core, NOW).unwrap().item, 4);
    assert!(scheduler.next(core, NOW).is_none());
}

#[test]
fn a_cap_holds_its_tenant_back_but_not_what_is_under_way() {
    let mut scheduler = Scheduler::new();
    let core = scheduler.add_resource("core", 1);
    let (seal, send) = (
        scheduler.add_executor("seal", Class::I, core, 1_000_000_000),
        scheduler.add_executor("send", Class::Z, core, 1_000_000_000),
    );
    let tenant = scheduler.add_tenant(capped(1_000_000)).unwrap();
    let chain = scheduler.open(tenant, &[seal, send]).unwrap();
    (0..4).for_each(|item| scheduler.push(chain, 10_000, item).unwrap());
    let ticket = scheduler.next(core, NOW).unwrap();
    assert!(scheduler.done(ticket, 10_000, BUSY, NOW).is_none());
    // The burst is used up. The first job still goes on to its second stage; the second job waits.
    let ticket = scheduler.next(core, NOW).unwrap();
    assert_eq!((ticket.item, ticket.executor), (0, send));
    assert_eq!(scheduler.done(ticket, 10_000, BUSY, NOW), Some(0));
    assert!(scheduler.next(core, NOW).is_none());
    let due = scheduler.due(core).unwrap();
    assert!(due > NOW && due < NOW + Duration::from_millis(11));
    let ticket = scheduler.next(core, due).unwrap();
    assert_eq!(ticket.item, 1);
    scheduler.done(ticket, 10_000, BUSY, due);
    let ticket = scheduler.next(core, due).unwrap();
    scheduler.done(ticket, 10_000, BUSY, due);
    assert!(scheduler.next(core, due).is_none());
    // Lifting the cap releases the tenant at once.
    scheduler.set_options(tenant, TenantOptions::default()).unwrap();
    assert_eq!(scheduler.next(core, due).unwrap().item, 2);
}

#[test]
fn the_snapshot_says_who_is_limited_by_what() {
    let mut scheduler = Scheduler::new();
    let core = scheduler.add_resource("core 0", 1);
    let copy = scheduler.add_executor("copy", Class::F, core, 1_000_000_000);
    let options = [TenantOptions::default(), capped(100_000_000), TenantOptions::default()];
    let chains = options.map(|options| {
        let tenant = scheduler.add_tenant(options).unwrap();
        scheduler.open(tenant, &[copy]).unwrap()
    });
    let (mut now, busy) = (NOW, Duration::from_micros(10));
    let mut quiet = 0;
    while now < NOW * 3 {
        for chain in &chains[..2] {
            while scheduler.waiting(*chain) < 4 {
                scheduler.push(*chain, 10_000, ()).unwrap();
            }
        }
        // The third tenant sends about a tenth of what it could.
        if now.as_micros() / 300 > quiet {
            quiet = now.as_micros() / 300;
            scheduler.push(chains[2], 10_000, ()).unwrap();
        }
        now += busy;
        if let Some(ticket) = scheduler.next(core, now) {
            scheduler.done(ticket, 10_000, busy, now);
        }
    }
    let shares = scheduler.shares(now);
    let close = |a: f64, b: f64| (a / b - 1.0).abs() < 0.05;
    let expected =
        [(866e6, LimitedBy::Resource(core)), (100e6, LimitedBy::Cap), (33.3e6, LimitedBy::Demand)];
    for (share, (rate, limited_by)) in shares.tenants.iter().zip(expected) {
        assert_eq!(share.limited_by, limited_by, "{share:?}");
        assert!(close(share.rate, rate) && close(share.formula, rate), "{share:?}");
        assert_eq!((share.executors.len(), &*share.executors[0].name), (1, "copy"));
        assert_eq!(share.executors[0].bytes, share.bytes);
    }
    assert!(close(shares.capacities[0].1, 1e9) && shares.resources == ["core 0"]);
}
