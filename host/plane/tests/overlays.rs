//! The memory of overlays: bounds of an endpoint and of all endpoints, their figures, and copies of
//! it.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use slipway_nvme::driver::{Driver, DriverError, io, succeeded};
use slipway_nvme_spec::identify::Cns;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::status::Status as NvmeStatus;
use slipway_plane::{Error, Settings};
use slipway_plane_api::v1::plane_server::Plane as Calls;
use slipway_plane_api::v1::{self, disk::Kind};
use tonic::Code;

use common::*;

const PAGE: u64 = 4096;
/// Memory of an overlay of 1 MiB beside its data, once something was written: the head of its file,
/// two maps with their records, and a page table.
const MAPS: u64 = 6 * PAGE;

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
            assert_eq!(status.code(), NvmeStatus::CAPACITY_EXCEEDED.code());
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
    // The memory of the detached layer is available to the other layer, as data.
    let pages = 3 + MAPS / PAGE;
    assert!((1..pages).all(|page| write(&mut pod, 1, page)));
    assert!(!write(&mut pod, 1, pages));
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

/// Returns all bytes of a namespace of 1 MiB.
fn content(driver: &mut Driver<Registers>, nsid: u32) -> Vec<u8> {
    let piece = 16 * PAGE as usize;
    let buffer = driver.arena.allocate(piece).unwrap();
    let mut all = vec![0; 1 << 20];
    for (at, bytes) in (0..).step_by(piece / 512).zip(all.chunks_mut(piece)) {
        let command = io(NvmOpcode::Read, nsid, at, piece as u32 / 512);
        driver.transfer(1, command, (buffer, piece)).unwrap();
        driver.arena.memory().read(buffer, bytes).unwrap();
    }
    driver.arena.release(buffer, piece);
    all
}

#[test]
fn a_copy_has_what_the_guest_reads() {
    let mut rig = rig(u64::MAX);
    let mut one = endpoint(&mut rig, "one", 1, 0);
    let path = rig.dir.path().join("copy");
    let buffer = one.arena.allocate(512).unwrap();
    one.arena.memory().write(buffer, &[0x22; 512]).unwrap();
    one.transfer(1, io(NvmOpcode::Write, 1, 77, 1), (buffer, 512)).unwrap();
    zero(&mut one, 1, 3);
    let copied = copy(&rig, "one", 1, &path).unwrap();
    assert_eq!((copied.size_bytes, copied.data_bytes), (1 << 20, (1 << 20) - PAGE));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let bytes = std::fs::read(&path).unwrap();
    assert!(bytes == content(&mut one, 1));
    assert_eq!((bytes[77 * 512], bytes[78 * 512], bytes[24 * 512]), (0x22, 0x11, 0));
    // An overlay over the copy begins with that, whatever becomes of the first one.
    rig.plane.remove("one").unwrap();
    std::fs::rename(&path, rig.dir.path().join("base")).unwrap();
    let mut two = endpoint(&mut rig, "two", 1, 0);
    assert!(content(&mut two, 1) == bytes);
}

#[test]
fn what_cannot_be_copied_leaves_no_file() {
    let mut rig = rig(u64::MAX);
    let overlay = overlay(&rig);
    rig.socket = rig.dir.path().join("one");
    rig.plane.create(&rig.request("one", vec![overlay, ram(1 << 20)])).unwrap();
    let at = |name: &str| rig.dir.path().join(name);
    let (path, taken, link, nowhere) = (at("copy"), at("taken"), at("link"), at("no/such/copy"));
    std::fs::write(&taken, "mine").unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let refused: [(&str, u32, &Path, Code); 7] = [
        ("two", 1, &path, Code::NotFound),
        ("one", 3, &path, Code::NotFound),
        ("one", 2, &path, Code::FailedPrecondition),
        ("one", 1, Path::new("copy"), Code::InvalidArgument),
        ("one", 1, &taken, Code::AlreadyExists),
        ("one", 1, &link, Code::AlreadyExists),
        ("one", 1, &nowhere, Code::FailedPrecondition),
    ];
    for (id, nsid, path, code) in refused {
        let status = copy(&rig, id, nsid, path).unwrap_err();
        assert_eq!(status.code(), code, "{status}");
        assert!(!status.message().contains('\n'), "{status}");
    }
    let base = std::fs::File::options().write(true).open(at("base")).unwrap();
    base.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    let status = copy(&rig, "one", 1, &path).unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert!(!path.exists());
    assert_eq!(std::fs::read(&taken).unwrap(), b"mine");
}

/// Returns the number of descriptors of this process that are memory files of disks of `bytes`.
fn memory_files(bytes: u64) -> usize {
    let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let is_one = |path: &Path| {
        let name = std::fs::read_link(path).unwrap_or_default();
        let len = std::fs::metadata(path).map_or(0, |metadata| metadata.len());
        name.to_string_lossy().contains("slipway-disk") && (bytes..2 * bytes).contains(&len)
    };
    all.filter(|entry| is_one(&entry.path())).count()
}

#[test]
fn the_memory_of_an_overlay_goes_with_its_namespace() {
    // Of a size that no other test has.
    const BYTES: u64 = 48 << 20;
    let mut rig = Rig::new();
    std::fs::write(rig.dir.path().join("base"), [0x11]).unwrap();
    let base = std::fs::File::options().write(true).open(rig.dir.path().join("base")).unwrap();
    base.set_len(BYTES).unwrap();
    let _one = endpoint(&mut rig, "one", 1, 0);
    let of_one = memory_files(BYTES);
    assert!(of_one > 0);
    let disk = Some(v1::Disk { block_size: 0, kind: Some(overlay(&rig)) });
    let attach = v1::AttachDiskRequest { endpoint_id: "one".into(), disk, nsid: 2 };
    rig.plane.attach(&attach).unwrap();
    assert!(memory_files(BYTES) > of_one);
    let namespace = Some(v1::detach_disk_request::Namespace::Nsid(2));
    rig.plane.detach(&v1::DetachDiskRequest { endpoint_id: "one".into(), namespace }).unwrap();
    let path = rig.dir.path().join("copy");
    assert_eq!(copy(&rig, "one", 2, &path).unwrap_err().code(), Code::NotFound);
    wait_for(|| memory_files(BYTES) == of_one);
    rig.plane.remove("one").unwrap();
    wait_for(|| memory_files(BYTES) == 0);
}

/// Waits for what another thread does.
fn wait_for(is_so: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "it does not come");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Makes an endpoint whose disks have the identity of another one's. Returns the NGUIDs and
/// descriptors of its first two.
fn names(rig: &mut Rig, id: &str, identity: &str) -> [([u8; 16], Vec<u8>); 2] {
    rig.socket = rig.dir.path().join(id);
    let mut request = rig.request(id, vec![overlay(rig), overlay(rig)]);
    let namespaces = &mut request.nvme.as_mut().unwrap().namespaces;
    namespaces.iter_mut().for_each(|one| one.identity = identity.into());
    rig.plane.create(&request).unwrap();
    let mut driver = rig.drive();
    [1, 2].map(|nsid| {
        let nguid = driver.identify_namespace(nsid).unwrap().nguid;
        (nguid, driver.identify(Cns::NamespaceDescriptors, nsid).unwrap())
    })
}

#[test]
fn disks_with_an_identity_have_the_names_of_that_endpoints_disks() {
    let mut rig = rig(u64::MAX);
    let saved = names(&mut rig, "saved", "");
    assert_ne!(saved[0], saved[1]);
    assert_eq!(names(&mut rig, "fork", "saved"), saved);
    assert_eq!(names(&mut rig, "another", "saved"), saved);
    assert_ne!(names(&mut rig, "own", ""), saved);
    let mut request = rig.request("bad", vec![overlay(&rig)]);
    request.nvme.as_mut().unwrap().namespaces[0].identity = "a/b".into();
    assert!(matches!(rig.plane.create(&request), Err(Error::Invalid(_))));
}
