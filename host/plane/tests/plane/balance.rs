//! Endpoints on several reactors: their assignment, and that they move under load without errors.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use slipway_nvme::driver::{Driver, RegisterAccess, io};
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_plane::Settings;
use slipway_plane_api::v1::{self, disk::Kind, nvme_controller::DoorbellMode};

use crate::common::*;

fn two_reactors() -> Rig {
    Rig::with(Settings { reactors: 2, ..Settings::default() })
}

fn reactor(rig: &Rig, id: &str) -> u32 {
    rig.plane.get(id).unwrap().reactor
}

fn create(rig: &mut Rig, id: &str, kind: Kind, doorbells: DoorbellMode) {
    rig.socket = rig.dir.path().join(id);
    let mut request = rig.request(id, vec![kind]);
    request.nvme.as_mut().unwrap().doorbells = doorbells.into();
    rig.plane.create(&request).unwrap();
}

/// Verifies data on an endpoint that moves to and fro until `rounds` moves were made.
fn survives(kind: Kind, doorbells: DoorbellMode) {
    let mut rig = two_reactors();
    create(&mut rig, "one", kind, doorbells);
    let mut driver = rig.drive();
    driver.create_pair(1, 64, Some(1)).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (plane, over) = (&rig.plane, &over);
        let mover = scope.spawn(move || {
            for at in 1..=200 {
                plane.relocate("one", at % 2).unwrap();
                std::thread::sleep(std::time::Duration::from_micros(300));
            }
            over.store(true, Ordering::Release);
        });
        let mut lba = 0;
        while !over.load(Ordering::Acquire) {
            round_trip(&mut driver, 1, lba % 1024, 16);
            lba += 16;
        }
        mover.join().unwrap();
    });
    assert_eq!(reactor(&rig, "one"), 0);
    // Memory can be unmapped and mapped on the new reactor as well.
    round_trip(&mut driver, 1, 0, 8);
    driver.registers.client.unmap(BASE, MEMORY).unwrap();
    drop(driver);
    let mut driver = rig.drive();
    driver.create_pair(1, 64, None).unwrap();
    round_trip(&mut driver, 1, 8, 8);
}

#[test]
fn an_endpoint_moves_under_load_with_trapped_doorbells() {
    survives(ram(1 << 20), DoorbellMode::Trapped);
}

#[test]
fn an_endpoint_moves_under_load_with_mapped_doorbells() {
    survives(ram(1 << 20), DoorbellMode::Mapped);
}

#[test]
fn an_endpoint_moves_while_its_file_has_requests() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let path = file.path().to_string_lossy().into_owned();
    survives(Kind::File(v1::FileDisk { path, ..Default::default() }), DoorbellMode::Trapped);
}

#[test]
fn an_endpoint_closes_on_its_way() {
    let mut rig = two_reactors();
    for at in 0..20 {
        create(&mut rig, "one", ram(1 << 20), DoorbellMode::Trapped);
        let mut driver = rig.drive();
        driver.create_pair(1, 64, None).unwrap();
        rig.plane.relocate("one", at % 2).unwrap();
        rig.plane.relocate("one", (at + 1) % 2).unwrap();
        rig.plane.remove("one").unwrap();
    }
    let error = rig.plane.relocate("one", 0).unwrap_err();
    assert!(error.to_string().contains("no endpoint"), "{error}");
}

#[test]
fn endpoints_are_put_where_the_fewest_are() {
    let mut rig = two_reactors();
    let small = || ram(1 << 20);
    for id in ["a", "b", "c"] {
        create(&mut rig, id, small(), DoorbellMode::Trapped);
    }
    let (a, b, c) = (reactor(&rig, "a"), reactor(&rig, "b"), reactor(&rig, "c"));
    assert_ne!(a, b);
    // The endpoint that is alone on its reactor is removed; the next endpoint gets its place.
    let alone = if c == a { "b" } else { "a" };
    let place = reactor(&rig, alone);
    rig.plane.remove(alone).unwrap();
    create(&mut rig, "d", small(), DoorbellMode::Trapped);
    assert_eq!(reactor(&rig, "d"), place);
    assert!(rig.plane.relocate("d", 2).is_err());
}

const DEPTH: usize = 32;
const READ: usize = 1 << 20;

/// Returns a read of 1 MiB: 32 such reads take the target milliseconds.
fn long_read(driver: &mut Driver<Registers>) -> SubmissionEntry {
    let buffer = driver.arena.allocate(READ).unwrap();
    let mut read = io(NvmOpcode::Read, 1, 0, (READ / 512) as u32);
    (read.prp1, read.prp2) = driver.point(buffer, READ).unwrap();
    read
}

#[test]
fn of_two_busy_endpoints_on_one_reactor_one_goes_to_the_idle_one() {
    let mut rig = two_reactors();
    let mut drivers = Vec::new();
    for id in ["a", "b"] {
        create(&mut rig, id, ram(1 << 20), DoorbellMode::Mapped);
        let mut driver = rig.drive();
        driver.create_pair(1, 64, None).unwrap();
        let read = long_read(&mut driver);
        drivers.push((driver, read, 0));
    }
    rig.plane.relocate("b", reactor(&rig, "a") as usize).unwrap();
    let patience = Instant::now() + PATIENCE;
    let mut entries = Vec::new();
    while reactor(&rig, "a") == reactor(&rig, "b") {
        assert!(Instant::now() < patience, "neither has moved");
        for (driver, read, under_way) in &mut drivers {
            driver.reap(1, &mut entries).unwrap();
            *under_way -= entries.len();
            assert!(entries.drain(..).all(|entry| entry.status().is_success()));
            while *under_way < DEPTH {
                driver.submit(1, *read).unwrap();
                *under_way += 1;
            }
        }
        drivers[0].0.registers.idle().unwrap();
    }
}
