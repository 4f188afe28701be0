//! Enable, reset and shutdown, with commands in flight at every step.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::feature::FeatureId;
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::registers::{Configuration, offset};
use slipway_nvme_spec::status::Status;
use slipway_pci::{Function, Progress};

use super::rig::{HeldDisk, Rig, Setup, ram};
use crate::driver::{DriverError, RegisterAccess, admin, io};

/// Makes a controller with `commands` reads at a disk that keeps them.
fn with_commands(commands: u64) -> (Rig, std::sync::Arc<super::rig::Gate>) {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    let mut rig = Setup::new().disk(disk).rig();
    let page = rig.buffer(4096);
    for lba in 0..commands {
        let read = SubmissionEntry { prp1: page.into(), ..io(NvmOpcode::Read, 1, lba, 1) };
        rig.driver.submit(1, read).unwrap();
    }
    rig.poll(3);
    (rig, gate)
}

#[test]
fn a_reset_waits_for_the_disk_and_completes_nothing() {
    for done in 0..=8 {
        let (mut rig, gate) = with_commands(8);
        gate.allow(done);
        rig.poll(1);
        assert_eq!(rig.reap(1).len(), done);
        let completions = rig.driver.pair(1).unwrap().completion;
        let before = rig.bytes(completions, 1024);
        rig.sink.take();
        rig.write32(offset::CC, 0);
        rig.poll(5);
        assert_eq!(rig.csts().ready(), done < 8, "ready until memory is given back");
        gate.open();
        rig.poll(2);
        assert!(!rig.csts().ready());
        assert_eq!(rig.controller().requests_in_flight(), 0);
        assert!(gate.releases.load(Relaxed) > 0, "guest memory is kept");
        assert!(rig.bytes(completions, 1024) == before);
        assert!(rig.sink.take().is_empty());
        // The controller can be enabled again.
        rig.driver.enable(16).unwrap();
        rig.driver.create_pair(1, 16, Some(1)).unwrap();
        assert_eq!(rig.status(1, SubmissionEntry::new(0, 1)), Status::SUCCESS);
    }
}

#[test]
fn enabling_again_at_once_still_resets() {
    let (mut rig, gate) = with_commands(8);
    let configuration = rig.driver.registers.read32(offset::CC).unwrap();
    rig.write32(offset::CC, 0);
    rig.write32(offset::CC, configuration);
    rig.poll(3);
    assert!(rig.controller().home.engine.queues.submission(1).is_none());
    gate.open();
    rig.poll(3);
    assert!(rig.csts().ready());
    assert!(rig.controller().home.engine.queues.submission(1).is_none());
}

#[test]
fn a_function_level_reset_is_complete() {
    for done in [0, 3, 8] {
        let (mut rig, gate) = with_commands(8);
        gate.allow(done);
        rig.poll(1);
        let completions = rig.driver.pair(1).unwrap().completion;
        let before = rig.bytes(completions, 1024);
        rig.controller().config_write(4, &[6, 0]);
        rig.controller().reset();
        assert_eq!(rig.csts().0, 0);
        assert_eq!(rig.driver.registers.read32(offset::AQA).unwrap(), 0);
        let mut command = [0; 2];
        rig.controller().config_read(4, &mut command);
        assert_eq!(command, [0, 0]);
        gate.open();
        rig.poll(3);
        assert!(rig.bytes(completions, 1024) == before);
        rig.driver.enable(16).unwrap();
        let log = admin(AdminOpcode::GetLogPage).with_dword(10, 2 | 127 << 16);
        assert_eq!(rig.driver.admin_read(log, 512).unwrap()[144], 1, "an unsafe shutdown");
    }
}

#[test]
fn shutdown_waits_and_flushes() {
    let (mut rig, gate) = with_commands(8);
    let asked = Configuration::ENABLE.with_shutdown(Configuration::SHUTDOWN_NORMAL);
    rig.write32(offset::CC, asked.0);
    rig.poll(3);
    assert!(rig.csts().shutdown_occurring());
    gate.allow(8);
    rig.poll(3);
    assert_eq!(rig.reap(1).len(), 8, "commands in flight end as usual");
    assert!(rig.csts().shutdown_occurring(), "the flush has not ended");
    gate.open();
    rig.poll(3);
    assert_eq!(gate.flushes.load(Relaxed), 1);
    assert!(rig.csts().shutdown_complete());
    // Commands are not looked at until a reset.
    rig.driver.submit(1, SubmissionEntry::new(0, 1)).unwrap();
    rig.poll(3);
    assert!(rig.reap(1).is_empty());
    rig.driver.disable().unwrap();
    rig.driver.enable(16).unwrap();
    assert_eq!(rig.csts().0, 1);
    rig.driver.identify_controller().unwrap();
}

#[test]
fn a_reset_may_come_in_the_middle_of_a_shutdown() {
    for step in 0..3 {
        let (mut rig, gate) = with_commands(4);
        rig.write32(offset::CC, Configuration::ENABLE.with_shutdown(1).0);
        rig.poll(1);
        gate.allow([0, 4, 5][step]);
        rig.poll(2);
        rig.write32(offset::CC, 0);
        rig.poll(2);
        gate.open();
        rig.driver.enable(16).unwrap();
        assert_eq!(rig.csts().0, 1);
        rig.driver.identify_controller().unwrap();
    }
}

#[test]
fn a_disabled_controller_shuts_down_too() {
    let mut rig = Setup::new().admin();
    rig.driver.disable().unwrap();
    rig.write32(offset::CC, Configuration(0).with_shutdown(1).0);
    rig.poll(3);
    assert!(rig.csts().shutdown_complete());
    rig.driver.enable(16).unwrap();
    rig.driver.identify_controller().unwrap();
}

#[test]
fn settings_that_are_not_offered_are_fatal() {
    let wrong = [
        Configuration(Configuration::ENABLE.0 | 1 << 4),
        Configuration(Configuration::ENABLE.0 | 5 << 7),
        Configuration(Configuration::ENABLE.0 | 1 << 11),
    ];
    for configuration in wrong {
        let mut rig = Setup::new().admin();
        rig.driver.disable().unwrap();
        rig.write32(offset::CC, configuration.0);
        rig.poll(2);
        assert!(rig.csts().fatal() && !rig.csts().ready(), "{configuration:?}");
        rig.write32(offset::CC, 0);
        rig.poll(2);
        assert_eq!(rig.csts().0, 0);
        rig.driver.enable(16).unwrap();
    }
    // Admin queues of one entry.
    let mut rig = Setup::new().admin();
    rig.driver.disable().unwrap();
    rig.write32(offset::AQA, 0);
    rig.write32(offset::CC, Configuration::ENABLE.0);
    rig.poll(2);
    assert!(rig.csts().fatal());
}

#[test]
fn larger_pages_work() {
    for shift in 1..=4u32 {
        let mut rig = Setup::new().admin();
        let page = 4096u64 << shift;
        rig.driver.disable().unwrap();
        let at = rig.buffer(1 << 18).next_multiple_of(page);
        rig.write32(offset::AQA, 0x000f_000f);
        rig.write32(offset::ASQ, at as u32);
        rig.write32(offset::ACQ, (at + page) as u32);
        rig.write32(offset::CC, Configuration::ENABLE.0 | shift << 7);
        rig.poll(1);
        assert!(rig.csts().ready());
        // Identify Controller to the last quarter of a page: all of the data fits, except with 4
        // KiB pages.
        let data = at + 2 * page;
        let mut command = admin(AdminOpcode::Identify).with_dword(10, 1);
        command.prp1 = (data + page - 4096).into();
        rig.fill(at, zerocopy::IntoBytes::as_bytes(&command));
        rig.write32(offset::DOORBELLS, 1);
        rig.poll(2);
        assert_eq!(rig.bytes(at + page + 14, 2), [1, 0]);
        assert_eq!(rig.bytes(data + page - 4096 + 24, 7), b"Slipway");
    }
}

#[test]
fn registers_answer_any_access() {
    let mut rig = Setup::new().admin();
    let controller = rig.controller();
    let mut all = [0; 0x1000];
    for at in 0..0x1000u64 {
        let access = controller.read(0, at, &mut all[at as usize..at as usize + 1]);
        assert_eq!(access, slipway_pci::Access::Done);
    }
    let mut wide = [0; 8];
    controller.read(0, offset::CAP, &mut wide);
    assert_eq!(wide[..], all[..8]);
    assert_eq!(all[8..12], 0x0001_0400u32.to_le_bytes());
    // Read-only registers keep their values.
    controller.write(0, offset::CAP, &[0xff; 8]);
    controller.write(0, offset::VS, &[0xff; 4]);
    controller.write(0, offset::CSTS, &[0xff; 4]);
    let mut again = [0; 0x1000];
    controller.read(0, 0, &mut again);
    assert!(all == again);
    assert_eq!(controller.write(0, 0x15, &[0]), slipway_pci::Access::Refused);
    assert_eq!(controller.write(1, 0, &[0; 4]), slipway_pci::Access::Refused);
    assert_eq!(controller.read(0, crate::BAR_SIZE, &mut wide), slipway_pci::Access::Refused);
    controller.write(0, offset::INTMS, &0xf0u32.to_le_bytes());
    controller.write(0, offset::INTMC, &0x30u32.to_le_bytes());
    controller.read(0, offset::INTMS, &mut wide[..4]);
    assert_eq!(wide[0], 0xc0);
}

#[test]
fn keep_alive_expires_into_a_fatal_status() {
    let mut rig = Setup::new().alone().admin();
    let set = admin(AdminOpcode::SetFeatures)
        .with_dword(10, FeatureId::KeepAliveTimer.0.into())
        .with_dword(11, 1500);
    rig.driver.admin(set).unwrap();
    let get = admin(AdminOpcode::GetFeatures).with_dword(10, FeatureId::KeepAliveTimer.0.into());
    assert_eq!(rig.driver.admin(get).unwrap(), 2000, "rounded up to whole seconds");
    for _ in 0..5 {
        rig.advance(Duration::from_millis(1900));
        rig.driver.admin(admin(AdminOpcode::KeepAlive)).unwrap();
    }
    rig.poll(1);
    let idle = rig.controller().poll();
    assert_eq!(idle, Progress::Idle(Some(Duration::from_millis(5 * 1900 + 2000))));
    rig.advance(Duration::from_millis(1999));
    rig.poll(1);
    assert!(!rig.csts().fatal());
    rig.advance(Duration::from_millis(1));
    rig.poll(1);
    assert!(rig.csts().fatal());
    assert!(matches!(rig.driver.identify_controller(), Err(DriverError::Fatal)));
    rig.driver.enable(16).unwrap();
    rig.driver.identify_controller().unwrap();
    assert_eq!(rig.controller().poll(), Progress::Idle(None), "off after a reset");
}

#[test]
fn power_on_hours_follow_the_clock() {
    let mut rig = Setup::new().admin();
    rig.advance(Duration::from_secs(3 * 3600 + 5));
    let log = admin(AdminOpcode::GetLogPage).with_dword(10, 2 | 127 << 16);
    assert_eq!(rig.driver.admin_read(log, 512).unwrap()[128], 3);
}

#[test]
fn quiesce_ends_what_is_in_flight() {
    let (mut rig, gate) = with_commands(8);
    assert!(!rig.controller().quiesce());
    gate.allow(3);
    assert!(!rig.controller().quiesce());
    gate.open();
    assert!(rig.controller().quiesce());
    assert_eq!(rig.reap(1).len(), 8);
}
