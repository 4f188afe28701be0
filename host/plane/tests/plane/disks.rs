//! Named disks, which endpoints share: attached, detached and resized while drivers run.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use slipway_disks::Error as DiskError;
use slipway_nvme::ChangeError;
use slipway_nvme::driver::{Driver, RegisterAccess, admin, io, succeeded};
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::feature::FeatureId;
use slipway_nvme_spec::identify::{Cns, IdentifyNamespace};
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::status::Status;
use slipway_plane::Error;
use slipway_plane_api::v1::{self, disk::Kind};
use slipway_vfio_user_client::sealed_memory;
use slipway_vfio_user_spec::device_state;

use crate::common::*;

fn disk(kind: Kind) -> Option<v1::Disk> {
    Some(v1::Disk { block_size: 0, kind: Some(kind) })
}

fn named(name: &str, read_only: bool) -> Kind {
    Kind::Named(v1::NamedDiskReference { name: name.into(), read_only })
}

fn create(rig: &Rig, name: &str, kind: Kind) -> Result<v1::NamedDisk, Error> {
    rig.plane.create_disk(&v1::CreateDiskRequest { name: name.into(), disk: disk(kind) })
}

fn resize(rig: &Rig, name: &str, size_bytes: u64, shrink: bool) -> Result<v1::NamedDisk, Error> {
    rig.plane.resize_disk(&v1::ResizeDiskRequest { name: name.into(), size_bytes, shrink })
}

fn attach(rig: &Rig, id: &str, nsid: u32, kind: Kind) -> Result<v1::NamespaceStatus, Error> {
    let (endpoint_id, disk) = (id.into(), disk(kind));
    rig.plane.attach(&v1::AttachDiskRequest { endpoint_id, disk, nsid })
}

fn detach(rig: &Rig, id: &str, nsid: u32) -> Result<(), Error> {
    let namespace = Some(v1::detach_disk_request::Namespace::Nsid(nsid));
    rig.plane.detach(&v1::DetachDiskRequest { endpoint_id: id.into(), namespace })
}

/// Makes an endpoint and a driver for it, with an I/O queue.
fn endpoint(rig: &mut Rig, id: &str, disks: Vec<Kind>) -> Driver<Registers> {
    rig.socket = rig.dir.path().join(id);
    rig.plane.create(&rig.request(id, disks)).unwrap();
    let mut driver = rig.drive();
    driver.create_pair(1, 64, None).unwrap();
    driver
}

/// Requests events for changed namespaces.
fn listen(driver: &mut Driver<Registers>) {
    let set = admin(AdminOpcode::SetFeatures)
        .with_dword(10, FeatureId::AsynchronousEventConfiguration.0.into())
        .with_dword(11, 1 << 8);
    driver.admin(set).unwrap();
    driver.submit(0, admin(AdminOpcode::AsynchronousEventRequest)).unwrap();
}

/// Waits for an event, reads the list of changed namespaces, and requests the next event.
fn changed(driver: &mut Driver<Registers>) -> Vec<u32> {
    let mut entries = Vec::new();
    while entries.is_empty() {
        entries.append(&mut driver.unclaimed);
        driver.reap(0, &mut entries).unwrap();
        driver.registers.idle().unwrap();
    }
    assert_eq!(Event::from_dword(entries[0].result.get()), Event::NAMESPACE_CHANGED);
    let log = admin(AdminOpcode::GetLogPage).with_dword(10, 4 | 1023 << 16);
    let list = driver.admin_read(log, 4096).unwrap();
    driver.submit(0, admin(AdminOpcode::AsynchronousEventRequest)).unwrap();
    let words = list.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    words.take_while(|nsid| *nsid != 0).collect()
}

fn size(driver: &mut Driver<Registers>, nsid: u32) -> u64 {
    driver.identify_namespace(nsid).unwrap().size.get()
}

fn write(driver: &mut Driver<Registers>, nsid: u32, lba: u64, byte: u8) -> Result<(), String> {
    let buffer = driver.arena.allocate(512).unwrap();
    driver.arena.memory().write(buffer, &[byte; 512]).unwrap();
    let written = driver.transfer(1, io(NvmOpcode::Write, nsid, lba, 1), (buffer, 512));
    driver.arena.release(buffer, 512);
    written.map_err(|error| error.to_string())
}

fn read(driver: &mut Driver<Registers>, nsid: u32, lba: u64) -> u8 {
    let buffer = driver.arena.allocate(512).unwrap();
    driver.transfer(1, io(NvmOpcode::Read, nsid, lba, 1), (buffer, 512)).unwrap();
    let mut bytes = [0; 512];
    driver.arena.memory().read(buffer, &mut bytes).unwrap();
    driver.arena.release(buffer, 512);
    assert_eq!(bytes, [bytes[0]; 512]);
    bytes[0]
}

/// Checks the properties that every kind of shared disk has.
fn shared_by_two(rig: &mut Rig, kind: Kind) {
    create(rig, "data", kind).unwrap();
    let mut one = endpoint(rig, "one", vec![ram(1 << 20), named("data", false)]);
    let mut two = endpoint(rig, "two", vec![named("data", true)]);
    listen(&mut two);
    let (first, second) = (one.identify_namespace(2).unwrap(), two.identify_namespace(1).unwrap());
    assert_eq!((first.nguid, first.sharing), (second.nguid, IdentifyNamespace::SHARED));
    assert_ne!(first.nguid, [0; 16]);
    assert_eq!((first.attributes, second.attributes), (0, IdentifyNamespace::WRITE_PROTECTED));
    assert_eq!(one.identify_namespace(1).unwrap().sharing, 0);
    assert_eq!(
        one.identify(Cns::NamespaceDescriptors, 2).unwrap(),
        two.identify(Cns::NamespaceDescriptors, 1).unwrap()
    );
    write(&mut one, 2, 2047, 7).unwrap();
    assert_eq!(read(&mut two, 1, 2047), 7);
    assert!(write(&mut two, 1, 0, 1).unwrap_err().contains("WRITE_PROTECTED"));

    let grown = resize(rig, "data", 2 << 20, false).unwrap();
    assert_eq!((grown.size_bytes, grown.users.len()), (2 << 20, 2));
    assert_eq!(changed(&mut two), [1]);
    assert_eq!((size(&mut one, 2), size(&mut two, 1)), (4096, 4096));
    write(&mut one, 2, 4095, 9).unwrap();
    assert_eq!((read(&mut two, 1, 4095), read(&mut two, 1, 2047)), (9, 7));
    assert!(matches!(resize(rig, "data", 1 << 20, false), Err(Error::Disk(DiskError::Invalid(_)))));
    resize(rig, "data", 1 << 20, true).unwrap();
    assert_eq!(changed(&mut two), [1]);
    assert!(write(&mut one, 2, 4095, 9).unwrap_err().contains("LBA_OUT_OF_RANGE"));
    resize(rig, "data", 2 << 20, false).unwrap();
    assert_eq!((read(&mut one, 2, 4095), read(&mut one, 2, 2047)), (0, 7));
    assert!(matches!(rig.plane.remove_disk("data"), Err(Error::DiskInUse(..))));
}

#[test]
fn two_endpoints_share_a_ram_disk() {
    shared_by_two(&mut Rig::new(), ram(1 << 20));
}

fn file_of(rig: &Rig, bytes: usize) -> (PathBuf, Kind) {
    let path = rig.dir.path().join("disk");
    std::fs::write(&path, vec![0; bytes]).unwrap();
    let file = v1::FileDisk { path: path.to_string_lossy().into_owned(), ..Default::default() };
    (path, Kind::File(file))
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

#[test]
fn two_endpoints_share_a_file() {
    let mut rig = Rig::new();
    let (path, kind) = file_of(&rig, 1 << 20);
    shared_by_two(&mut rig, kind.clone());
    assert_eq!(length(&path), 2 << 20);
    assert!(
        matches!(create(&rig, "again", kind.clone()), Err(Error::Disk(DiskError::Open(_)))),
        "in use"
    );
    for id in ["one", "two"] {
        rig.plane.remove(id).unwrap();
    }
    // Another process made the file larger.
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(3 << 20).unwrap();
    assert_eq!(resize(&rig, "data", 0, false).unwrap().size_bytes, 3 << 20);
    rig.plane.remove_disk("data").unwrap();
    assert_eq!(length(&path), 3 << 20);
    create(&rig, "again", kind).unwrap();
}

#[test]
fn a_disk_on_another_device_than_the_described_one_is_refused() {
    let mut rig = Rig::new();
    let (_, kind) = file_of(&rig, 1 << 20);
    let Kind::File(file) = kind.clone() else { panic!("{kind:?}") };
    let device = Some(v1::DeviceIdentity { number: rustix::fs::makedev(8, 16), sequence: 3 });
    let other = Kind::File(v1::FileDisk { device, ..file });
    let expected = "was the device 8:16 (diskseq 3) and is none now";
    let said = create(&rig, "data", other.clone()).unwrap_err().to_string();
    assert!(said.contains(expected), "{said}");
    let _driver = endpoint(&mut rig, "one", vec![]);
    let said = attach(&rig, "one", 1, other).unwrap_err().to_string();
    assert!(said.contains(expected), "{said}");
    // The refused disks hold nothing.
    attach(&rig, "one", 1, kind).unwrap();
}

/// Maps sealed memory of a client at `iova`.
fn lend(driver: &mut Driver<Registers>, iova: u64, len: u64) -> OwnedFd {
    let file = sealed_memory(len).unwrap();
    driver.registers.client.map(iova, len, file.as_fd(), 0, true).unwrap();
    file
}

/// Memory that a disk keeps pinned is released when it is unmapped: memory mapped in its place is
/// used.
#[test]
fn pinned_memory_is_let_go_with_its_map() {
    const AT: u64 = 1 << 36;
    let mut rig = Rig::new();
    // Not on the file system of /tmp, which may be one without O_DIRECT.
    let beside = std::env::current_exe().unwrap();
    let dir = tempfile::tempdir_in(beside.parent().unwrap()).unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let path = path.to_string_lossy().into_owned();
    let file = Kind::File(v1::FileDisk { path, pin: true, ..Default::default() });
    let mut driver = endpoint(&mut rig, "one", vec![file]);
    for round in 1..=4_u8 {
        let memory = lend(&mut driver, AT, 4 << 20);
        for lba in [0, 8, 2040] {
            let at = lba * 512 + (u64::from(round) << 12);
            rustix::io::pwrite(&memory, &[round; 4096], at).unwrap();
            let prp = |opcode, at: u64| SubmissionEntry {
                prp1: (AT + at).into(),
                ..io(opcode, 1, lba, 8)
            };
            driver.run(1, prp(NvmOpcode::Write, at)).map(succeeded).unwrap().unwrap();
            driver.run(1, prp(NvmOpcode::Read, 3 << 20)).map(succeeded).unwrap().unwrap();
            let mut found = [0; 4096];
            rustix::io::pread(&memory, &mut found, 3 << 20).unwrap();
            assert_eq!(found, [round; 4096], "block {lba}");
        }
        driver.registers.client.unmap(AT, 4 << 20).unwrap();
    }
    round_trip(&mut driver, 1, 3, 5);
}

/// A file whose file system has less free than it is to leave to others takes no new blocks, and
/// goes on with those that it has.
#[test]
fn a_file_that_keeps_a_reserve_takes_no_more_space() {
    let mut rig = Rig::new();
    let (path, _) = file_of(&rig, 1 << 20);
    std::fs::write(&path, [5; 64 << 10]).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    let path = path.to_string_lossy().into_owned();
    let file = v1::FileDisk { path: path.clone(), keep_free_bytes: u64::MAX, ..Default::default() };
    let mut driver = endpoint(&mut rig, "one", vec![Kind::File(file)]);
    assert_eq!(rig.plane.get("one").unwrap().namespaces[0].path, path);
    let refused = || rig.plane.get("one").unwrap().namespaces[0].refused_writes;
    write(&mut driver, 1, 8, 7).unwrap();
    assert_eq!(refused(), 0);
    for lba in [1024, 2047] {
        let full = write(&mut driver, 1, lba, 7).unwrap_err();
        assert!(full.contains("CAPACITY_EXCEEDED"), "{full}");
    }
    write(&mut driver, 1, 16, 9).unwrap();
    assert_eq!((read(&mut driver, 1, 8), read(&mut driver, 1, 16)), (7, 9));
    assert_eq!((read(&mut driver, 1, 1024), refused()), (0, 2));
}

#[test]
fn disks_come_and_go_under_a_driver() {
    let mut rig = Rig::new();
    let (_, file) = file_of(&rig, 1 << 20);
    let mut driver = endpoint(&mut rig, "one", vec![]);
    listen(&mut driver);
    create(&rig, "data", file).unwrap();
    assert_eq!(attach(&rig, "one", 0, ram(1 << 20)).unwrap().nsid, 1);
    assert_eq!(attach(&rig, "one", 5, named("data", false)).unwrap().kind, "file");
    let mut seen = Vec::new();
    while seen != [1, 5] {
        seen.extend(changed(&mut driver));
        seen.sort_unstable();
    }
    round_trip(&mut driver, 1, 3, 5);
    // The disk's descriptor wakes the reactor although it was added later.
    round_trip(&mut driver, 5, 7, 64);
    for nsid in [1, 1025] {
        assert!(matches!(attach(&rig, "one", nsid, ram(1 << 20)), Err(Error::Change(_))));
    }
    assert!(matches!(attach(&rig, "no", 0, ram(1 << 20)), Err(Error::Unknown(_))));
    assert!(matches!(
        attach(&rig, "one", 0, named("no", true)),
        Err(Error::Disk(DiskError::UnknownDisk(_)))
    ));
    assert_eq!(rig.plane.get("one").unwrap().namespaces.len(), 2, "refusals leave nothing");

    detach(&rig, "one", 1).unwrap();
    assert_eq!(changed(&mut driver), [1]);
    assert_eq!(size(&mut driver, 1), 0);
    assert!(write(&mut driver, 1, 0, 1).unwrap_err().contains("INVALID_NAMESPACE"));
    assert!(matches!(detach(&rig, "one", 1), Err(Error::UnknownNamespace(_))));
    assert_eq!(attach(&rig, "one", 0, ram(2 << 20)).unwrap().nsid, 1);
    assert_eq!((changed(&mut driver), size(&mut driver, 1)), (vec![1], 4096));
    let namespace = Some(v1::detach_disk_request::Namespace::Disk("data".into()));
    let request = v1::DetachDiskRequest { endpoint_id: "one".into(), namespace };
    rig.plane.detach(&request).unwrap();
    assert_eq!(changed(&mut driver), [5]);
    assert!(matches!(rig.plane.detach(&request), Err(Error::UnknownNamespace(_))));
    rig.plane.remove_disk("data").unwrap();
    assert!(rig.plane.list_disks().is_empty());
}

/// A client that has stopped its function has its endpoint change nothing.
#[test]
fn a_function_that_is_stopped_holds_up_no_other_endpoint() {
    let mut rig = Rig::new();
    for name in ["data", "other"] {
        create(&rig, name, ram(1 << 20)).unwrap();
    }
    let mut driver = endpoint(&mut rig, "one", vec![named("data", false)]);
    let socket_path = rig.dir.path().join("two").to_string_lossy().into_owned();
    let two = v1::CreateEndpointRequest { socket_path, ..rig.request("two", vec![]) };
    driver.registers.client.set_device_state(device_state::STOP).unwrap();
    std::thread::scope(|scope| {
        let attached = scope.spawn(|| attach(&rig, "one", 2, ram(1 << 20)));
        while rig.plane.get("one").unwrap().namespaces.len() < 2 {
            std::thread::yield_now();
        }
        rig.plane.remove_disk("other").unwrap();
        let resized = scope.spawn(|| resize(&rig, "data", 2 << 20, false));
        while rig.plane.list_disks()[0].size_bytes == 1 << 20 {
            std::thread::yield_now();
        }
        rig.plane.create(&two).unwrap();
        // Neither has failed for want of an answer.
        driver.registers.client.set_device_state(device_state::RUNNING).unwrap();
        attached.join().unwrap().unwrap();
        resized.join().unwrap().unwrap();
    });
}

/// Commands are always in flight while the disk is detached, attached and resized. Each of them
/// ends, either with success or with a status that the change explains.
#[test]
fn nothing_is_lost_or_held_under_load() {
    let mut rig = Rig::new();
    let (_, file) = file_of(&rig, 1 << 20);
    create(&rig, "data", file).unwrap();
    let mut driver = endpoint(&mut rig, "one", vec![named("data", false)]);
    let (stop, counts) = (AtomicBool::new(false), Counts::default());
    std::thread::scope(|scope| {
        let load = scope.spawn(|| under_load(&mut driver, &stop, &counts));
        for round in 0..20 {
            detach(&rig, "one", 1).unwrap();
            attach(&rig, "one", 1, named("data", false)).unwrap();
            resize(&rig, "data", (1 << 20) + (round % 2) * 4096, true).unwrap();
        }
        // On a busy machine, the load may not have had a turn yet.
        while counts[0].load(Ordering::Relaxed) == 0 && !load.is_finished() {
            std::thread::yield_now();
        }
        stop.store(true, Ordering::Release);
        load.join().unwrap();
    });
    rig.plane.remove("one").unwrap();
    rig.plane.remove_disk("data").unwrap();
}

/// The number of commands that succeeded, and of those that found no namespace.
type Counts = [AtomicU64; 2];

/// Keeps 32 commands in flight until `stop`, then waits for all.
fn under_load(driver: &mut Driver<Registers>, stop: &AtomicBool, counts: &Counts) {
    let buffer = driver.arena.allocate(4096).unwrap();
    let (mut submitted, mut ended) = (0u64, 0u64);
    let mut entries = Vec::new();
    while !stop.load(Ordering::Acquire) || ended < submitted {
        while submitted - ended < 32 && !stop.load(Ordering::Acquire) {
            let opcode = if submitted % 3 == 0 { NvmOpcode::Write } else { NvmOpcode::Read };
            let command = io(opcode, 1, submitted % 255 * 8, 8);
            driver.submit(1, SubmissionEntry { prp1: buffer.into(), ..command }).unwrap();
            submitted += 1;
        }
        driver.reap(1, &mut entries).unwrap();
        for entry in entries.drain(..) {
            match Status(entry.status().code()) {
                Status::SUCCESS => counts[0].fetch_add(1, Ordering::Relaxed),
                Status::INVALID_NAMESPACE => counts[1].fetch_add(1, Ordering::Relaxed),
                other => panic!("{other:?}"),
            };
            ended += 1;
        }
        driver.registers.idle().unwrap();
    }
}

#[test]
fn what_is_no_disk_is_refused() {
    let rig = Rig::new();
    for bad in ["", "7", "a/b", "a:ro"] {
        assert!(
            matches!(create(&rig, bad, ram(1 << 20)), Err(Error::Disk(DiskError::Invalid(_)))),
            "{bad:?}"
        );
    }
    let overlay = Kind::Overlay(v1::OverlayDisk { base_path: "/x".into(), limit_bytes: 0 });
    for bad in [overlay, named("x", false)] {
        assert!(matches!(create(&rig, "x", bad), Err(Error::Disk(DiskError::Invalid(_)))));
    }
    let none = v1::CreateDiskRequest { name: "x".into(), disk: None };
    assert!(matches!(rig.plane.create_disk(&none), Err(Error::Disk(DiskError::Invalid(_)))));
    assert!(matches!(create(&rig, "x", ram(100)), Err(Error::Disk(DiskError::Open(_)))));
    assert!(matches!(
        resize(&rig, "x", 1 << 20, false),
        Err(Error::Disk(DiskError::UnknownDisk(_)))
    ));
    assert!(matches!(rig.plane.remove_disk("x"), Err(Error::Disk(DiskError::UnknownDisk(_)))));
    create(&rig, "x", ram(1 << 20)).unwrap();
    assert!(matches!(
        create(&rig, "x", ram(1 << 20)),
        Err(Error::Disk(DiskError::ExistingDisk(_)))
    ));
    assert!(matches!(resize(&rig, "x", 1000, true), Err(Error::Disk(DiskError::Open(_)))));
    assert_eq!(rig.plane.list_disks()[0].size_bytes, 1 << 20);
    let no_endpoint = v1::DetachDiskRequest { endpoint_id: "x".into(), namespace: None };
    assert!(matches!(rig.plane.detach(&no_endpoint), Err(Error::Unknown(_))));
}

#[test]
fn limits_are_set_and_lifted_while_it_runs() {
    let mut rig = Rig::new();
    let mut driver = endpoint(&mut rig, "one", vec![ram(1 << 20)]);
    let limit = |commands_per_second| {
        let limits = v1::Limits { commands_per_second, command_burst: 1, ..Default::default() };
        rig.plane
            .limit(&v1::LimitEndpointRequest { endpoint_id: "one".into(), limits: Some(limits) })
    };
    limit(50).unwrap();
    let begun = std::time::Instant::now();
    for lba in 0..6 {
        write(&mut driver, 1, lba, 7).unwrap();
    }
    // At least this long: a slow machine takes longer, none takes less.
    assert!(begun.elapsed() >= std::time::Duration::from_millis(100), "{:?}", begun.elapsed());
    limit(0).unwrap();
    for lba in 0..200 {
        write(&mut driver, 1, lba, 7).unwrap();
    }
    let unknown = v1::LimitEndpointRequest { endpoint_id: "no".into(), limits: None };
    assert!(matches!(rig.plane.limit(&unknown), Err(Error::Unknown(_))));
}

/// One thread attaches a namespace again and again, and another detaches it as soon as it is
/// listed: the controller has them in the order in which they were accepted.
#[test]
fn a_detach_right_after_its_attach_was_accepted_comes_after_it() {
    let mut rig = Rig::new();
    let _driver = endpoint(&mut rig, "one", vec![]);
    let (rig, ends) = (&rig, &AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                match detach(rig, "one", 1) {
                    Ok(()) | Err(Error::UnknownNamespace(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        });
        let mut failed = None;
        for _ in 0..2000 {
            match attach(rig, "one", 1, ram(1 << 20)) {
                // The other thread has not detached the last one yet.
                Ok(_) | Err(Error::Change(ChangeError::Taken(_))) => {}
                Err(error) => failed = Some(error),
            }
        }
        ends.store(true, Ordering::Relaxed);
        assert!(failed.is_none(), "{failed:?}");
    });
    let _ = detach(rig, "one", 1);
    attach(rig, "one", 1, ram(1 << 20)).unwrap();
}
