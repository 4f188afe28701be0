//! A plane in this process, and drivers on its sockets.
#![allow(dead_code)] // each test program uses a part

pub mod fetcher;

use std::path::{Path, PathBuf};
use std::time::Duration;

use slipway_nvme::driver::{Arena, Driver, io};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_plane::{Plane, Settings};
use slipway_plane_api::v1;
use slipway_plane_api::v1::plane_server::Plane as Calls;
pub use slipway_vfio_user_client::Registers;
use slipway_vfio_user_client::TestGuest;

pub const PATIENCE: Duration = Duration::from_secs(60);
/// The address of the test's memory in the controller's address space.
pub const BASE: u64 = 1 << 32;
pub const MEMORY: u64 = 8 << 20;

pub struct Rig {
    pub plane: Plane,
    pub socket: PathBuf,
    pub dir: tempfile::TempDir,
}

impl Rig {
    pub fn new() -> Self {
        Self::with(Settings::default())
    }

    pub fn with(settings: Settings) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let plane = Plane::new(settings).unwrap();
        Self { plane, socket: dir.path().join("cntrl"), dir }
    }

    pub fn request(&self, id: &str, disks: Vec<v1::disk::Kind>) -> v1::CreateEndpointRequest {
        let disk = |kind| Some(v1::Disk { block_size: 0, kind: Some(kind) });
        let namespaces = (1..).zip(disks);
        let namespaces = namespaces.map(|(nsid, kind)| v1::Namespace {
            nsid,
            disk: disk(kind),
            ..Default::default()
        });
        v1::CreateEndpointRequest {
            virtio_net: None,
            memory: None,
            id: id.to_owned(),
            socket_path: self.socket.to_string_lossy().into_owned(),
            owner: None,
            nvme: Some(v1::NvmeController {
                namespaces: namespaces.collect(),
                ..Default::default()
            }),
        }
    }

    pub fn drive(&self) -> Driver<Registers> {
        let (arena, registers) = self.connect();
        Driver::new(registers, arena, 32).unwrap()
    }

    pub fn connect(&self) -> (Arena, Registers) {
        connect_driver(&self.socket)
    }

    pub fn messages(&self, id: &str) -> u64 {
        self.plane.get(id).unwrap().counters.unwrap().messages
    }
}

/// Connects to `socket`; returns the memory and the registers that a driver needs.
pub fn connect_driver(socket: &Path) -> (Arena, Registers) {
    let guest = TestGuest::new(BASE, MEMORY).unwrap();
    let registers = guest.connect(socket, PATIENCE).unwrap();
    (Arena::new(guest.memory, BASE, MEMORY), registers)
}

/// Copies a disk by the interface's call.
pub fn copy(
    rig: &Rig,
    endpoint: &str,
    nsid: u32,
    path: &Path,
) -> Result<v1::CopyDiskReply, tonic::Status> {
    let (endpoint_id, path) = (endpoint.to_owned(), path.to_string_lossy().into_owned());
    let request = tonic::Request::new(v1::CopyDiskRequest { endpoint_id, nsid, path });
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let service = rig.plane.service();
    runtime.block_on(service.copy_disk(request)).map(tonic::Response::into_inner)
}

pub fn ram(size_bytes: u64) -> v1::disk::Kind {
    v1::disk::Kind::Ram(v1::RamDisk { size_bytes })
}

/// Writes a pattern to `blocks` blocks from `lba` and reads it back.
pub fn round_trip(driver: &mut Driver<Registers>, nsid: u32, lba: u64, blocks: u32) {
    let len = blocks as usize * 512;
    let pattern: Vec<u8> = (0..len).map(|i| (i as u64 * 31 + lba) as u8).collect();
    let (from, to) = (driver.arena.allocate(len).unwrap(), driver.arena.allocate(len).unwrap());
    driver.arena.memory().write(from, &pattern).unwrap();
    driver.transfer(1, io(NvmOpcode::Write, nsid, lba, blocks), (from, len)).unwrap();
    driver.transfer(1, io(NvmOpcode::Read, nsid, lba, blocks), (to, len)).unwrap();
    let mut read = vec![0; len];
    driver.arena.memory().read(to, &mut read).unwrap();
    assert!(read == pattern, "blocks {lba}+{blocks} of namespace {nsid}");
    driver.arena.release(from, len);
    driver.arena.release(to, len);
}
