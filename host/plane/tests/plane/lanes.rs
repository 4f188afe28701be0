//! One controller's queues on several reactors: data is verified on all queues while the client
//! does everything to the controller that a client can.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use slipway_nvme::driver::{Driver, RegisterAccess, Shadowed, admin, io};
use slipway_nvme_spec::command::{CompletionEntry, SubmissionEntry};
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::registers::{head_doorbell, offset, tail_doorbell};
use slipway_nvme_spec::status::Status;
use slipway_plane::Settings;
use slipway_plane_api::v1::{self, disk::Kind, nvme_controller::DoorbellMode};
use slipway_vfio_user_client::sealed_memory;

use crate::common::*;

const REACTORS: u32 = 2;

fn rig() -> Rig {
    Rig::with(Settings { reactors: REACTORS, ..Settings::default() })
}

fn create(rig: &mut Rig, id: &str, kinds: Vec<Kind>, doorbells: DoorbellMode) {
    rig.socket = rig.dir.path().join(id);
    let mut request = rig.request(id, kinds);
    let nvme = request.nvme.as_mut().unwrap();
    (nvme.lanes, nvme.doorbells) = (REACTORS, doorbells.into());
    let made = rig.plane.create(&request).unwrap();
    assert_eq!(made.lane_reactors.len(), 1);
    assert_ne!(made.lane_reactors[0], made.reactor);
}

/// Makes a driver with four queues, alternating between two lanes, each with an interrupt vector of
/// its own, so that no queue has to stay at home.
fn drive(rig: &Rig) -> Driver<Registers> {
    let mut driver = rig.drive();
    pairs(&mut driver);
    driver
}

const QUEUES: u16 = 4;

fn pairs<R: RegisterAccess>(driver: &mut Driver<R>) {
    for queue in 1..=QUEUES {
        driver.create_pair(queue, 16, Some(queue)).unwrap();
    }
}

/// Writes a pattern through queue `queue` and reads it back through another one.
fn cross<R: RegisterAccess>(driver: &mut Driver<R>, queue: u16, lba: u64) {
    let other = queue % QUEUES + 1;
    let len = 4096;
    let pattern: Vec<u8> = (0..len).map(|i| (i as u64 * 7 + lba * 3 + 1) as u8).collect();
    let (from, to) = (driver.arena.allocate(len).unwrap(), driver.arena.allocate(len).unwrap());
    driver.arena.memory().write(from, &pattern).unwrap();
    driver.transfer(queue, io(NvmOpcode::Write, 1, lba, 8), (from, len)).unwrap();
    driver.transfer(other, io(NvmOpcode::Read, 1, lba, 8), (to, len)).unwrap();
    let mut read = vec![0; len];
    driver.arena.memory().read(to, &mut read).unwrap();
    assert!(read == pattern, "block {lba}, queues {queue} and {other}");
    driver.arena.release(from, len);
    driver.arena.release(to, len);
}

fn verify<R: RegisterAccess>(driver: &mut Driver<R>, rounds: u64) {
    for round in 0..rounds {
        cross(driver, (round % u64::from(QUEUES)) as u16 + 1, round * 8 % 1024);
    }
}

/// Leaves commands in flight on every queue.
fn load(driver: &mut Driver<Registers>) {
    let buffer = driver.arena.allocate(4096).unwrap();
    for queue in 1..=QUEUES {
        for lba in 0..12 {
            let mut read = io(NvmOpcode::Read, 1, lba * 8, 8);
            (read.prp1, read.prp2) = driver.point(buffer, 4096).unwrap();
            driver.submit(queue, read).unwrap();
        }
    }
    driver.arena.release(buffer, 4096);
}

/// Runs all operations on a disk of this kind.
fn lives(kind: Kind, doorbells: DoorbellMode) {
    let mut rig = rig();
    create(&mut rig, "one", vec![kind], doorbells);
    let mut driver = drive(&rig);
    verify(&mut driver, 200);
    // Queues are deleted and created while others have commands in flight.
    for _ in 0..10 {
        load(&mut driver);
        for queue in [1, 2] {
            driver.delete_pair(queue).unwrap();
        }
        for queue in [1, 2] {
            driver.create_pair(queue, 16, Some(queue)).unwrap();
        }
        settle(&mut driver);
        verify(&mut driver, 8);
    }
    // Resets with commands in flight on every queue.
    for _ in 0..10 {
        load(&mut driver);
        driver.enable(32).unwrap();
        pairs(&mut driver);
        verify(&mut driver, 8);
    }
    // Memory is unmapped under load: commands that use it end first, with or without an error.
    let spare = sealed_memory(MEMORY).unwrap();
    for _ in 0..20 {
        driver.registers.client.map(SPARE, MEMORY, spare.as_fd(), 0, true).unwrap();
        for queue in 1..=QUEUES {
            for lba in 0..12 {
                let mut read = io(NvmOpcode::Read, 1, lba * 8, 8);
                read.prp1 = SPARE.into();
                driver.submit(queue, read).unwrap();
            }
        }
        driver.registers.client.unmap(SPARE, MEMORY).unwrap();
        settle(&mut driver);
        verify(&mut driver, 4);
    }
    // The client disconnects in the middle; the next client finds the controller in its initial
    // state.
    load(&mut driver);
    drop(driver);
    let mut driver = drive(&rig);
    verify(&mut driver, 20);
    driver.shutdown().unwrap();
    drop(driver);
    rig.plane.remove("one").unwrap();
}

const SPARE: u64 = 1 << 40;

/// Waits until every queue has completed its commands; returns the entries.
fn settle(driver: &mut Driver<Registers>) -> Vec<CompletionEntry> {
    let mut entries = std::mem::take(&mut driver.unclaimed);
    for queue in 1..=QUEUES {
        while driver.pair(queue).is_some_and(|pair| pair.in_flight() > 0) {
            driver.reap(queue, &mut entries).unwrap();
            driver.registers.idle().unwrap();
        }
    }
    entries
}

#[test]
fn with_trapped_doorbells() {
    lives(ram(1 << 20), DoorbellMode::Trapped);
}

#[test]
fn with_mapped_doorbells() {
    lives(ram(1 << 20), DoorbellMode::Mapped);
}

#[test]
fn on_a_file() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let path = file.path().to_string_lossy().into_owned();
    lives(Kind::File(v1::FileDisk { path, ..Default::default() }), DoorbellMode::Trapped);
}

#[test]
fn with_shadow_doorbells() {
    let mut rig = rig();
    create(&mut rig, "one", vec![ram(1 << 20)], DoorbellMode::Trapped);
    let (arena, registers) = rig.connect();
    let registers = Shadowed::new(registers, arena.memory().clone());
    let mut driver = Driver::new(registers, arena, 32).unwrap();
    // Queues created before and after the pages were announced, on both threads.
    for queue in [1, 2] {
        driver.create_pair(queue, 16, Some(queue)).unwrap();
    }
    driver.shadow_doorbells(false).unwrap();
    for queue in [3, 4] {
        driver.create_pair(queue, 16, Some(queue)).unwrap();
    }
    for _ in 0..20 {
        verify(&mut driver, 8);
        // Long enough for both threads to request register writes and sleep.
        std::thread::sleep(Duration::from_millis(2));
    }
    driver.enable(32).unwrap();
    pairs(&mut driver);
    verify(&mut driver, 8);
}

#[test]
fn named_disks_come_grow_and_go_under_load() {
    let mut rig = rig();
    let disk = Some(v1::Disk { block_size: 0, kind: Some(ram(1 << 20)) });
    rig.plane.create_disk(&v1::CreateDiskRequest { name: "data".into(), disk }).unwrap();
    create(&mut rig, "one", vec![ram(1 << 20)], DoorbellMode::Mapped);
    let mut driver = drive(&rig);
    let reference = v1::NamedDiskReference { name: "data".into(), read_only: false };
    let disk = Some(v1::Disk { block_size: 0, kind: Some(Kind::Named(reference)) });
    let attach = v1::AttachDiskRequest { endpoint_id: "one".into(), disk, nsid: 2 };
    let nsid = Some(v1::detach_disk_request::Namespace::Nsid(2));
    let detach = v1::DetachDiskRequest { endpoint_id: "one".into(), namespace: nsid };
    let buffer = driver.arena.allocate(4096).unwrap();
    for round in 1..=20 {
        rig.plane.attach(&attach).unwrap();
        for queue in 1..=QUEUES {
            let write = io(NvmOpcode::Write, 2, 8 * u64::from(queue), 8);
            driver.transfer(queue, write, (buffer, 4096)).unwrap();
        }
        // A new size is valid on every queue at once, when it is reported.
        let bytes = (round + 1) << 20;
        let resize =
            v1::ResizeDiskRequest { name: "data".into(), size_bytes: bytes, shrink: false };
        rig.plane.resize_disk(&resize).unwrap();
        for queue in 1..=QUEUES {
            let last = io(NvmOpcode::Read, 2, bytes / 512 - 8, 8);
            driver.transfer(queue, last, (buffer, 4096)).unwrap();
        }
        for queue in 1..=QUEUES {
            for lba in 0..8 {
                let mut read = io(NvmOpcode::Read, 2, lba * 8, 8);
                (read.prp1, read.prp2) = driver.point(buffer, 4096).unwrap();
                driver.submit(queue, read).unwrap();
            }
        }
        rig.plane.detach(&detach).unwrap();
        let gone = Status::INVALID_NAMESPACE.code();
        let ended = settle(&mut driver);
        assert_eq!(ended.len(), 8 * usize::from(QUEUES));
        let fine = |status: Status| status.is_success() || status.code() == gone;
        assert!(ended.iter().all(|entry| fine(entry.status())), "{ended:?}");
        for queue in 1..=QUEUES {
            let read = SubmissionEntry { prp1: buffer.into(), ..io(NvmOpcode::Read, 2, 0, 1) };
            let ended = driver.run(queue, read).unwrap();
            assert_eq!(ended.status().code(), gone, "queue {queue} still has it");
        }
        verify(&mut driver, 4);
    }
}

#[test]
fn a_limit_holds_for_all_threads_together() {
    let mut rig = rig();
    create(&mut rig, "one", vec![ram(1 << 20)], DoorbellMode::Mapped);
    let mut driver = drive(&rig);
    let limits = v1::Limits { commands_per_second: 200, command_burst: 1, ..Default::default() };
    let request = v1::LimitEndpointRequest { endpoint_id: "one".into(), limits: Some(limits) };
    rig.plane.limit(&request).unwrap();
    let begun = Instant::now();
    load(&mut driver);
    assert!(settle(&mut driver).iter().all(|entry| entry.status().is_success()));
    // 48 commands, each 5 ms except for the first of each thread.
    assert!(begun.elapsed() >= Duration::from_millis(46 * 5), "{:?}", begun.elapsed());
}

#[test]
fn wild_doorbells_change_nothing() {
    let mut rig = rig();
    create(&mut rig, "one", vec![ram(1 << 20)], DoorbellMode::Trapped);
    let mut driver = drive(&rig);
    for value in [16, 17, 0xffff, 0x1_0001, u32::MAX, 15] {
        for queue in 0..=u16::from(u8::MAX) {
            for index in [tail_doorbell(queue), head_doorbell(queue)] {
                let at = offset::DOORBELLS + 4 * index as u64;
                // The admin queue's doorbells, and possible values, are excluded if they could harm
                // this driver.
                let harms = queue == 0 || value == 15 && queue <= QUEUES;
                if !harms && at < 0x2000 {
                    driver.registers.write32(at, value).unwrap();
                }
            }
        }
        verify(&mut driver, 8);
    }
    let log = admin(AdminOpcode::GetLogPage).with_dword(10, 1 | 15 << 16);
    let entry = driver.admin_read(log, 64).unwrap();
    assert!(entry[0] > 0, "they were noticed");
    // A controller that fails on one thread fails on all; a reset starts it anew.
    driver.registers.client.unmap(BASE, MEMORY).unwrap();
    assert!(driver.identify_controller().is_err());
}

#[test]
fn an_overlay_stays_on_one_thread() {
    let mut rig = rig();
    let base = tempfile::NamedTempFile::new().unwrap();
    base.as_file().set_len(1 << 20).unwrap();
    let base_path = base.path().to_string_lossy().into_owned();
    rig.socket = rig.dir.path().join("one");
    let overlay = Kind::Overlay(v1::OverlayDisk { base_path, ..Default::default() });
    let mut request = rig.request("one", vec![overlay]);
    request.nvme.as_mut().unwrap().lanes = 2;
    let error = rig.plane.create(&request).unwrap_err().to_string();
    assert!(error.contains("one lane"), "{error}");
    request.nvme.as_mut().unwrap().lanes = 1;
    rig.plane.create(&request).unwrap();
}
