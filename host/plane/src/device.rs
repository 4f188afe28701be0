//! The identities of devices behind disks.
//!
//! A disk is described by a path, and a name below /dev may go from one device to another: a LUN is
//! taken away, and the next one gets its name and its number. A successor of a process with a
//! keeper opens disks by their paths, so the identities of their devices are kept beside them.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use prost::Message;
use slipway_plane_api::v1;
use slipway_plane_api::v1::disk::Kind;

use crate::Error;

/// The identity of a device.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Identity {
    /// The device number, as of stat(2).
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// The number that the kernel gives to each block device that appears, and to no other one
    /// until the next boot (Linux 5.15); 0 if there is none.
    #[prost(uint64, tag = "2")]
    pub sequence: u64,
}

impl Identity {
    /// Returns the identity of the device that a disk is on at present, or `None` if it is on none.
    pub fn of(disk: &v1::Disk) -> Option<Self> {
        Self::at(Path::new(path_of(disk)?))
    }

    fn at(path: &Path) -> Option<Self> {
        let found = std::fs::metadata(path).ok()?;
        let (number, kind) = (found.rdev(), found.file_type());
        match (kind.is_block_device(), kind.is_char_device()) {
            (true, _) => Some(Self { number, sequence: sequence(number).unwrap_or(0) }),
            (_, true) => Some(Self { number, sequence: 0 }),
            _ => None,
        }
    }

    /// Checks that a disk, which was just opened, is on this device. While it is open, its device
    /// keeps its number.
    ///
    /// # Errors
    /// The path leads to another device, or to none.
    pub fn check(&self, disk: &v1::Disk) -> Result<(), Error> {
        let found = Self::of(disk);
        if found == Some(*self) {
            return Ok(());
        }
        let path = path_of(disk).unwrap_or_default();
        let found = found.map_or_else(|| "none".to_owned(), |found| found.show());
        Err(Error::Invalid(format!(
            "{path:?} was the device {} and is {found} now: the disk stays closed; create it again \
             with the path of the right device",
            self.show()
        )))
    }

    fn show(&self) -> String {
        let (major, minor) = (rustix::fs::major(self.number), rustix::fs::minor(self.number));
        match self.sequence {
            0 => format!("{major}:{minor}"),
            sequence => format!("{major}:{minor} (diskseq {sequence})"),
        }
    }
}

/// Returns the path of the file or device that a disk is on.
fn path_of(disk: &v1::Disk) -> Option<&str> {
    match disk.kind.as_ref()? {
        Kind::File(file) => Some(&file.path),
        Kind::Overlay(overlay) => Some(&overlay.base_path),
        _ => None,
    }
}

/// Returns the kernel's sequence number of a block device. A partition has its disk's.
fn sequence(number: u64) -> Option<u64> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let device = format!("/sys/dev/block/{major}:{minor}");
    let read = |name: &str| std::fs::read_to_string(format!("{device}/{name}")).ok();
    // The entry is a link, so that its parent is that of the partition's directory.
    let text = read("diskseq").or_else(|| read("../diskseq"))?;
    text.trim().parse().ok()
}

/// Returns the identities of the devices of an endpoint's disks, by namespace.
pub fn of_endpoint(request: &v1::CreateEndpointRequest) -> BTreeMap<u32, Identity> {
    let namespaces = request.nvme.iter().flat_map(|nvme| &nvme.namespaces);
    let identity = |one: &v1::Namespace| Some((one.nsid, Identity::of(one.disk.as_ref()?)?));
    namespaces.filter_map(identity).collect()
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
        let identity = Identity::of(&disk).unwrap();
        assert_eq!(identity, Identity { number: rustix::fs::makedev(1, 3), sequence: 0 });
        identity.check(&disk).unwrap();
        // The name goes to another device.
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        let refused = identity.check(&disk).unwrap_err().to_string();
        assert!(refused.contains("was the device 1:3 and is 1:5 now"), "{refused}");
        std::fs::remove_file(&path).unwrap();
        let refused = identity.check(&disk).unwrap_err().to_string();
        assert!(refused.contains("is none now"), "{refused}");
    }

    #[test]
    fn a_device_of_the_same_number_that_came_later_is_another_one() {
        let Some(Ok(entry)) = std::fs::read_dir("/sys/block").ok().and_then(|mut all| all.next())
        else {
            println!("SKIPPED: a_device_of_the_same_number_…: needs a block device");
            return;
        };
        let disk = disk(&format!("/dev/{}", entry.file_name().to_str().unwrap()));
        let Some(identity) = Identity::of(&disk) else {
            println!("SKIPPED: a_device_of_the_same_number_…: /dev lacks the host's disks");
            return;
        };
        identity.check(&disk).unwrap();
        let earlier = Identity { sequence: identity.sequence + 1, ..identity };
        assert!(earlier.check(&disk).is_err());
    }

    #[test]
    fn disks_without_a_device_have_no_identity() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(Identity::of(&disk(file.path().to_str().unwrap())), None);
        assert_eq!(Identity::of(&disk("/no/such/path")), None);
        let ram = Some(Kind::Ram(v1::RamDisk { size_bytes: 512 }));
        assert_eq!(Identity::of(&v1::Disk { block_size: 0, kind: ram }), None);
        let namespace = |nsid, path| v1::Namespace { nsid, disk: Some(disk(path)) };
        let namespaces = vec![namespace(1, "/no/such/path"), namespace(2, "/dev/null")];
        let nvme = Some(v1::NvmeController { namespaces, ..Default::default() });
        let request = v1::CreateEndpointRequest { nvme, ..Default::default() };
        assert_eq!(of_endpoint(&request).into_keys().collect::<Vec<_>>(), [2]);
    }
}
