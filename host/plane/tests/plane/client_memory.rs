//! A VMM that was taken over passes memory of its own choice.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::io::Errno;
use slipway_plane_api::v1;
use slipway_vfio_user_client::{Client, ClientError};

use crate::common::{PATIENCE, Rig};

const GUEST: u64 = 1 << 20;
const MARGIN: u64 = 1 << 16;

fn file() -> OwnedFd {
    let file = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, GUEST).unwrap();
    file
}

/// Makes a file that nobody can change, opened for reading only.
fn image() -> OwnedFd {
    use rustix::fs::{MemfdFlags, SealFlags};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("image", flags).unwrap();
    rustix::fs::ftruncate(&file, GUEST).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::WRITE).unwrap();
    std::fs::File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap().into()
}

fn refused(outcome: Result<(), ClientError>) -> Errno {
    match outcome {
        Err(ClientError::Refused(errno)) => errno,
        other => panic!("{other:?}"),
    }
}

/// Each file of the VMM would stay charged to the plane for as long as the VMM holds it.
#[test]
fn a_sandboxes_endpoint_takes_its_guests_memory_alone() {
    let rig = Rig::new();
    let guest = file();
    let status = rustix::fs::fstat(&guest).unwrap();
    let mut request =
        rig.request("one", vec![v1::disk::Kind::Null(v1::NullDisk { size_bytes: GUEST })]);
    request.memory = Some(v1::ClientMemory {
        limit_bytes: GUEST + MARGIN,
        device: status.st_dev,
        inode: status.st_ino,
        ..Default::default()
    });
    rig.plane.create(&request).unwrap();
    let mut vmm = Client::connect(&rig.socket, PATIENCE).unwrap();
    for number in 0..100 {
        let other = file();
        let mapped = vmm.map(number * GUEST, GUEST, other.as_fd(), 0, true);
        assert_eq!(refused(mapped), Errno::ACCESS);
    }
    vmm.map(0, GUEST, guest.as_fd(), 0, true).unwrap();
    let again = vmm.map(2 * GUEST, GUEST, guest.as_fd(), 0, true);
    assert_eq!(refused(again), Errno::NOMEM);
    vmm.map(2 * GUEST, MARGIN, guest.as_fd(), 0, true).unwrap();
    assert_eq!(rig.plane.get("one").unwrap().dma_regions.len(), 2);
}

/// Pages that a guest shares with others are one more file, which its devices may only read.
#[test]
fn a_sandboxes_endpoint_reads_the_pages_that_its_guest_shares() {
    let rig = Rig::new();
    let (guest, shared) = (file(), image());
    let [own, theirs] = [&guest, &shared].map(|file| rustix::fs::fstat(file).unwrap());
    let mut request =
        rig.request("one", vec![v1::disk::Kind::Null(v1::NullDisk { size_bytes: GUEST })]);
    request.memory = Some(v1::ClientMemory {
        limit_bytes: 2 * GUEST,
        device: own.st_dev,
        inode: own.st_ino,
        shared_device: theirs.st_dev,
        shared_inode: theirs.st_ino,
    });
    rig.plane.create(&request).unwrap();
    let mut vmm = Client::connect(&rig.socket, PATIENCE).unwrap();
    vmm.map(0, GUEST, guest.as_fd(), 0, true).unwrap();
    assert_eq!(refused(vmm.map(GUEST, GUEST, shared.as_fd(), 0, true)), Errno::ACCESS);
    assert_eq!(refused(vmm.map(GUEST, GUEST, image().as_fd(), 0, false)), Errno::ACCESS);
    vmm.map(GUEST, GUEST, shared.as_fd(), 0, false).unwrap();
    assert_eq!(rig.plane.get("one").unwrap().dma_regions.len(), 2);
}
