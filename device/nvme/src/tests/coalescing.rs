//! Interrupt Coalescing: interrupts that are held back.

use std::time::Duration;

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::feature::FeatureId;
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::registers::{Configuration, offset};
use slipway_pci::Function;

use super::rig::{Rig, Setup};
use crate::driver::{admin, io};

/// THR and TIME: four entries, a millisecond.
const FOUR_OR_MILLISECOND: u32 = 10 << 8 | 3;

fn set(rig: &mut Rig, feature: FeatureId, value: u32) {
    let command =
        admin(AdminOpcode::SetFeatures).with_dword(10, feature.0.into()).with_dword(11, value);
    assert!(rig.status(0, command).is_success());
}

/// Makes a rig with a pair of queues, vector 1, and `value` for Interrupt Coalescing.
fn coalescing(value: u32) -> Rig {
    let mut rig = Setup::new().rig();
    set(&mut rig, FeatureId::InterruptCoalescing, value);
    rig.sink.take();
    rig
}

fn submit(rig: &mut Rig, queue: u16, count: usize) {
    for _ in 0..count {
        rig.driver.submit(queue, SubmissionEntry::new(NvmOpcode::Flush.0, 1)).unwrap();
    }
}

const MILLISECOND: Duration = Duration::from_millis(1);

#[test]
fn so_many_entries_make_one_interrupt() {
    let mut rig = coalescing(FOUR_OR_MILLISECOND);
    for _ in 0..3 {
        submit(&mut rig, 1, 1);
        assert_eq!(rig.settle(), Some(MILLISECOND));
        assert_eq!(rig.sink.take(), [0_u16; 0]);
    }
    submit(&mut rig, 1, 1);
    assert_eq!(rig.settle(), None);
    assert_eq!(rig.sink.take(), [1]);
    // The next four begin anew.
    submit(&mut rig, 1, 3);
    assert_eq!(rig.settle(), Some(MILLISECOND));
    submit(&mut rig, 1, 9);
    assert_eq!(rig.settle(), None);
    assert_eq!(rig.sink.take(), [1], "more than enough make one as well");
    assert_eq!(rig.reap(1).len(), 16);
}

#[test]
fn so_much_time_since_the_first_entry_makes_one_interrupt() {
    let mut rig = coalescing(FOUR_OR_MILLISECOND);
    submit(&mut rig, 1, 1);
    assert_eq!(rig.settle(), Some(MILLISECOND));
    rig.advance(MILLISECOND / 2);
    submit(&mut rig, 1, 1);
    assert_eq!(rig.settle(), Some(MILLISECOND / 2), "the first entry's time counts");
    rig.advance(MILLISECOND / 2 - Duration::from_nanos(1));
    assert_eq!(rig.settle(), Some(Duration::from_nanos(1)));
    assert_eq!(rig.sink.take(), [0_u16; 0]);
    rig.advance(Duration::from_nanos(1));
    assert_eq!(rig.settle(), None);
    assert_eq!(rig.sink.take(), [1]);
    rig.advance(MILLISECOND);
    submit(&mut rig, 1, 1);
    assert_eq!(rig.settle(), Some(MILLISECOND), "time begins anew");
}

#[test]
fn queues_wait_for_themselves() {
    let mut rig = coalescing(FOUR_OR_MILLISECOND);
    rig.driver.create_pair(2, 64, Some(2)).unwrap();
    rig.sink.take();
    submit(&mut rig, 1, 3);
    rig.settle();
    rig.advance(MILLISECOND / 4);
    submit(&mut rig, 2, 3);
    assert_eq!(rig.settle(), Some(MILLISECOND * 3 / 4), "the first of both");
    rig.advance(MILLISECOND * 3 / 4);
    assert_eq!(rig.settle(), Some(MILLISECOND / 4));
    assert_eq!(rig.sink.take(), [1]);
    submit(&mut rig, 2, 1);
    assert_eq!(rig.settle(), None);
    assert_eq!(rig.sink.take(), [2]);
}

#[test]
fn either_field_zero_is_off() {
    for value in [0, 10 << 8, 3] {
        let mut rig = coalescing(value);
        submit(&mut rig, 1, 1);
        assert_eq!(rig.settle(), None);
        assert_eq!(rig.sink.take(), [1]);
    }
}

#[test]
fn admin_commands_and_excepted_vectors_interrupt_at_once() {
    let mut rig = coalescing(FOUR_OR_MILLISECOND);
    rig.driver.identify_controller().unwrap();
    assert_eq!(rig.sink.take(), [0]);
    set(&mut rig, FeatureId::InterruptVectorConfiguration, 1 << 16 | 1);
    rig.driver.create_pair(2, 64, Some(2)).unwrap();
    rig.sink.take();
    submit(&mut rig, 1, 1);
    submit(&mut rig, 2, 1);
    assert_eq!(rig.settle(), Some(MILLISECOND));
    assert_eq!(rig.sink.take(), [1]);
}

#[test]
fn a_failure_is_told_at_once() {
    let mut rig = coalescing(FOUR_OR_MILLISECOND);
    submit(&mut rig, 1, 1);
    rig.settle();
    rig.driver.submit(1, io(NvmOpcode::Read, 7, 0, 1)).unwrap();
    assert_eq!(rig.settle(), None);
    assert_eq!(rig.sink.take(), [1]);
    submit(&mut rig, 1, 1);
    assert_eq!(rig.settle(), Some(MILLISECOND), "and that is over");
}

#[test]
fn what_the_host_took_needs_no_interrupt() {
    let mut rig = coalescing(FOUR_OR_MILLISECOND);
    submit(&mut rig, 1, 3);
    rig.settle();
    assert_eq!(rig.reap(1).len(), 3);
    assert_eq!(rig.settle(), None);
    rig.advance(MILLISECOND);
    assert_eq!(rig.settle(), None);
    // Three entries that were taken are no reason to interrupt for one that was not.
    submit(&mut rig, 1, 1);
    assert_eq!(rig.settle(), Some(MILLISECOND));
    assert_eq!(rig.sink.take(), [0_u16; 0]);
}

#[test]
fn nothing_is_held_back_when_coalescing_or_polling_ends() {
    let ends: [fn(&mut Rig); 4] = [
        |rig| set(rig, FeatureId::InterruptCoalescing, 0),
        |rig| assert!(rig.controller().quiesce()),
        |rig| {
            let enabled = rig.driver.registers.function.home.registers.configuration;
            rig.write32(offset::CC, enabled.0 | 1 << 14);
            assert_ne!(enabled.shutdown(), Configuration(enabled.0 | 1 << 14).shutdown());
        },
        |rig| set(rig, FeatureId::InterruptVectorConfiguration, 1 << 16 | 1),
    ];
    for (case, end) in ends.into_iter().enumerate() {
        let mut rig = coalescing(FOUR_OR_MILLISECOND);
        submit(&mut rig, 1, 1);
        assert_eq!(rig.settle(), Some(MILLISECOND));
        end(&mut rig);
        assert_eq!(rig.settle(), None);
        assert!(rig.sink.take().contains(&1), "case {case}");
    }
}

#[test]
fn a_reset_forgets_what_was_held_back() {
    let mut rig = coalescing(FOUR_OR_MILLISECOND);
    submit(&mut rig, 1, 1);
    rig.settle();
    rig.write32(offset::CC, 0);
    assert_eq!(rig.settle(), None);
    rig.advance(MILLISECOND);
    assert_eq!(rig.settle(), None);
    assert_eq!(rig.sink.take(), [0_u16; 0]);
}
