//! The pool with devices whose operations the test holds up, lets fail or lets panic.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

mod devices;

use std::time::Duration;

use devices::{Bench, owner};
use slipway_vf_pool::{Error, Ledger, Record, Standing, VfState};

/// Longer than any test takes on any machine.
const PATIENCE: Duration = Duration::from_secs(100);

#[test]
fn a_vf_goes_from_owner_to_owner_and_is_reset_between() {
    let bench = Bench::new();
    let pool = bench.pool(2, 2, 1, PATIENCE);
    assert!(pool.settle(PATIENCE));
    let first = pool.take(&owner("a")).unwrap();
    let Err(Error::Held { vf, .. }) = pool.take(&owner("a")) else { panic!("taken twice") };
    assert_eq!(vf, first.vf);
    assert_eq!(pool.lease(&owner("a")).unwrap(), first);
    assert!(matches!(pool.lease(&owner("b")), Err(Error::NoLease { .. })));
    assert!(matches!(pool.give_back(first.vf, &owner("b")), Err(Error::Taken { .. })));
    assert!(matches!(pool.give_back(9, &owner("a")), Err(Error::NoVf { .. })));
    let other = 1 - first.vf;
    assert!(matches!(pool.give_back(other, &owner("a")), Err(Error::NotTaken { .. })));
    assert_eq!(bench.calls(first.vf), ["open", "reset", "scrub", "admit"]);
    pool.give_back(first.vf, &owner("a")).unwrap();
    assert!(pool.settle(PATIENCE));
    let all = ["open", "reset", "scrub", "admit", "expel", "reset", "scrub"];
    assert_eq!(bench.calls(first.vf), all);
    assert_eq!(bench.calls(other), ["open", "reset", "scrub"]);
    assert_eq!((pool.counts().ready, pool.health().resets), (2, 3));
}

#[test]
fn an_owner_lets_another_client_in_and_nobody_else_does() {
    let bench = Bench::new();
    let pool = bench.pool(1, 1, 1, PATIENCE);
    assert!(pool.settle(PATIENCE));
    assert!(matches!(pool.admit(&owner("a"), |_| {}), Err(Error::NoLease { .. })));
    let first = pool.take(&owner("a")).unwrap();
    assert_eq!(pool.admit(&owner("a"), |_| {}).unwrap(), first);
    assert!(matches!(pool.admit(&owner("b"), |_| {}), Err(Error::NoLease { .. })));
    assert_eq!(bench.calls(0), ["open", "reset", "scrub", "admit", "admit"]);
    bench.fail("admit", 0);
    let refused = pool.admit(&owner("a"), |_| {}).unwrap_err().to_string();
    assert!(refused.starts_with("VF 0 of pool test does not let its client in"), "{refused}");
    // It is its owner's still.
    assert_eq!(pool.lease(&owner("a")).unwrap(), first);
    bench.heal();
    pool.give_back(0, &owner("a")).unwrap();
    assert!(matches!(pool.admit(&owner("a"), |_| {}), Err(Error::NoLease { .. })));
    assert!(pool.settle(PATIENCE));
}

#[test]
fn a_vf_is_taken_by_its_number_if_that_one_is_ready() {
    let bench = Bench::new();
    let pool = bench.pool(3, 3, 1, PATIENCE);
    assert!(pool.settle(PATIENCE));
    let take = |vf, id| pool.take_prepared(&owner(id), Some(vf), |_| {});
    assert_eq!(take(1, "a").unwrap().vf, 1);
    let taken = take(1, "b").unwrap_err().to_string();
    assert_eq!(taken, "VF 1 of pool test is in use by test:a");
    assert!(matches!(take(2, "a"), Err(Error::Held { vf: 1, .. })));
    assert!(matches!(take(3, "b"), Err(Error::NoVf { vf: 3, count: 3, .. })));
    let held = bench.hold("reset");
    pool.give_back(1, &owner("a")).unwrap();
    let resetting = take(1, "b").unwrap_err();
    assert!(matches!(resetting, Error::Unready { vf: 1, state: "being reset", .. }));
    drop(held);
    assert!(pool.settle(PATIENCE));
    assert_eq!(take(1, "b").unwrap().vf, 1);
    // The others are there for those that name none.
    let rest = ["c", "d"].map(|id| pool.take(&owner(id)).unwrap().vf);
    assert_eq!(rest, [0, 2]);
    assert!(pool.take(&owner("e")).is_err());
}

#[test]
fn an_empty_pool_says_how_many_are_being_reset() {
    let bench = Bench::new();
    let pool = bench.pool(3, 3, 1, PATIENCE);
    assert!(pool.settle(PATIENCE));
    let held = bench.hold("reset");
    for id in ["a", "b", "c"] {
        let lease = pool.take(&owner(id)).unwrap();
        if id != "c" {
            pool.give_back(lease.vf, &owner(id)).unwrap();
        }
    }
    let error = pool.take(&owner("d")).unwrap_err().to_string();
    let expected = "pool test has no VF ready: of 3 1 is taken, 2 are being reset";
    assert_eq!(error, expected);
    assert_eq!(pool.health().refusals, 1);
    drop(held);
    assert!(pool.settle(PATIENCE));
    assert_eq!(pool.counts().ready, 2);
}

#[test]
fn a_reset_that_hangs_holds_nobody_else() {
    let bench = Bench::new();
    // One worker, and a deadline that a machine under load may miss only with a reset that hangs.
    let pool = bench.pool(3, 3, 1, Duration::from_secs(5));
    assert!(pool.settle(PATIENCE));
    let stuck = pool.take(&owner("a")).unwrap().vf;
    let held = bench.hold_vf("reset", stuck);
    pool.give_back(stuck, &owner("a")).unwrap();
    // Taken while the only worker hangs; returned, and reset by the worker in its place.
    let next = pool.take(&owner("b")).unwrap().vf;
    pool.give_back(next, &owner("b")).unwrap();
    assert!(pool.settle(PATIENCE));
    let state = |vf: u32| pool.status()[vf as usize].state.clone();
    assert!(matches!(state(stuck), VfState::Stuck(why) if why.contains("did not end within 5s")));
    assert_eq!(state(next), VfState::Ready);
    let error = pool.reset_set(0).unwrap_err().to_string();
    assert_eq!(
        error,
        format!("devset 0 of pool test cannot be reset: VF {stuck} is not answering")
    );
    // Nothing else is tried on it until it answers.
    pool.resume(stuck).unwrap();
    assert!(matches!(state(stuck), VfState::Stuck(_)));
    drop(held);
    while matches!(state(stuck), VfState::Stuck(_)) {
        std::thread::yield_now();
    }
    assert!(matches!(state(stuck), VfState::Failed(why) if why.ends_with("answered later")));
    pool.resume(stuck).unwrap();
    assert!(pool.settle(PATIENCE));
    assert_eq!((pool.counts().ready, pool.health().failures), (3, 1));
}

#[test]
fn a_vf_that_fails_leaves_the_pool_and_a_reset_of_the_set_brings_it_back() {
    let bench = Bench::new();
    let pool = bench.pool(4, 2, 2, PATIENCE);
    assert!(pool.settle(PATIENCE));
    for (operation, id) in [("reset", "a"), ("scrub", "b"), ("panic", "c")] {
        let vf = pool.take(&owner(id)).unwrap().vf;
        bench.fail(operation, vf);
        pool.give_back(vf, &owner(id)).unwrap();
        assert!(pool.settle(PATIENCE));
        assert!(matches!(pool.status()[vf as usize].state, VfState::Failed(_)), "{operation}");
    }
    let counts = pool.counts();
    assert_eq!((counts.ready, counts.failed, pool.health().failures), (1, 3, 3));
    let last = pool.take(&owner("d")).unwrap().vf;
    let (busy, free) = (last / 2, 1 - last / 2);
    let error = pool.reset_set(busy).unwrap_err().to_string();
    assert_eq!(error, format!("devset {busy} of pool test cannot be reset: VF {last} is taken"));
    assert!(matches!(pool.reset_set(2), Err(Error::NoSet { .. })));
    bench.heal();
    pool.reset_set(free).unwrap();
    assert!(pool.settle(PATIENCE));
    assert_eq!((pool.counts().ready, pool.counts().failed), (2, 1));
    assert_eq!(bench.set_resets(), 1);
}

#[test]
fn a_vf_that_returns_while_it_is_handed_over_is_reset_and_nobodys() {
    let bench = Bench::new();
    let pool = bench.pool(1, 1, 1, PATIENCE);
    assert!(pool.settle(PATIENCE));
    let held = bench.hold_vf("admit", 0);
    let taken = std::thread::scope(|scope| {
        let taker = scope.spawn(|| pool.take(&owner("a")));
        while bench.calls(0).last().unwrap() != "admit" {
            std::thread::yield_now();
        }
        assert!(matches!(pool.lease(&owner("a")), Err(Error::Adopting { .. })));
        pool.give_back(0, &owner("a")).unwrap();
        // Nobody gets it before the taker has let go of it.
        assert!(matches!(pool.take(&owner("b")), Err(Error::Empty { .. })));
        drop(held);
        taker.join().unwrap()
    });
    assert!(matches!(taken, Err(Error::Withdrawn { vf: 0, .. })), "{taken:?}");
    assert!(pool.settle(PATIENCE));
    let all = ["open", "reset", "scrub", "admit", "expel", "reset", "scrub"];
    assert_eq!(bench.calls(0), all);
    assert_eq!((pool.counts().ready, bench.recorded()), (1, 0));
    assert_eq!(pool.take(&owner("b")).unwrap().vf, 0);
}

#[test]
fn a_vf_that_cannot_be_handed_over_is_reset() {
    let bench = Bench::new();
    let pool = bench.pool(1, 1, 1, PATIENCE);
    assert!(pool.settle(PATIENCE));
    bench.fail("admit", 0);
    let error = pool.take(&owner("a")).unwrap_err().to_string();
    let why = "cannot be used (admit went wrong) and is being reset; try again";
    assert_eq!(error, format!("VF 0 of pool test {why}"));
    assert!(pool.settle(PATIENCE));
    assert_eq!(bench.calls(0)[4..], ["expel", "reset", "scrub"]);
    assert_eq!((pool.counts().ready, bench.recorded()), (1, 0));
    assert_eq!(pool.take(&owner("a")).unwrap().vf, 0);
}

#[test]
fn a_vf_that_is_not_closed_has_failed() {
    let bench = Bench::new();
    let pool = bench.pool(1, 1, 1, PATIENCE);
    assert!(pool.settle(PATIENCE));
    bench.fail("close", 0);
    pool.drain(0).unwrap();
    assert!(pool.settle(PATIENCE));
    let state = pool.status()[0].state.clone();
    assert!(matches!(&state, VfState::Failed(why) if why == "close went wrong"), "{state:?}");
    pool.drain(0).unwrap();
    assert!(pool.settle(PATIENCE));
    assert_eq!(pool.counts().drained, 1);
}

#[test]
fn a_drained_vf_is_closed_when_it_is_free() {
    let bench = Bench::new();
    let pool = bench.pool(2, 2, 1, PATIENCE);
    assert!(pool.settle(PATIENCE));
    let taken = pool.take(&owner("a")).unwrap().vf;
    for vf in 0..2 {
        pool.drain(vf).unwrap();
    }
    assert!(pool.settle(PATIENCE));
    let error = pool.take(&owner("b")).unwrap_err().to_string();
    assert!(error.ends_with("1 is taken, 0 are being reset, 1 is drained"), "{error}");
    pool.give_back(taken, &owner("a")).unwrap();
    assert!(pool.settle(PATIENCE));
    assert_eq!(bench.calls(taken).last().unwrap(), "close");
    assert_eq!(pool.counts().drained, 2);
    // It stays drained after a restart.
    let next = bench.pool(2, 2, 1, PATIENCE);
    assert!(next.settle(PATIENCE));
    assert_eq!(next.counts().drained, 2);
    next.resume(taken).unwrap();
    assert!(next.settle(PATIENCE));
    assert_eq!(next.take(&owner("b")).unwrap().vf, taken);
}

#[test]
fn a_drain_of_a_taken_vf_outlives_the_process() {
    let bench = Bench::new();
    let pool = bench.pool(2, 2, 1, PATIENCE);
    assert!(pool.settle(PATIENCE));
    let taken = pool.take(&owner("a")).unwrap().vf;
    pool.drain(taken).unwrap();
    drop(pool);
    let pool = bench.pool(2, 2, 1, PATIENCE);
    assert!(pool.settle(PATIENCE));
    assert!(pool.status()[taken as usize].is_draining);
    pool.give_back(taken, &owner("a")).unwrap();
    assert!(pool.settle(PATIENCE));
    assert_eq!((pool.counts().ready, pool.counts().drained), (1, 1));
    pool.resume(taken).unwrap();
    assert!(pool.settle(PATIENCE));
    drop(pool);
    let pool = bench.pool(2, 2, 1, PATIENCE);
    assert!(pool.settle(PATIENCE));
    assert_eq!(pool.counts().ready, 2);
}

#[test]
fn a_vf_that_is_resumed_while_it_is_closed_is_opened_again() {
    let bench = Bench::new();
    let pool = bench.pool(1, 1, 1, PATIENCE);
    assert!(pool.settle(PATIENCE));
    let held = bench.hold("close");
    pool.drain(0).unwrap();
    pool.resume(0).unwrap();
    drop(held);
    assert!(pool.settle(PATIENCE));
    assert_eq!((pool.counts().ready, bench.recorded()), (1, 0));
}

#[test]
fn the_next_process_keeps_living_owners_and_returns_the_others() {
    let bench = Bench::new();
    let pool = bench.pool(3, 3, 1, PATIENCE);
    assert!(pool.settle(PATIENCE));
    let [alive, dead, lost] = ["alive", "dead", "lost"].map(|id| pool.take(&owner(id)).unwrap().vf);
    drop(pool);
    // The device of `lost` ended with the process.
    bench.fail("adopt", lost);
    let pool = bench.pool(3, 3, 1, PATIENCE);
    let found = pool.reconcile(|one| one.id() != "dead");
    assert!(found.kept.contains(&(alive, owner("alive"))));
    assert_eq!(found.returned, [(dead, owner("dead"))]);
    assert!(pool.settle(PATIENCE));
    while pool.counts().ready < 2 {
        std::thread::yield_now();
    }
    assert_eq!(pool.lease(&owner("alive")).unwrap().vf, alive);
    assert!(pool.lease(&owner("lost")).is_err());
    // The owner's device was not disturbed.
    assert_eq!(bench.calls(alive), ["open", "reset", "scrub", "admit", "adopt"]);
    assert!(bench.calls(dead).ends_with(&["reset".to_owned(), "scrub".to_owned()]));
}

#[test]
fn of_two_vfs_that_are_recorded_for_an_owner_the_next_process_adopts_the_later_one() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(&folder.path().join("ledger")).unwrap();
    // VF 0 was adopted too late, so that its owner took VF 1.
    for (vf, since_ns) in [(0, 7), (1, 8)] {
        let record = Record { standing: Standing::Taken { owner: owner("a") }, since_ns };
        ledger.write("test", vf, Some(&record)).unwrap();
    }
    let bench = Bench::with(ledger);
    let pool = bench.pool(2, 1, 1, PATIENCE);
    assert_eq!(pool.vf_of(&owner("a")).unwrap(), 1);
    assert!(pool.settle(PATIENCE));
    assert_eq!(bench.calls(0), ["open", "reset", "scrub"]);
    assert!(!bench.calls(1).contains(&"reset".to_owned()));
}

#[test]
fn a_vf_that_is_drained_while_its_set_is_reset_is_closed_whatever_comes_of_the_reset() {
    let bench = Bench::new();
    let pool = bench.pool(2, 2, 1, PATIENCE);
    assert!(pool.settle(PATIENCE));
    let held = bench.hold("reset_set");
    bench.fail("reset_set", 0);
    pool.reset_set(0).unwrap();
    pool.drain(1).unwrap();
    drop(held);
    assert!(pool.settle(PATIENCE));
    assert_eq!((pool.counts().failed, pool.counts().drained), (1, 1));
    assert_eq!(bench.calls(1).last().unwrap(), "close");
}

#[test]
fn takes_from_many_threads_get_a_vf_each() {
    let bench = Bench::new();
    let pool = bench.pool(64, 16, 4, PATIENCE);
    assert!(pool.settle(PATIENCE));
    let vfs = std::thread::scope(|scope| {
        let pool = &pool;
        let take = |id: u32| scope.spawn(move || pool.take(&owner(&id.to_string())).unwrap().vf);
        let takers: Vec<_> = (0..64).map(take).collect();
        takers.into_iter().map(|taker| taker.join().unwrap()).collect::<Vec<_>>()
    });
    let distinct: std::collections::BTreeSet<_> = vfs.iter().collect();
    assert_eq!(distinct.len(), 64);
    assert_eq!(bench.recorded(), 64);
    assert!(pool.take(&owner("one-more")).is_err());
}

#[test]
fn a_drain_that_ends_while_its_set_is_reset_has_ended_for_the_next_process() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(&folder.path().join("ledger")).unwrap();
    let bench = Bench::with(ledger.clone());
    let pool = bench.pool(2, 2, 1, PATIENCE);
    assert!(pool.settle(PATIENCE));
    pool.drain(1).unwrap();
    assert!(pool.settle(PATIENCE));
    let (resetting, opening) = (bench.hold("reset_set"), bench.hold_vf("open", 1));
    pool.reset_set(0).unwrap();
    pool.resume(1).unwrap();
    drop(resetting);
    while bench.calls(1).last().unwrap() != "open" {
        std::thread::yield_now();
    }
    let records = ledger.records("test").unwrap();
    let (_, Record { standing, .. }) = records.into_iter().find(|(vf, _)| *vf == 1).unwrap();
    assert_eq!(standing, Standing::Returning);
    drop(opening);
    assert!(pool.settle(PATIENCE));
    assert_eq!(pool.counts().ready, 2);
}
