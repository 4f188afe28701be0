//! VFs that failed are tried again, and return to the pool when a try succeeds.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

mod devices;

use std::time::{Duration, Instant};

use devices::{Bench, Scripted, owner};
use slipway_vf_pool::{Error, Pool, Retries, Settings, VfState};

/// Longer than any test takes on any machine.
const PATIENCE: Duration = Duration::from_secs(100);
/// Tries that follow each other almost at once.
const QUICK: Retries =
    Retries { first: Duration::from_millis(1), longest: Duration::from_millis(4), most: 3 };

/// Makes a pool of VFs in one set that are ready, with a thread for each.
fn pool(bench: &Bench, count: u32, retries: Retries) -> Pool<Scripted> {
    let (name, deadline) = ("test".into(), PATIENCE);
    let settings = Settings { name, set_size: count, workers: count, deadline, retries };
    let pool = bench.pool_of(count, settings);
    assert!(pool.settle(PATIENCE));
    pool
}

/// Takes a VF of the pool and gives it back.
fn pass(pool: &Pool<Scripted>) {
    let vf = pool.take(&owner("a")).unwrap().vf;
    pool.give_back(vf, &owner("a")).unwrap();
}

fn wait(until: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !until() {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}");
        std::thread::yield_now();
    }
}

#[test]
fn a_vf_that_failed_is_tried_again_and_comes_back() {
    let bench = Bench::new();
    let pool = pool(&bench, 1, QUICK);
    bench.fail("reset", 0);
    pass(&pool);
    wait(|| pool.counts().ready == 1);
    assert_eq!(bench.calls(0)[4..], ["expel", "reset", "open", "reset", "scrub"]);
    let health = pool.health();
    assert_eq!((health.failures, health.retries, health.resets), (1, 1, 2));
    let status = &pool.status()[0];
    assert_eq!((status.tries, status.next_try, bench.recorded()), (0, None, 0));
    assert_eq!(pool.take(&owner("b")).unwrap().vf, 0);
}

#[test]
fn tries_end_and_begin_anew_when_the_vf_is_resumed() {
    let bench = Bench::new();
    let pool = pool(&bench, 1, QUICK);
    bench.break_down("reset", 0);
    pass(&pool);
    wait(|| pool.health().failures == 4);
    assert!(pool.settle(PATIENCE));
    let status = &pool.status()[0];
    assert!(matches!(&status.state, VfState::Failed(why) if why == "reset went wrong"));
    assert_eq!((status.tries, status.next_try, pool.health().retries), (3, None, 3));
    bench.heal();
    bench.fail("reset", 0);
    pool.resume(0).unwrap();
    wait(|| pool.counts().ready == 1);
    assert_eq!((pool.status()[0].tries, pool.health().retries), (0, 4));
}

#[test]
fn a_vf_that_waits_for_its_try_says_when() {
    let bench = Bench::new();
    let (first, longest) = (Duration::from_secs(3600), Duration::from_secs(3600));
    let pool = pool(&bench, 1, Retries { first, longest, most: 1 });
    bench.fail("scrub", 0);
    pass(&pool);
    wait(|| pool.status()[0].next_try.is_some());
    let status = &pool.status()[0];
    assert!(matches!(status.state, VfState::Failed(_)));
    assert!(status.next_try.is_some_and(|at| at <= Instant::now() + first));
    // Somebody need not wait for it.
    pool.resume(0).unwrap();
    assert!(pool.settle(PATIENCE));
    let status = &pool.status()[0];
    assert_eq!((&status.state, status.next_try), (&VfState::Ready, None));
}

#[test]
fn a_vf_that_is_drained_while_it_is_tried_is_closed() {
    let bench = Bench::new();
    let pool = pool(&bench, 1, QUICK);
    let held = bench.hold_vf("open", 0);
    bench.break_down("reset", 0);
    pass(&pool);
    wait(|| bench.calls(0).last().unwrap() == "open");
    pool.drain(0).unwrap();
    drop(held);
    assert!(pool.settle(PATIENCE));
    assert_eq!(pool.counts().drained, 1);
    assert_eq!(bench.calls(0).last().unwrap(), "close");
}

#[test]
fn one_vf_is_tried_at_a_time() {
    let bench = Bench::new();
    let pool = pool(&bench, 2, QUICK);
    let held = bench.hold("open");
    bench.fail("reset", 0);
    bench.fail("reset", 1);
    for failures in 1..=2 {
        pass(&pool);
        wait(|| pool.health().failures == failures);
    }
    wait(|| pool.health().retries == 1);
    // Longer than the longest pause.
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!((pool.health().retries, pool.counts().failed), (1, 1));
    drop(held);
    wait(|| pool.counts().ready == 2);
}

#[test]
fn a_vf_that_was_adopted_late_is_its_owners_until_it_is_resumed() {
    let bench = Bench::new();
    let first = pool(&bench, 1, QUICK);
    first.take(&owner("a")).unwrap();
    drop(first);
    let held = bench.hold("adopt");
    let (name, deadline) = ("test".into(), Duration::from_secs(1));
    let retries = Retries { most: 50, ..QUICK };
    let next = bench.pool_of(1, Settings { name, set_size: 1, workers: 1, deadline, retries });
    let state = || next.status()[0].state.clone();
    wait(|| matches!(state(), VfState::Stuck(_)));
    drop(held);
    wait(|| matches!(state(), VfState::Failed(_)));
    // A reset of its set, whose other VFs would be tried again with it, cuts the owner off.
    assert!(matches!(next.reset_set(0), Err(Error::SetInUse { vf: 0, .. })));
    assert_eq!(bench.calls(0).last().unwrap(), "adopt");
    next.resume(0).unwrap();
    wait(|| next.counts().ready == 1);
    assert!(bench.calls(0).contains(&"expel".to_owned()));
    assert_eq!(next.take(&owner("b")).unwrap().vf, 0);
}
