//! Commands and bytes per second.

use std::time::Duration;

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::NvmOpcode;

use super::rig::Setup;
use crate::driver::io;
use crate::{Rate, Rates};

fn read(page: u64) -> SubmissionEntry {
    SubmissionEntry { prp1: page.into(), ..io(NvmOpcode::Read, 1, 0, 8) }
}

fn limited(commands: u64, bytes: u64) -> Rates {
    let rate = |per_second: u64, burst| (per_second > 0).then_some(Rate { per_second, burst });
    Rates { commands: rate(commands, 4), bytes: rate(bytes, 8192) }
}

#[test]
fn commands_wait_in_their_queue_and_the_controller_sleeps() {
    let mut rig = Setup::new().rig();
    let page = rig.buffer(4096);
    rig.controller().limit(limited(1000, 0));
    for _ in 0..10 {
        rig.driver.submit(1, read(page)).unwrap();
    }
    // Four commands at once, then one each millisecond, and only sleep in between.
    let wait = rig.settle().unwrap();
    assert!(wait > Duration::ZERO && wait <= Duration::from_millis(1), "{wait:?}");
    assert_eq!(rig.reap(1).len(), 4);
    for _ in 0..6 {
        rig.advance(wait);
        assert!(rig.settle().is_none_or(|wait| wait > Duration::ZERO));
        assert_eq!(rig.reap(1).len(), 1);
        rig.advance(Duration::from_millis(1) - wait);
    }
    assert_eq!(rig.settle(), None, "nothing waits");
}

#[test]
fn bytes_are_limited_and_limits_can_be_lifted() {
    let mut rig = Setup::new().rig();
    let page = rig.buffer(4096);
    rig.controller().limit(limited(0, 4_096_000));
    for _ in 0..20 {
        rig.driver.submit(1, read(page)).unwrap();
    }
    rig.settle();
    assert_eq!(rig.reap(1).len(), 2);
    rig.advance(Duration::from_millis(3));
    rig.settle();
    let ended = rig.reap(1).len();
    assert!((2..=3).contains(&ended), "{ended}: no more than the burst is saved");
    rig.controller().limit(Rates::default());
    assert_eq!(rig.settle(), None);
    assert_eq!(rig.reap(1).len(), 18 - ended);
}

#[test]
fn queues_share_what_there_is_and_the_admin_queue_is_free() {
    let mut rig = Setup::new().alone().rig();
    rig.driver.create_pair(2, 64, None).unwrap();
    let page = rig.buffer(4096);
    rig.controller().limit(limited(1000, 0));
    for _ in 0..50 {
        rig.driver.submit(1, read(page)).unwrap();
        rig.driver.submit(2, read(page)).unwrap();
    }
    rig.settle();
    for _ in 0..40 {
        rig.advance(Duration::from_millis(1));
        rig.settle();
        rig.driver.identify_controller().unwrap();
    }
    let ended = [rig.reap(1).len(), rig.reap(2).len()];
    assert_eq!(ended[0] + ended[1], 44, "{ended:?}");
    assert!(ended[0].abs_diff(ended[1]) <= 4, "{ended:?}");
}

#[test]
fn a_fused_pair_passes_a_limit() {
    let mut rig = Setup::new().alone().rig();
    let page = rig.buffer(4096);
    rig.controller()
        .limit(Rates { commands: Some(Rate { per_second: 10, burst: 1 }), bytes: None });
    let fused = |opcode: NvmOpcode, fuse| {
        let command = SubmissionEntry { flags: fuse, ..read(page) };
        SubmissionEntry { opcode: opcode.0, ..command }
    };
    rig.driver.submit(1, fused(NvmOpcode::Compare, 1)).unwrap();
    rig.driver.submit(1, fused(NvmOpcode::Write, 2)).unwrap();
    rig.settle();
    let ended = rig.reap(1);
    assert_eq!(ended.len(), 2);
    assert!(ended.iter().all(|entry| entry.status().is_success()), "{ended:?}");
}
