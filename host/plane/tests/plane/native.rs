//! The whole plane natively: a small real NVMe driver in this process drives a controller of the
//! plane over its vfio-user socket, never by direct call. No VM, no root.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use slipway_disks::Error as DiskError;
use slipway_nvme::driver::{Driver, RegisterAccess, Shadowed, io, succeeded};
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_plane::Error;
use slipway_plane_api::{PlaneClient, v1};

use crate::common::*;

#[test]
fn a_driver_reads_and_writes_over_the_socket() {
    let rig = Rig::new();
    let image = rig.dir.path().join("image");
    std::fs::write(&image, vec![7; 1 << 20]).unwrap();
    let base_path = image.to_string_lossy().into_owned();
    let overlay = v1::disk::Kind::Overlay(v1::OverlayDisk { base_path, limit_bytes: 0 });
    let made = rig.plane.create(&rig.request("one", vec![ram(4 << 20), overlay])).unwrap();
    assert_eq!(made.namespaces.len(), 2);
    let mut driver = rig.drive();
    let identity = driver.identify_controller().unwrap();
    assert!(identity.model.starts_with(b"Slipway"), "{:?}", identity.model);
    driver.create_pair(1, 64, None).unwrap();
    for (lba, blocks) in [(0, 1), (7, 8), (100, 256), (8191, 1)] {
        round_trip(&mut driver, 1, lba, blocks);
    }
    round_trip(&mut driver, 2, 3, 5);
    assert_eq!(std::fs::read(&image).unwrap(), vec![7; 1 << 20], "the overlay's base");
    assert!(succeeded(driver.run(1, io(NvmOpcode::Read, 1, 8192, 1)).unwrap()).is_err());

    let seen = rig.plane.get("one").unwrap();
    assert_eq!(seen.client_pid, std::process::id());
    assert_eq!(seen.dma_regions.iter().map(|region| region.size_bytes).sum::<u64>(), MEMORY);
    assert!(seen.dma_regions.iter().all(|region| !region.guarded && !region.message_only));
    rig.plane.remove("one").unwrap();
    assert!(!rig.socket.exists());
    assert!(rig.plane.list().is_empty());
}

#[test]
fn shadow_doorbells_spare_messages_and_lose_nothing() {
    let rig = Rig::new();
    rig.plane.create(&rig.request("one", vec![ram(1 << 20)])).unwrap();
    let (arena, registers) = rig.connect();
    let registers = Shadowed::new(registers, arena.memory().clone());
    let mut driver = Driver::new(registers, arena, 32).unwrap();
    driver.create_pair(1, 64, None).unwrap();
    driver.shadow_doorbells(true).unwrap();
    let page = driver.arena.allocate(4096).unwrap();
    let read = |lba| SubmissionEntry { prp1: page.into(), ..io(NvmOpcode::Read, 1, lba, 1) };
    // Doorbells are posted: a register that is read comes after all of them.
    driver.registers.read32(0).unwrap();
    let (before, written) = (rig.messages("one"), driver.registers.written);
    let mut ended = Vec::new();
    for round in 0..500 {
        // The pauses are about as long as the reactor polls before it sleeps, so commands arrive
        // while it falls asleep.
        let pause = Duration::from_micros(round % 120);
        std::thread::sleep(pause);
        for lba in 0..32 {
            driver.submit(1, read(lba)).unwrap();
        }
        while driver.pair(1).unwrap().in_flight() > 0 {
            driver.reap(1, &mut ended).unwrap();
            driver.registers.idle().unwrap();
        }
    }
    assert!(ended.len() == 16_000 && ended.iter().all(|entry| entry.status().is_success()));
    driver.registers.read32(0).unwrap();
    let messages = rig.messages("one") - before - 1;
    assert_eq!(messages, driver.registers.written - written, "only what was asked for");
    // Without shadow doorbells, each command costs one message, and so does each poll that found
    // completions. How often the reactor sleeps within a burst depends on the machine.
    assert!(messages < 16_000, "{messages} messages");
}

#[test]
fn a_client_that_vanishes_leaves_room_for_the_next() {
    let rig = Rig::new();
    rig.plane.create(&rig.request("one", vec![ram(1 << 20)])).unwrap();
    for lba in 0..5 {
        let mut driver = rig.drive();
        driver.create_pair(1, 8, None).unwrap();
        round_trip(&mut driver, 1, lba, 2);
    }
    assert_eq!(rig.plane.get("one").unwrap().counters.unwrap().clients, 5);
    rig.plane.remove("one").unwrap();
}

#[test]
fn what_cannot_be_made_is_refused_and_leaves_nothing() {
    let rig = Rig::new();
    let missing =
        v1::FileDisk { path: "/no/such/disk".into(), read_only: true, ..Default::default() };
    let refused = rig.plane.create(&rig.request("a", vec![v1::disk::Kind::File(missing)]));
    assert!(matches!(refused, Err(Error::Disk(DiskError::Open(_)))));
    assert!(matches!(rig.plane.create(&rig.request("a/b", vec![])), Err(Error::Invalid(_))));
    let mut relative = rig.request("a", vec![]);
    relative.socket_path = "relative".into();
    assert!(matches!(rig.plane.create(&relative), Err(Error::Invalid(_))));
    let empty = v1::disk::Kind::Null(v1::NullDisk { size_bytes: 0 });
    let refused = rig.plane.create(&rig.request("a", vec![empty]));
    assert!(matches!(refused, Err(Error::Disk(DiskError::Invalid(_)))));
    assert!(rig.plane.list().is_empty() && !rig.socket.exists());

    rig.plane.create(&rig.request("a", vec![ram(1 << 20)])).unwrap();
    let again = rig.plane.create(&rig.request("a", vec![ram(1 << 20)]));
    assert!(matches!(again, Err(Error::Exists(_))));
    rig.plane.remove("a").unwrap();
    assert!(matches!(rig.plane.remove("a"), Err(Error::Unknown(_))));
}

#[test]
fn two_writers_of_one_file_are_refused() {
    let rig = Rig::new();
    let path = rig.dir.path().join("disk");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let path = path.to_string_lossy().into_owned();
    let disk = || v1::disk::Kind::File(v1::FileDisk { path: path.clone(), ..Default::default() });
    rig.plane.create(&rig.request("one", vec![disk()])).unwrap();
    let mut second = rig.request("two", vec![disk()]);
    second.socket_path += "2";
    let message = rig.plane.create(&second).unwrap_err().to_string();
    assert!(message.contains("in use"), "{message}");
    rig.plane.remove("one").unwrap();
    rig.plane.create(&second).unwrap();
}

/// Reads and writes until told to stop; returns the number of commands.
fn work(mut driver: Driver<Registers>, stop: &AtomicBool) -> u64 {
    driver.create_pair(1, 8, None).unwrap();
    let buffer = driver.arena.allocate(4096).unwrap();
    let mut commands = 0;
    while !stop.load(Ordering::Relaxed) {
        for opcode in [NvmOpcode::Write, NvmOpcode::Read] {
            driver.transfer(1, io(opcode, 1, 0, 8), (buffer, 4096)).unwrap();
            commands += 1;
        }
    }
    commands
}

async fn snoop(
    plane: &mut PlaneClient,
) -> Result<tonic::Streaming<v1::SnoopReport>, tonic::Status> {
    let request = v1::SnoopRequest { id: "one".into(), interval_ms: 20, every: 1 };
    plane.snoop(request).await.map(tonic::Response::into_inner)
}

/// Checks one report and returns the number of commands that it counts.
fn check(report: &v1::SnoopReport) -> u64 {
    assert!(report.from_ns < report.to_ns);
    let mut commands = 0;
    for row in &report.rows {
        assert_eq!(row.queue, 1);
        assert!([v1::OpcodeClass::Read, v1::OpcodeClass::Write].contains(&row.class()));
        let layers: Vec<_> = row.layers.iter().map(|one| one.latency.as_ref().unwrap()).collect();
        assert_eq!(row.layers[4].layer(), v1::layer_latency::Layer::Whole);
        let parts: u64 = layers[..4].iter().map(|layer| layer.sum_ns).sum();
        assert_eq!(parts, layers[4].sum_ns, "the layers are the whole");
        assert!(parts > 0);
        let counts = layers.iter().map(|layer| layer.counts.iter().sum::<u64>());
        let counts: Vec<u64> = counts.collect();
        assert!(counts.iter().all(|count| *count == counts[4]), "{counts:?}");
        commands += counts[4];
    }
    commands
}

#[test]
fn where_the_time_goes_is_told_while_somebody_listens() {
    let rig = Rig::new();
    rig.plane.create(&rig.request("one", vec![ram(1 << 20)])).unwrap();
    let driver = rig.drive();
    let stop = AtomicBool::new(false);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (counted, commands) = std::thread::scope(|threads| {
        let worker = threads.spawn(|| work(driver, &stop));
        let counted = runtime.block_on(async {
            let mut client = PlaneClient::new(rig.plane.connect().await.unwrap());
            let mut reports = snoop(&mut client).await.unwrap();
            let mut counted = 0;
            while counted < 100 {
                counted += check(&reports.message().await.unwrap().unwrap());
            }
            let second = snoop(&mut client).await.err().map(|status| status.code());
            assert_eq!(second, Some(tonic::Code::FailedPrecondition));
            drop(reports);
            // The session ends when the service finds its client gone; then another can begin.
            let mut again = loop {
                match snoop(&mut client).await {
                    Ok(reports) => break reports,
                    Err(status) => assert_eq!(status.code(), tonic::Code::FailedPrecondition),
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            };
            check(&again.message().await.unwrap().unwrap());
            counted
        });
        stop.store(true, Ordering::Relaxed);
        (counted, worker.join().unwrap())
    });
    assert!(counted <= commands, "{counted} of {commands}");
    let unknown = v1::SnoopRequest { id: "two".into(), ..Default::default() };
    let silly = v1::SnoopRequest { id: "one".into(), interval_ms: 1, every: 0 };
    runtime.block_on(async {
        let mut client = PlaneClient::new(rig.plane.connect().await.unwrap());
        for (request, code) in
            [(unknown, tonic::Code::NotFound), (silly, tonic::Code::InvalidArgument)]
        {
            assert_eq!(client.snoop(request).await.err().map(|status| status.code()), Some(code));
        }
    });
    rig.plane.remove("one").unwrap();
}

#[test]
fn an_endpoint_that_goes_ends_its_reports() {
    let rig = Rig::new();
    rig.plane.create(&rig.request("one", vec![ram(1 << 20)])).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = PlaneClient::new(rig.plane.connect().await.unwrap());
        let mut reports = snoop(&mut client).await.unwrap();
        assert_eq!(check(&reports.message().await.unwrap().unwrap()), 0, "nobody is connected");
        client.remove_endpoint(v1::RemoveEndpointRequest { id: "one".into() }).await.unwrap();
        let end = loop {
            match reports.message().await {
                Ok(report) => assert!(report.is_some()),
                Err(status) => break status,
            }
        };
        assert_eq!(end.code(), tonic::Code::Unavailable);
    });
}
