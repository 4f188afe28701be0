//! Disks of images whose blocks are fetched as they are read. That they outlive the plane is tested
//! with the other disks that do (`kept.rs`).

use slipway_disks::Error as DiskError;
use slipway_nvme::driver::{Driver, io};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_plane::{Error, Settings};
use slipway_plane_api::v1::{self, disk::Kind};

use crate::common::*;

const MIB: u64 = 1 << 20;
const QUEUES: u16 = 4;

/// Returns a plane with two threads, and an image whose blocks are missing.
fn rig() -> Rig {
    let rig = Rig::with(Settings { reactors: 2, ..Settings::default() });
    slipway_block::create_sparse(&rig.dir.path().join("image"), MIB).unwrap();
    rig
}

/// Returns the content of the image: each block of 512 bytes has one value, and none is 0.
fn content(at: u64) -> u8 {
    (at / 512 % 251) as u8 + 1
}

fn read(driver: &mut Driver<Registers>, queue: u16, lba: u64) -> Vec<u8> {
    let buffer = driver.arena.allocate(512).unwrap();
    driver.transfer(queue, io(NvmOpcode::Read, 1, lba, 1), (buffer, 512)).unwrap();
    let mut bytes = vec![0; 512];
    driver.arena.memory().read(buffer, &mut bytes).unwrap();
    driver.arena.release(buffer, 512);
    bytes
}

#[test]
fn blocks_are_fetched_as_they_are_read() {
    for lanes in [1, 2] {
        let rig = rig();
        let image = fetcher::disk(rig.dir.path(), "image");
        fetcher::serve(rig.dir.path(), "image", content);
        let mut request = rig.request("one", vec![Kind::Lazy(image)]);
        request.nvme.as_mut().unwrap().lanes = lanes;
        let made = rig.plane.create(&request).unwrap();
        assert_eq!(made.namespaces[0].kind, "lazy");
        assert!(made.namespaces[0].read_only);
        let mut driver = rig.drive();
        for queue in 1..=QUEUES {
            driver.create_pair(queue, 16, Some(queue)).unwrap();
        }
        for lba in [0, 100, 2047, 101, 100] {
            for queue in 1..=QUEUES {
                assert_eq!(read(&mut driver, queue, lba), [content(lba * 512); 512], "{lba}");
            }
        }
    }
}

#[test]
fn what_is_no_such_image_is_refused() {
    let rig = rig();
    let image = || fetcher::disk(rig.dir.path(), "image");
    let bad = [
        (v1::LazyDisk { digest: vec![7; 31], ..image() }, "a digest of 31 bytes"),
        (v1::LazyDisk { path: "image".into(), ..image() }, "\"image\" is no absolute path"),
        (v1::LazyDisk { socket_path: String::new(), ..image() }, "\"\" is no absolute path"),
    ];
    for (disk, why) in bad {
        for lanes in [1, 2] {
            let mut request = rig.request("one", vec![Kind::Lazy(disk.clone())]);
            request.nvme.as_mut().unwrap().lanes = lanes;
            let error = rig.plane.create(&request).unwrap_err();
            assert!(matches!(error, Error::Disk(DiskError::Invalid(_))), "{error}");
            assert!(error.to_string().contains(why), "{error}");
        }
    }
    let disk = Some(v1::Disk { block_size: 0, kind: Some(Kind::Lazy(image())) });
    let named = v1::CreateDiskRequest { name: "x".into(), disk };
    let error = rig.plane.create_disk(&named).unwrap_err().to_string();
    assert!(error.contains("ram, null or file"), "{error}");
}
