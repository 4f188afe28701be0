//! The memory of overlays: bounds of an endpoint and of all endpoints, and their figures.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

mod common;

use slipway_nvme::driver::{Driver, DriverError, io, succeeded};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::status::Status;
use slipway_plane::{Error, Settings};
use slipway_plane_api::v1::plane_server::Plane as Calls;
use slipway_plane_api::v1::{self, disk::Kind};

use common::*;

const PAGE: u64 = 4096;
/// Memory of the two maps and the page table of an overlay of 1 MiB, once something was written.
const MAPS: u64 = 3 * PAGE;

/// A plane whose overlays have `bytes` together, and a base for them.
fn rig(bytes: u64) -> Rig {
    let rig = Rig::with(Settings { overlays: bytes, ..Settings::default() });
    std::fs::write(rig.dir.path().join("base"), vec![0x11; 1 << 20]).unwrap();
    rig
}

fn overlay(rig: &Rig) -> Kind {
    let base_path = rig.dir.path().join("base").to_string_lossy().into_owned();
    Kind::Overlay(v1::OverlayDisk { base_path, limit_bytes: 0 })
}

/// Makes an endpoint with `count` overlays, which have `bytes` together, and a driver for it.
fn endpoint(rig: &mut Rig, id: &str, count: usize, bytes: u64) -> Driver<Registers> {
    rig.socket = rig.dir.path().join(id);
    let mut request = rig.request(id, (0..count).map(|_| overlay(rig)).collect());
    request.nvme.as_mut().unwrap().overlay_bytes = bytes;
    rig.plane.create(&request).unwrap();
    let mut driver = rig.drive();
    driver.create_pair(1, 64, None).unwrap();
    driver
}

/// Writes one page of a namespace. Returns whether there was room for it.
fn write(driver: &mut Driver<Registers>, nsid: u32, page: u64) -> bool {
    let buffer = driver.arena.allocate(PAGE as usize).unwrap();
    let command = io(NvmOpcode::Write, nsid, 8 * page, 8);
    let written = driver.transfer(1, command, (buffer, PAGE as usize));
    driver.arena.release(buffer, PAGE as usize);
    match written {
        Ok(()) => true,
        Err(DriverError::Command(status)) => {
            assert_eq!(status.code(), Status::CAPACITY_EXCEEDED.code());
            false
        }
        Err(other) => panic!("{other}"),
    }
}

fn zero(driver: &mut Driver<Registers>, nsid: u32, page: u64) {
    let command = io(NvmOpcode::WriteZeroes, nsid, 8 * page, 8);
    succeeded(driver.run(1, command).unwrap()).unwrap();
}

/// Returns the bytes that an endpoint's overlays hold, and its refused writes.
fn figures(rig: &Rig, id: &str) -> (u64, u64) {
    let overlays = rig.plane.get(id).unwrap().overlays.unwrap();
    (overlays.held_bytes, overlays.refused_writes)
}

/// Returns the figures of all overlays.
fn all(rig: &Rig) -> v1::OverlayMemory {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let request = tonic::Request::new(v1::GetOverlayMemoryRequest {});
    let service = rig.plane.service();
    runtime.block_on(service.get_overlay_memory(request)).unwrap().into_inner()
}

#[test]
fn two_sandboxes_at_the_budget_of_the_node() {
    let mut rig = rig(2 * MAPS + 4 * PAGE);
    let mut one = endpoint(&mut rig, "one", 1, 0);
    let mut two = endpoint(&mut rig, "two", 1, 0);
    assert!(write(&mut two, 1, 0));
    assert!((0..3).all(|page| write(&mut one, 1, page)));
    assert!(!write(&mut one, 1, 3) && !write(&mut two, 1, 1));
    // Both go on with what they have, and one's page that is given back is the other's.
    assert!(write(&mut one, 1, 2) && write(&mut two, 1, 0));
    zero(&mut one, 1, 0);
    assert!(write(&mut two, 1, 1));
    let counted = [("one", 2, 1), ("two", 2, 1)];
    for (id, pages, refused) in counted {
        assert_eq!(figures(&rig, id), (MAPS + pages * PAGE, refused), "{id}");
    }
    let node = all(&rig);
    assert_eq!((node.held_bytes, node.limit_bytes), (2 * MAPS + 4 * PAGE, 2 * MAPS + 4 * PAGE));
    assert_eq!(node.refused_writes, 2);
    // A removed sandbox gives the memory of its layers back.
    rig.plane.remove("two").unwrap();
    assert_eq!(all(&rig).held_bytes, MAPS + 2 * PAGE);
    assert!(write(&mut one, 1, 3));
    rig.plane.remove("one").unwrap();
    assert_eq!(all(&rig).held_bytes, 0);
}

#[test]
fn the_layers_of_a_pod_have_its_bound_together() {
    let mut rig = rig(u64::MAX);
    let mut pod = endpoint(&mut rig, "pod", 1, 2 * MAPS + 3 * PAGE);
    let mut other = endpoint(&mut rig, "other", 1, 0);
    let (endpoint_id, disk) = ("pod".to_owned(), Some(overlay(&rig)));
    let disk = disk.map(|kind| v1::Disk { block_size: 0, kind: Some(kind) });
    rig.plane.attach(&v1::AttachDiskRequest { endpoint_id, disk, nsid: 2 }).unwrap();
    assert!(write(&mut pod, 1, 0) && write(&mut pod, 2, 0) && write(&mut pod, 2, 1));
    assert!(!write(&mut pod, 1, 1) && !write(&mut pod, 2, 2));
    assert!((0..10).all(|page| write(&mut other, 1, page)));
    assert_eq!(figures(&rig, "pod"), (2 * MAPS + 3 * PAGE, 2));
    assert_eq!((all(&rig).refused_writes, all(&rig).limit_bytes), (0, 0));
    // A detached layer gives its memory back to its pod.
    let namespace = Some(v1::detach_disk_request::Namespace::Nsid(2));
    let detach = v1::DetachDiskRequest { endpoint_id: "pod".into(), namespace };
    rig.plane.detach(&detach).unwrap();
    assert_eq!(figures(&rig, "pod"), (MAPS + PAGE, 2));
    assert!((1..6).all(|page| write(&mut pod, 1, page)));
    assert!(!write(&mut pod, 1, 6));
}

#[test]
fn a_network_function_gets_no_disk() {
    let rig = rig(u64::MAX);
    let switch = v1::CreateSwitchRequest { name: "blue".into(), ..Default::default() };
    rig.plane.fabric().create_switch(&switch).unwrap();
    let mac = "02:00:00:00:00:01".into();
    let net = v1::VirtioNet { switch: "blue".into(), mac, ..Default::default() };
    let request = v1::CreateEndpointRequest { virtio_net: Some(net), ..rig.request("net", vec![]) };
    assert!(rig.plane.create(&request).unwrap().overlays.is_none());
    let disk = Some(v1::Disk { block_size: 0, kind: Some(overlay(&rig)) });
    let attach = v1::AttachDiskRequest { endpoint_id: "net".into(), disk, nsid: 0 };
    assert!(matches!(rig.plane.attach(&attach), Err(Error::Network(_))));
}
