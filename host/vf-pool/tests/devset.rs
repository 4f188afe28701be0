//! The locks of a devset, on threads of the system.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

use std::sync::mpsc;

use slipway_vf_pool::{Attached, Busy, Devset};

#[test]
fn operations_on_different_vfs_run_at_the_same_time() {
    let set = Devset::new([0, 1]);
    let (to_first, at_first) = mpsc::channel();
    let (to_second, at_second) = mpsc::channel();
    let set = &set;
    std::thread::scope(|scope| {
        // Each operation ends only when the other one has begun.
        scope.spawn(move || {
            set.with(0, |_| {
                to_second.send(()).unwrap();
                at_first.recv().unwrap();
            });
        });
        set.with(1, |_| {
            to_first.send(()).unwrap();
            at_second.recv().unwrap();
        });
    });
}

#[test]
fn the_set_is_refused_while_a_vf_is_attached_or_in_an_operation() {
    let set = Devset::new([10, 11]);
    assert_eq!(set.attach(1, |_| Err::<(), _>("broken")), Ok(Err("broken")));
    assert_eq!(set.try_all(|all| all.len()), Ok(2));
    assert_eq!(set.attach(1, |device| Ok::<_, ()>(*device)), Ok(Ok(11)));
    assert_eq!(set.attach(1, |_| Ok::<_, ()>(())), Err(Attached));
    assert_eq!(set.try_all(|_| ()), Err(Busy::Attached(1)));
    assert!(set.detach(1) && !set.detach(1));
    set.with(0, |_| assert_eq!(set.try_all(|_| ()), Err(Busy::Operation)));
    assert_eq!(set.try_all(|all| all.iter().map(|one| **one).sum()), Ok(21));
}

#[test]
fn a_panic_in_an_operation_leaves_the_set_usable() {
    let set = Devset::new([0, 1]);
    let broken = std::panic::AssertUnwindSafe(|| set.with(0, |_| panic!("as it is meant")));
    assert!(std::panic::catch_unwind(broken).is_err());
    assert_eq!(set.try_all(|all| all.len()), Ok(2));
}
