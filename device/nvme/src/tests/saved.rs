//! Saved state.

use serde_json::Value;
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::feature::FeatureId;
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::registers::{offset, tail_doorbell};
use slipway_nvme_spec::status::Status;
use slipway_pci::{Function, StateError};
use slipway_ram::Memory;

use super::rig::{MEMORY, Rig, Setup, Shared, ram};
use crate::Controller;
use crate::driver::{admin, io};

/// Makes a rig in the middle of its life, and a closure that makes a successor's parts. The last
/// ten commands are rung and not fetched.
pub fn mid_life() -> (Rig, impl Fn() -> Setup) {
    let disk = Shared::new(ram(1 << 20, 512));
    let setup = Setup::on(Memory::heap(MEMORY), Box::new(disk.clone()));
    let (memory, clock, sink) = (setup.memory.clone(), setup.clock.clone(), setup.sink.clone());
    let again = move || {
        let setup = Setup::on(memory.clone(), Box::new(disk.clone()));
        Setup { clock: clock.clone(), sink: sink.clone(), ..setup }
    };
    let mut rig = setup.rig();
    rig.driver.create_pair(5, 16, Some(7)).unwrap();
    rig.driver.submit(0, admin(AdminOpcode::AsynchronousEventRequest)).unwrap();
    let set = admin(AdminOpcode::SetFeatures)
        .with_dword(10, FeatureId::AsynchronousEventConfiguration.0.into())
        .with_dword(11, 0x102);
    rig.driver.admin(set).unwrap();
    let page = rig.buffer(4096);
    rig.fill(page, &[0x5a; 512]);
    for lba in 0..100 {
        let write = SubmissionEntry { prp1: page.into(), ..io(NvmOpcode::Write, 1, lba, 1) };
        assert_eq!(rig.status([1, 5][lba as usize % 2], write), Status::SUCCESS);
    }
    // An error for the log, and entries that are not fetched yet.
    rig.run(1, io(NvmOpcode::Read, 9, 0, 1));
    for lba in 0..10 {
        let read = SubmissionEntry { prp1: page.into(), ..io(NvmOpcode::Read, 1, lba, 1) };
        rig.driver.submit(5, read).unwrap();
    }
    rig.controller().config_write(4, &[6, 0]);
    (rig, again)
}

pub fn saved(rig: &mut Rig) -> Vec<u8> {
    assert!(rig.controller().quiesce());
    rig.controller().save()
}

#[test]
fn a_successor_goes_on_where_the_controller_was() {
    let (mut rig, again) = mid_life();
    rig.clock.advance(std::time::Duration::from_secs(7200));
    let state = saved(&mut rig);
    let mut successor = again().controller();
    successor.restore(&state).unwrap();
    assert!(successor.quiesce());
    assert!(successor.save() == state, "nothing is lost by the way");
    rig.driver.registers.function = successor;
    // The guest has rung for the ten entries that the predecessor did not fetch.
    rig.poll(2);
    assert_eq!(rig.reap(5).len(), 10);
    let back = rig.buffer(4096);
    for lba in 0..100 {
        let read = io(NvmOpcode::Read, 1, lba, 1);
        rig.fill(back, &[0; 512]);
        rig.driver.transfer([1, 5][lba as usize % 2], read, (back, 512)).unwrap();
        assert_eq!(rig.bytes(back, 512), [0x5a; 512]);
    }
    let mut command = [0; 2];
    rig.controller().config_read(4, &mut command);
    assert_eq!(command, [6, 0]);
    // Counters, log and the event request are in the state.
    let log = admin(AdminOpcode::GetLogPage).with_dword(10, 2 | 127 << 16);
    let health = rig.driver.admin_read(log, 512).unwrap();
    assert_eq!((health[80], health[128], health[176]), (100, 2, 1));
    rig.write32(offset::DOORBELLS + 4 * tail_doorbell(1) as u64, 9999);
    rig.poll(2);
    let event = rig.reap(0);
    assert_eq!(Event::from_dword(event[0].result.get()), Event::INVALID_DOORBELL_VALUE);
    rig.driver.delete_pair(5).unwrap();
    rig.driver.shutdown().unwrap();
}

#[test]
fn doorbells_rung_in_between_are_heard() {
    let (mut rig, again) = mid_life();
    let state = saved(&mut rig);
    let mut successor = again().controller();
    // The client kept its page and rang, so the cells are not fresh.
    for index in 0..successor.home.engine.doorbells.len() {
        successor
            .home
            .engine
            .doorbells
            .store(index, rig.controller().home.engine.doorbells.load(index));
    }
    successor.restore(&state).unwrap();
    rig.driver.registers.function = successor;
    rig.poll(2);
    assert_eq!(rig.reap(5).len(), 10);
}

#[test]
fn every_phase_can_be_saved() {
    let disk = Shared::new(ram(1 << 20, 512));
    let memory = Memory::heap(1 << 20);
    let make = || Setup::on(memory.clone(), Box::new(disk.clone())).controller();
    let mut controller = make();
    let check = |controller: &mut Controller| {
        let state = controller.save();
        let mut successor = make();
        successor.restore(&state).unwrap();
        assert_eq!(successor.save(), state);
    };
    let mut write = |at: u64, value: u32| {
        controller.write(0, at, &value.to_le_bytes());
        check(&mut controller);
        controller.poll();
        check(&mut controller);
        controller.poll();
        check(&mut controller);
    };
    write(offset::CC, 1);
    write(offset::CC, 0);
    write(offset::AQA, 0x000f_000f);
    write(offset::CC, 0x0046_0001);
    write(offset::CC, 0x0046_4001);
    write(offset::CC, 0);
    controller.reset();
    check(&mut controller);
}

fn refused(again: &impl Fn() -> Setup, state: &[u8]) -> StateError {
    let mut controller = again().controller();
    let error = controller.restore(state).unwrap_err();
    // The controller is in its state after a reset, and can be used.
    controller.poll();
    let mut status = [0; 4];
    controller.read(0, offset::CSTS, &mut status);
    assert_eq!(status, [0; 4]);
    error
}

#[test]
fn damaged_states_are_refused() {
    let (mut rig, again) = mid_life();
    let state = saved(&mut rig);
    for len in (0..state.len()).step_by(97) {
        refused(&again, &state[..len]);
    }
    let mut longer = state.clone();
    longer.extend_from_slice(b"{}");
    refused(&again, &longer);
    refused(&again, &vec![b' '; 2 << 20]);
    // Any byte may change to any other: no panic then, or while the controller is used.
    for at in (0..state.len()).step_by(13) {
        let mut state = state.clone();
        state[at] ^= 1 << (at % 7);
        let mut controller = again().controller();
        let _ = controller.restore(&state);
        controller.poll();
        let _ = controller.save();
    }
}

#[test]
fn contradictions_are_refused() {
    let (mut rig, again) = mid_life();
    let state: Value = serde_json::from_slice(&saved(&mut rig)).unwrap();
    let edits: &[(&str, Value)] = &[
        ("/kind", "e1000".into()),
        ("/version", 1.into()),
        ("/shape/vectors", 64.into()),
        ("/shape/queue_pairs", 3.into()),
        ("/shape/transfer", 4096.into()),
        ("/shape/namespaces/0/block_size", 4096.into()),
        ("/shape/namespaces/0/nguid", vec![9; 16].into()),
        ("/phase", "Disabled".into()),
        ("/phase", "Resetting".into()),
        ("/phase", "Lost".into()),
        ("/shutdown", "Complete".into()),
        ("/registers/status", 0.into()),
        ("/registers/status", 0xff.into()),
        ("/registers/configuration", 0x0046_0000.into()),
        ("/registers/admin_submission", 5.into()),
        ("/shadow", serde_json::json!({"doorbells": 0x5000, "events": 0x6000})),
        ("/submission_queues/0/doorbell/shadow", serde_json::json!([3, true])),
        ("/submission_queues/0/id", 1.into()),
        ("/submission_queues/1/id", 2000.into()),
        ("/submission_queues/1/completion", 3.into()),
        ("/submission_queues/1/completion", 0.into()),
        ("/submission_queues/1/size", 1.into()),
        ("/submission_queues/1/size", 1025.into()),
        ("/submission_queues/1/head", 64.into()),
        ("/submission_queues/1/tail", 64.into()),
        ("/submission_queues/1/base", 4097.into()),
        ("/completion_queues/1/vector", 65.into()),
        ("/completion_queues/1/head", 64.into()),
        ("/completion_queues/2/id", 1.into()),
        ("/submission_queues", Value::Array(Vec::new())),
        ("/features/queue_pairs", 65.into()),
        ("/features/queue_pairs", 0.into()),
        ("/features/uncoalesced", Value::Array(Vec::new())),
        ("/error_recovery", Value::Array(Vec::new())),
        ("/event_requests", vec![1; 5].into()),
        ("/changed_namespaces", vec![1025].into()),
        ("/events_waiting", serde_json::json!([{"kind": 7, "information": 0, "log": 0}])),
        ("/health/errors", u64::MAX.into()),
        ("/health/errors", 2.into()),
        ("/health/reads", u64::MAX.into()),
        ("/msix/vectors", Value::Array(Vec::new())),
        ("/pci/version", 9.into()),
    ];
    let own = serde_json::to_vec(&state).unwrap();
    again().controller().restore(&own).unwrap();
    for (path, value) in edits {
        let mut state = state.clone();
        *state.pointer_mut(path).unwrap_or_else(|| panic!("{path}")) = value.clone();
        refused(&again, &serde_json::to_vec(&state).unwrap());
    }
    let mut leftover = state.clone();
    leftover["more"] = 1.into();
    let error = refused(&again, &serde_json::to_vec(&leftover).unwrap());
    assert!(matches!(error, StateError::Inconsistent(_)));
    let mut missing = state.clone();
    missing.as_object_mut().unwrap().remove("features");
    refused(&again, &serde_json::to_vec(&missing).unwrap());
}
