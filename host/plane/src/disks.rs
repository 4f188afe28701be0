//! Named disks: shared by any number of endpoints.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use slipway_block::{FileOptions, SharedDisk};
use slipway_plane_api::v1;

use crate::Error;
use crate::device;
use crate::id::{check_id, uuid};
use crate::keep::DiskPlace;
use crate::reserve::reserve;

/// The size of a logical block in bytes, unless the description has another: every guest supports
/// it.
const BLOCK_SIZE: u32 = 512;

/// A named disk, without its users.
#[derive(Clone)]
pub struct NamedDisk {
    pub name: String,
    /// The kind in one word: ram, null, file.
    pub kind: &'static str,
    /// The path of a file; empty for other kinds.
    pub path: String,
    pub shared: SharedDisk,
    /// The request that the disk was made by.
    request: v1::CreateDiskRequest,
    /// The place where the disk is kept, if it is.
    place: Option<Arc<DiskPlace>>,
}

impl NamedDisk {
    /// Makes the disk that `request` describes. In a `place` that a predecessor used, the disk has
    /// the predecessor's content.
    pub fn make(
        request: &v1::CreateDiskRequest,
        mut place: Option<DiskPlace>,
    ) -> Result<Self, Error> {
        use v1::disk::Kind;
        check_name(&request.name)?;
        let lasts = place.as_mut().map(DiskPlace::lasts);
        let disk = request.disk.clone().unwrap_or_default();
        let block_size = block_size(&disk);
        let (kind, path, shared) = match disk.kind {
            Some(Kind::Ram(ram)) => {
                let had = lasts.and_then(|lasts| lasts.content);
                let shared = SharedDisk::ram(ram.size_bytes, block_size, had)?;
                if let (Some(place), Some(file)) = (&place, shared.memory()) {
                    place.put_content(file)?;
                }
                ("ram", String::new(), shared)
            }
            Some(Kind::Null(null)) => {
                ("null", String::new(), SharedDisk::null(null.size_bytes, block_size)?)
            }
            Some(Kind::File(file)) => {
                let (read_only, pin, reserve) = (file.read_only, file.pin, reserve(&file));
                let direct = !read_only;
                let kept = lasts.as_ref().and_then(|lasts| lasts.device);
                let meant = kept.or(file.device);
                let witness = lasts.map(|lasts| lasts.witness);
                let options = FileOptions { read_only, block_size, direct, pin, witness, reserve };
                let shared = SharedDisk::file(Path::new(&file.path), &options)?;
                // If this host has no io_uring, that is better reported now than at the first
                // attachment.
                drop(shared.open(true)?);
                if let (Some(meant), Some(disk)) = (meant, &request.disk) {
                    device::check(meant, disk)?;
                }
                ("file", file.path, shared)
            }
            _ => {
                return Err(Error::Invalid(format!(
                    "disk \"{}\" must be of kind ram, null or file: an overlay and an image that \
                     is being fetched are their endpoint's own",
                    request.name
                )));
            }
        };
        let (name, request) = (request.name.clone(), request.clone());
        Ok(Self { name, kind, path, shared, request, place: place.map(Arc::new) })
    }

    /// Returns the number of the place where the disk is kept, or `None` if it is not kept.
    pub fn place(&self) -> Option<u32> {
        self.place.as_ref().map(|place| place.number())
    }

    /// Stores the disk's present size, so that a successor makes it with that size. A file has a
    /// size of its own.
    pub fn keep_size(&self) -> Result<(), Error> {
        use v1::disk::Kind;
        let Some(place) = &self.place else { return Ok(()) };
        let (mut request, bytes) = (self.request.clone(), self.shared.geometry().bytes());
        match request.disk.as_mut().and_then(|disk| disk.kind.as_mut()) {
            Some(Kind::Ram(ram)) => ram.size_bytes = bytes,
            Some(Kind::Null(null)) => null.size_bytes = bytes,
            _ => {}
        }
        place.store(&request)
    }

    /// Returns the UUID. It is the same for every controller that has the disk, so that a guest
    /// with two paths to it sees one disk.
    pub fn uuid(&self) -> [u8; 16] {
        uuid(&format!("disk {}", self.name), 0)
    }

    /// Returns the disk's description for the interface.
    pub fn describe(&self, users: Vec<v1::DiskUser>) -> v1::NamedDisk {
        let shape = self.shared.geometry();
        v1::NamedDisk {
            name: self.name.clone(),
            kind: self.kind.to_owned(),
            path: self.path.clone(),
            size_bytes: shape.bytes(),
            block_size: shape.block_size,
            read_only: shape.read_only,
            users,
        }
    }
}

/// Checks that a name is a valid id and not a number: a number names a namespace.
fn check_name(name: &str) -> Result<(), Error> {
    check_id(name)?;
    if name.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(Error::Invalid(format!("\"{name}\" is no name for a disk: digits alone")));
    }
    Ok(())
}

/// All named disks of a plane.
#[derive(Default)]
pub struct Disks(Mutex<BTreeMap<String, NamedDisk>>);

impl Disks {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, NamedDisk>> {
        // The map is changed in single calls: a panic leaves it consistent.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn get(&self, name: &str) -> Result<NamedDisk, Error> {
        self.lock().get(name).cloned().ok_or_else(|| Error::UnknownDisk(name.to_owned()))
    }

    pub fn all(&self) -> Vec<NamedDisk> {
        self.lock().values().cloned().collect()
    }

    /// Adds a disk, if its name is free.
    pub fn insert(&self, disk: NamedDisk) -> Result<(), Error> {
        let mut disks = self.lock();
        if disks.contains_key(&disk.name) {
            return Err(Error::ExistingDisk(disk.name));
        }
        disks.insert(disk.name.clone(), disk);
        Ok(())
    }

    pub fn remove(&self, name: &str) -> Option<NamedDisk> {
        self.lock().remove(name)
    }
}

/// Returns the size of a logical block in bytes.
pub fn block_size(disk: &v1::Disk) -> u32 {
    if disk.block_size == 0 { BLOCK_SIZE } else { disk.block_size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for bad in ["", "7", "0123", "a/b", "a:ro", "a b", &"x".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        assert!(check_name("7a").is_ok());
    }
}
