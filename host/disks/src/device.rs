//! The devices that disks are meant to be on.
//!
//! A name below /dev may go from one device to another. A successor of a process with a keeper
//! opens disks by their paths, so the identities of their devices are kept beside them. The
//! description of a disk may have the device that is meant, too.

use std::path::Path;

use slipway_plane_api::v1;
use slipway_plane_api::v1::DeviceIdentity;
use slipway_plane_api::v1::disk::Kind;

use crate::Error;

/// Returns the device that a disk is meant to be on: the one of its description, or the one that
/// its path leads to at present. Returns `None` if that is no device.
pub fn of(disk: &v1::Disk) -> Option<DeviceIdentity> {
    described(disk).or_else(|| at_present(disk))
}

/// Returns the device that the description of a disk names, if it does.
pub(crate) fn described(disk: &v1::Disk) -> Option<DeviceIdentity> {
    match disk.kind.as_ref()? {
        Kind::File(file) => file.device,
        _ => None,
    }
}

fn at_present(disk: &v1::Disk) -> Option<DeviceIdentity> {
    DeviceIdentity::at(Path::new(path_of(disk)?))
}

/// Checks that a disk, which was just opened, is on `device`. While it is open, its device keeps
/// its number.
///
/// # Errors
/// The path leads to another device, or to none.
pub(crate) fn check(device: DeviceIdentity, disk: &v1::Disk) -> Result<(), Error> {
    let found = at_present(disk);
    if found == Some(device) {
        return Ok(());
    }
    let path = path_of(disk).unwrap_or_default();
    let found = found.map_or_else(|| "none".to_owned(), |found| found.to_string());
    Err(Error::Invalid(format!(
        "{path:?} was the device {device} and is {found} now: the disk stays closed; create what \
         uses it again, with the path of the right device"
    )))
}

/// Returns the path of the file or device that a disk is on.
fn path_of(disk: &v1::Disk) -> Option<&str> {
    match disk.kind.as_ref()? {
        Kind::File(file) => Some(&file.path),
        Kind::Overlay(overlay) => Some(&overlay.base_path),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(path: &str) -> v1::Disk {
        let file = v1::FileDisk { path: path.to_owned(), ..Default::default() };
        v1::Disk { block_size: 0, kind: Some(Kind::File(file)) }
    }

    #[test]
    fn a_path_that_leads_to_another_device_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        let disk = disk(path.to_str().unwrap());
        let null = of(&disk).unwrap();
        assert_eq!(null, DeviceIdentity { number: rustix::fs::makedev(1, 3), sequence: 0 });
        check(null, &disk).unwrap();
        // The name goes to another device.
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        let refused = check(null, &disk).unwrap_err().to_string();
        assert!(refused.contains("was the device 1:3 and is 1:5 now"), "{refused}");
        std::fs::remove_file(&path).unwrap();
        let refused = check(null, &disk).unwrap_err().to_string();
        assert!(refused.contains("is none now"), "{refused}");
    }

    #[test]
    fn a_described_device_is_the_one_that_is_meant() {
        let zero = DeviceIdentity { number: rustix::fs::makedev(1, 5), sequence: 0 };
        let file =
            v1::FileDisk { path: "/dev/null".into(), device: Some(zero), ..Default::default() };
        let disk = v1::Disk { block_size: 0, kind: Some(Kind::File(file)) };
        assert_eq!((described(&disk), of(&disk)), (Some(zero), Some(zero)));
        let refused = check(zero, &disk).unwrap_err().to_string();
        assert!(refused.contains("was the device 1:5 and is 1:3 now"), "{refused}");
    }

    #[test]
    fn a_device_of_the_same_number_that_came_later_is_another_one() {
        let Some(Ok(entry)) = std::fs::read_dir("/sys/block").ok().and_then(|mut all| all.next())
        else {
            println!("SKIPPED: a_device_of_the_same_number_…: needs a block device");
            return;
        };
        let disk = disk(&format!("/dev/{}", entry.file_name().to_str().unwrap()));
        let Some(device) = of(&disk) else {
            println!("SKIPPED: a_device_of_the_same_number_…: /dev lacks the host's disks");
            return;
        };
        check(device, &disk).unwrap();
        let earlier = DeviceIdentity { sequence: device.sequence + 1, ..device };
        assert!(check(earlier, &disk).is_err());
    }

    #[test]
    fn disks_without_a_device_have_no_identity() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(of(&disk(file.path().to_str().unwrap())), None);
        assert_eq!(of(&disk("/no/such/path")), None);
        let ram = Some(Kind::Ram(v1::RamDisk { size_bytes: 512 }));
        assert_eq!(of(&v1::Disk { block_size: 0, kind: ram }), None);
    }
}
