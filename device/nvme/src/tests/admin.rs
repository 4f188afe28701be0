//! Admin commands: Identify, features, logs, events, abort.

use std::time::Duration;

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::feature::FeatureId;
use slipway_nvme_spec::identify::Cns;
use slipway_nvme_spec::opcode::AdminOpcode;
use slipway_nvme_spec::status::Status;

use super::rig::{Rig, Setup, ram};
use crate::driver::admin;

fn get(rig: &mut Rig, id: FeatureId, select: u32, cdw11: u32) -> u32 {
    let command = admin(AdminOpcode::GetFeatures)
        .with_dword(10, u32::from(id.0) | select << 8)
        .with_dword(11, cdw11);
    rig.driver.admin(SubmissionEntry { nsid: 1.into(), ..command }).unwrap()
}

fn set(rig: &mut Rig, id: FeatureId, cdw11: u32) -> u32 {
    let command = admin(AdminOpcode::SetFeatures).with_dword(10, id.0.into()).with_dword(11, cdw11);
    let nsid = u32::from(id == FeatureId::ErrorRecovery);
    rig.driver.admin(SubmissionEntry { nsid: nsid.into(), ..command }).unwrap()
}

fn log(rig: &mut Rig, id: u32, len: usize, offset: u32, retain: bool) -> Vec<u8> {
    let dwords = len as u32 / 4 - 1;
    let command = admin(AdminOpcode::GetLogPage)
        .with_dword(10, id | u32::from(retain) << 15 | dwords << 16)
        .with_dword(11, dwords >> 16)
        .with_dword(12, offset);
    rig.driver.admin_read(command, len).unwrap()
}

#[test]
fn identify_controller_says_what_there_is() {
    let mut rig = Setup::new().alone().admin();
    let page = rig.driver.identify_controller().unwrap();
    assert_eq!(&page.serial, b"TEST0001            ");
    assert_eq!(page.max_transfer, 8, "1 MiB of 4 KiB pages");
    assert_eq!((page.submission_entry, page.completion_entry), (0x66, 0x44));
    assert_eq!(page.namespaces.get(), 1024, "the highest that can be, as namespaces come and go");
    assert_eq!(page.version.get(), 0x0001_0400);
    assert_eq!(page.controller_type, 1);
    assert_eq!(page.sgl.get(), 2 | 1 << 18);
    assert_eq!(page.write_cache, 7);
    assert_eq!((page.nvm_commands.get(), page.fused.get()), (0x1dd, 1));
    assert_eq!((page.copy_formats.get(), page.atomic_compare_write.get()), (1, 0));
    assert!(page.nqn.starts_with(b"nqn."));
    let again = rig.driver.identify_controller().unwrap();
    assert_eq!(zerocopy::IntoBytes::as_bytes(&*page), zerocopy::IntoBytes::as_bytes(&*again));
}

#[test]
fn several_namespaces_are_listed_and_described() {
    let mut setup = Setup::new();
    setup.disks = vec![ram(1 << 20, 512), ram(2 << 20, 4096), ram(3 << 20, 512)];
    let mut rig = setup.admin();
    let list = rig.driver.identify(Cns::ActiveNamespaces, 0).unwrap();
    assert_eq!(list[..16], [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
    assert!(list[16..].iter().all(|byte| *byte == 0));
    let list = rig.driver.identify(Cns::AllocatedNamespaces, 2).unwrap();
    assert_eq!(list[..8], [3, 0, 0, 0, 0, 0, 0, 0]);
    let second = rig.driver.identify_namespace(2).unwrap();
    assert_eq!((second.size.get(), second.block_size(), second.nguid), (512, 4096, [2; 16]));
    let descriptors = rig.driver.identify(Cns::NamespaceDescriptors, 3).unwrap();
    assert_eq!(descriptors[..4], [2, 16, 0, 0]);
    assert_eq!(descriptors[4..20], [3; 16]);
    assert_eq!(descriptors[20..24], [3, 16, 0, 0]);
    assert!(descriptors[40..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_controller_lists_itself() {
    let mut rig = Setup::new().admin();
    let mut list = |cns: Cns, nsid, from: u32| {
        let mut identify =
            admin(AdminOpcode::Identify).with_dword(10, u32::from(cns.0) | from << 16);
        identify.nsid.set(nsid);
        rig.driver.admin_read(identify, 4096)
    };
    let id = list(Cns::Controllers, 0, 0).unwrap();
    assert_eq!(id[..6], [1, 0, 1, 0, 0, 0]);
    assert_eq!(list(Cns::Controllers, 0, 1).unwrap(), id);
    assert_eq!(list(Cns::Controllers, 0, 2).unwrap(), [0; 4096], "those from CNTID on");
    assert_eq!(list(Cns::AttachedControllers, 1, 0).unwrap(), id);
    assert_eq!(list(Cns::AttachedControllers, 2, 0).unwrap(), [0; 4096], "there is none");
    assert!(list(Cns::AttachedControllers, u32::MAX, 0).is_err());
    let controller = rig.driver.identify_controller().unwrap();
    assert_eq!(controller.controller_id.get().to_le_bytes(), id[2..4]);
}

#[test]
fn features_can_be_set_and_read() {
    let mut rig = Setup::new().admin();
    let cases = [
        (FeatureId::Arbitration, 0x0102_0306, 0, 0x0102_0306, 6),
        (FeatureId::PowerManagement, 2 << 5, 0, 2 << 5, 0),
        (FeatureId::TemperatureThreshold, 350, 0, 350, 343),
        (FeatureId::TemperatureThreshold, 1 << 20 | 260, 1 << 20, 260, 0),
        (FeatureId::ErrorRecovery, 77, 0, 77, 0),
        (FeatureId::VolatileWriteCache, 0, 0, 0, 1),
        (FeatureId::InterruptCoalescing, 0x0a05, 0, 0x0a05, 0),
        (FeatureId::InterruptVectorConfiguration, 1 << 16 | 3, 3, 1 << 16 | 3, 3),
        (FeatureId::WriteAtomicity, 1, 0, 1, 0),
        (FeatureId::AsynchronousEventConfiguration, 0x1ff, 0, 0x1ff, 0),
        (FeatureId::KeepAliveTimer, 5000, 0, 5000, 0),
        (FeatureId::NumberOfQueues, 3 << 16 | 7, 0, 7 << 16 | 7, 63 << 16 | 63),
    ];
    for (id, value, which, now, default) in cases {
        assert_eq!(get(&mut rig, id, 0, which), default, "{id:?} before");
        set(&mut rig, id, value);
        assert_eq!(get(&mut rig, id, 0, which), now, "{id:?} current");
        assert_eq!(get(&mut rig, id, 1, which), default, "{id:?} default");
        assert_eq!(get(&mut rig, id, 2, which), default, "{id:?} saved");
        let capabilities = if id == FeatureId::ErrorRecovery { 6 } else { 4 };
        assert_eq!(get(&mut rig, id, 3, which), capabilities, "{id:?} capabilities");
    }
    rig.driver.enable(32).unwrap();
    for (id, _, which, _, default) in cases {
        assert_eq!(get(&mut rig, id, 0, which), default, "{id:?} after a reset");
    }
}

#[test]
fn features_with_data_can_be_set_and_read() {
    let mut rig = Setup::new().admin();
    let page = rig.buffer(4096);
    let feature = |opcode, id: FeatureId, cdw11| {
        let command = admin(opcode).with_dword(10, id.0.into()).with_dword(11, cdw11);
        SubmissionEntry { prp1: page.into(), ..command }
    };
    let id: Vec<u8> = (1..=16).collect();
    rig.fill(page, &id);
    rig.driver.admin(feature(AdminOpcode::SetFeatures, FeatureId::HostIdentifier, 1)).unwrap();
    rig.fill(page, &[0; 32]);
    rig.driver.admin(feature(AdminOpcode::GetFeatures, FeatureId::HostIdentifier, 1)).unwrap();
    assert_eq!(rig.bytes(page, 32), [&id[..], &[0; 16]].concat());
    let mut behavior = [0; 512];
    behavior[0] = 1;
    rig.fill(page, &behavior);
    rig.driver.admin(feature(AdminOpcode::SetFeatures, FeatureId::HostBehaviorSupport, 0)).unwrap();
    rig.fill(page, &[0xff; 512]);
    rig.driver.admin(feature(AdminOpcode::GetFeatures, FeatureId::HostBehaviorSupport, 0)).unwrap();
    assert_eq!(rig.bytes(page, 512), behavior);
    rig.fill(page, &[2]);
    let refused = feature(AdminOpcode::SetFeatures, FeatureId::HostBehaviorSupport, 0);
    assert_eq!(rig.status(0, refused), Status::INVALID_FIELD.dnr());
    let no_such_state = feature(AdminOpcode::SetFeatures, FeatureId::PowerManagement, 2 << 5 | 1);
    assert_eq!(rig.status(0, no_such_state), Status::INVALID_FIELD.dnr());
    rig.fill(page, &1_000_000u64.to_le_bytes());
    rig.driver.admin(feature(AdminOpcode::SetFeatures, FeatureId::Timestamp, 0)).unwrap();
    rig.advance(Duration::from_millis(2500));
    rig.driver.admin(feature(AdminOpcode::GetFeatures, FeatureId::Timestamp, 0)).unwrap();
    let stamp = rig.bytes(page, 8);
    assert_eq!(stamp[..6], 1_002_500u64.to_le_bytes()[..6]);
    assert_eq!(stamp[6], 2, "set by the host");
}

#[test]
fn logs_have_offsets() {
    let mut rig = Setup::new().admin();
    let effects = log(&mut rig, 5, 4096, 0, false);
    assert_eq!(effects[6 * 4], 1, "Identify is supported");
    assert_eq!(effects[1024 + 4], 3, "Write changes content");
    assert_eq!(effects[1024 + 5 * 4], 1, "Compare is supported");
    assert_eq!(effects[1024 + 4 * 4], 0, "Write Uncorrectable is not");
    assert_eq!(effects[1024 + 0x19 * 4], 3, "Copy changes content");
    assert_eq!(log(&mut rig, 5, 8, 1024, false), effects[1024..1032]);
    let slot = log(&mut rig, 3, 512, 0, false);
    assert_eq!(slot[0], 1);
    assert!(slot[8..16].starts_with(env!("CARGO_PKG_VERSION").as_bytes()));
    assert_eq!(log(&mut rig, 3, 1024, 0, false)[..512], slot, "zeros past the end");
    assert!(log(&mut rig, 4, 4096, 0, false).iter().all(|byte| *byte == 0));
}

#[test]
fn events_are_masked_until_their_log_is_read() {
    let mut rig = Setup::new().admin();
    set(&mut rig, FeatureId::AsynchronousEventConfiguration, 2);
    for _ in 0..4 {
        rig.driver.submit(0, admin(AdminOpcode::AsynchronousEventRequest)).unwrap();
    }
    let fifth = rig.status(0, admin(AdminOpcode::AsynchronousEventRequest));
    assert_eq!(fifth, Status::EVENT_LIMIT_EXCEEDED.dnr());
    let hot = |rig: &mut Rig| {
        set(rig, FeatureId::TemperatureThreshold, 400);
        set(rig, FeatureId::TemperatureThreshold, 290);
        rig.poll(2);
        let mut events = std::mem::take(&mut rig.driver.unclaimed);
        events.extend(rig.reap(0));
        events.into_iter().map(|entry| Event::from_dword(entry.result.get())).collect::<Vec<_>>()
    };
    assert_eq!(hot(&mut rig), [Event::TEMPERATURE]);
    assert_eq!(hot(&mut rig), [], "masked");
    assert_eq!(log(&mut rig, 2, 512, 0, true)[0], 2, "the warning, with the event retained");
    assert_eq!(hot(&mut rig), [], "still masked");
    log(&mut rig, 2, 512, 0, false);
    assert_eq!(hot(&mut rig), [Event::TEMPERATURE], "what waited is reported once");
}

#[test]
fn abort_takes_event_requests_back_and_nothing_else() {
    let mut rig = Setup::new().rig();
    let abort =
        |queue: u32, id: u16| admin(AdminOpcode::Abort).with_dword(10, u32::from(id) << 16 | queue);
    let id = rig.driver.submit(0, admin(AdminOpcode::AsynchronousEventRequest)).unwrap();
    assert_eq!(rig.driver.admin(abort(0, id.wrapping_add(5))).unwrap(), 1);
    assert_eq!(rig.driver.admin(abort(1, id)).unwrap(), 1);
    assert_eq!(rig.driver.admin(abort(0, id)).unwrap(), 0);
    let aborted = &rig.driver.unclaimed[0];
    assert_eq!((aborted.id.get(), aborted.status()), (id, Status::ABORT_REQUESTED));
    assert_eq!(rig.driver.admin(abort(0, id)).unwrap(), 1, "only once");
}

#[test]
fn a_controller_without_namespaces_is_one() {
    let mut setup = Setup::new();
    setup.disks = Vec::new();
    let mut rig = setup.rig();
    assert!(rig.driver.identify(Cns::ActiveNamespaces, 0).unwrap().iter().all(|byte| *byte == 0));
    assert_eq!(rig.driver.identify_namespace(1).unwrap().size.get(), 0);
    let flush = SubmissionEntry::new(0, slipway_nvme_spec::NSID_ALL);
    assert_eq!(rig.status(1, flush), Status::SUCCESS);
    rig.driver.shutdown().unwrap();
}
