//! Copies of disks in files.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use slipway_nvme::driver::Driver;
use slipway_plane_api::v1::{self, disk::Kind};
use tonic::Code;

use crate::common::*;

const SIZE: u64 = 16 << 20;

fn file(path: &Path, read_only: bool) -> Kind {
    let path = path.to_string_lossy().into_owned();
    Kind::File(v1::FileDisk { path, read_only, ..Default::default() })
}

/// Makes a rig with the file "disk", a hole of [`SIZE`] bytes.
fn rig() -> Rig {
    // On the file system of the build, which is more likely to have O_DIRECT than /tmp.
    let built = std::env::current_exe().unwrap();
    let rig = Rig { dir: tempfile::tempdir_in(built.parent().unwrap()).unwrap(), ..Rig::new() };
    let disk = std::fs::File::create(rig.dir.path().join("disk")).unwrap();
    disk.set_len(SIZE).unwrap();
    rig
}

/// Makes an endpoint and a driver for it. Its socket has a short path.
fn endpoint((rig, sockets): (&mut Rig, &Path), id: &str, disks: Vec<Kind>) -> Driver<Registers> {
    rig.socket = sockets.join(id);
    rig.plane.create(&rig.request(id, disks)).unwrap();
    let mut driver = rig.drive();
    driver.create_pair(1, 64, None).unwrap();
    driver
}

#[test]
fn a_copy_of_a_file_has_what_was_written_and_its_holes() {
    let (mut rig, sockets) = (rig(), tempfile::tempdir().unwrap());
    let at = |rig: &Rig, name: &str| rig.dir.path().join(name);
    let (disk, one, two) = (at(&rig, "disk"), at(&rig, "copy-1"), at(&rig, "copy-2"));
    let mut driver = endpoint((&mut rig, sockets.path()), "one", vec![file(&disk, false)]);
    round_trip(&mut driver, 1, 77, 3);
    round_trip(&mut driver, 1, SIZE / 512 - 8, 8);
    let copied = copy(&rig, "one", 1, &one).unwrap();
    assert_eq!(copied.size_bytes, SIZE);
    assert!((11 * 512..SIZE / 4).contains(&copied.data_bytes), "{}", copied.data_bytes);
    let status = std::fs::metadata(&one).unwrap();
    assert_eq!((status.len(), status.mode() & 0o777), (SIZE, 0o600));
    assert!(status.blocks() * 512 < SIZE / 4);
    let bytes = std::fs::read(&one).unwrap();
    assert!(bytes == std::fs::read(&disk).unwrap());
    assert!(bytes.iter().any(|byte| *byte != 0));
    // The disk goes on, and the copy stays as it is.
    round_trip(&mut driver, 1, 200, 8);
    assert!(bytes == std::fs::read(&one).unwrap());
    drop(driver);
    rig.plane.remove("one").unwrap();
    let read_only = file(&disk, true);
    let _driver = endpoint((&mut rig, sockets.path()), "two", vec![read_only]);
    assert_eq!(copy(&rig, "two", 1, &two).unwrap().size_bytes, SIZE);
    assert!(std::fs::read(&two).unwrap() == std::fs::read(&disk).unwrap());
}

#[test]
fn a_copy_has_the_open_file_whatever_its_path_leads_to() {
    let (mut rig, sockets) = (rig(), tempfile::tempdir().unwrap());
    let at = |rig: &Rig, name: &str| rig.dir.path().join(name);
    let (disk, other, path) = (at(&rig, "disk"), at(&rig, "other"), at(&rig, "copy"));
    let mut driver = endpoint((&mut rig, sockets.path()), "one", vec![file(&disk, false)]);
    round_trip(&mut driver, 1, 5, 2);
    let written = std::fs::read(&disk).unwrap();
    std::fs::write(&other, vec![0xee; SIZE as usize]).unwrap();
    std::fs::rename(&other, &disk).unwrap();
    copy(&rig, "one", 1, &path).unwrap();
    assert!(std::fs::read(&path).unwrap() == written);
    // Nothing is there, or what an open(2) would wait at.
    std::fs::remove_file(&path).unwrap();
    std::fs::remove_file(&disk).unwrap();
    let mode = rustix::fs::Mode::RUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &disk, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    copy(&rig, "one", 1, &path).unwrap();
    assert!(std::fs::read(&path).unwrap() == written);
}

#[test]
fn a_named_file_is_copied() {
    let (mut rig, sockets) = (rig(), tempfile::tempdir().unwrap());
    let (disk, path) = (rig.dir.path().join("disk"), rig.dir.path().join("copy"));
    let kind = Some(v1::Disk { block_size: 0, kind: Some(file(&disk, false)) });
    let named = v1::CreateDiskRequest { name: "data".into(), disk: kind };
    rig.plane.create_disk(&named).unwrap();
    let kind = Kind::Named(v1::NamedDiskReference { name: "data".into(), read_only: false });
    let mut driver = endpoint((&mut rig, sockets.path()), "one", vec![kind]);
    round_trip(&mut driver, 1, 9, 4);
    assert_eq!(copy(&rig, "one", 1, &path).unwrap().size_bytes, SIZE);
    assert!(std::fs::read(&path).unwrap() == std::fs::read(&disk).unwrap());
}

#[test]
fn other_disks_and_files_that_were_cut_are_not_copied() {
    let (mut rig, sockets) = (rig(), tempfile::tempdir().unwrap());
    let (disk, path) = (rig.dir.path().join("disk"), rig.dir.path().join("copy"));
    let null = Kind::Null(v1::NullDisk { size_bytes: 1 << 20 });
    let disks = vec![file(&disk, false), null, ram(1 << 20)];
    let _driver = endpoint((&mut rig, sockets.path()), "one", disks);
    let refused = |rig: &Rig, id: &str, nsid| {
        let status = copy(rig, id, nsid, &path).unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
        assert!(!path.exists() && !status.message().contains('\n'), "{status}");
        status.message().to_owned()
    };
    for nsid in [2, 3] {
        assert!(refused(&rig, "one", nsid).contains("neither an overlay nor a regular file"));
    }
    std::fs::File::options().write(true).open(&disk).unwrap().set_len(SIZE / 2).unwrap();
    assert!(refused(&rig, "one", 1).contains("shorter than its disk"));
    let blocks = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let devices = blocks.map(|entry| Path::new("/dev").join(entry.file_name()));
    for device in devices {
        rig.socket = sockets.path().join("two");
        if rig.plane.create(&rig.request("two", vec![file(&device, true)])).is_ok() {
            assert!(refused(&rig, "two", 1).contains("neither an overlay nor a regular file"));
            return;
        }
    }
    println!("SKIPPED: the part with a block device: none can be opened");
}
