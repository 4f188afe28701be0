//! Named disks: shared by any number of endpoints.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use slipway_block::{FileOptions, SharedDisk};
use slipway_plane_api::v1;

use crate::Error;
use crate::disk::block_size;
use crate::endpoint::{check_id, uuid};
use crate::keep::DiskPlace;

/// A named disk, apart from who uses it.
#[derive(Clone)]
pub struct Named {
    pub name: String,
    /// One word: ram, null, file.
    pub kind: &'static str,
    /// Of a file.
    pub path: String,
    pub shared: SharedDisk,
    /// What it was made by.
    request: v1::CreateDiskRequest,
    /// Where it is kept.
    place: Option<Arc<DiskPlace>>,
}

impl Named {
    /// Makes what `request` describes. In a `place` that a predecessor used, it is what that one
    /// had.
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
                let (read_only, pin) = (file.read_only, file.pin);
                let direct = !read_only;
                let witness = lasts.map(|lasts| lasts.witness);
                let options = FileOptions { read_only, block_size, direct, pin, witness };
                let shared = SharedDisk::file(Path::new(&file.path), &options)?;
                // Whether this host has io_uring is better said now than at the first attachment.
                drop(shared.open(true)?);
                ("file", file.path, shared)
            }
            _ => {
                return Err(Error::Invalid(format!(
                    "disk \"{}\" must be of kind ram, null or file: an overlay is its endpoint's own",
                    request.name
                )));
            }
        };
        let (name, request) = (request.name.clone(), request.clone());
        Ok(Self { name, kind, path, shared, request, place: place.map(Arc::new) })
    }

    /// Where it is kept.
    pub fn place(&self) -> Option<u32> {
        self.place.as_ref().map(|place| place.number())
    }

    /// Has a successor make it with the size that it has now; the size of a file is its own.
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

    /// The same for every controller that has it, so that a guest with two ways to it sees one.
    pub fn uuid(&self) -> [u8; 16] {
        uuid(&format!("disk {}", self.name), 0)
    }

    /// As the interface has it.
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

/// A name is an id, and no number: a number names a namespace.
fn check_name(name: &str) -> Result<(), Error> {
    check_id(name)?;
    if name.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(Error::Invalid(format!("\"{name}\" is no name for a disk: digits alone")));
    }
    Ok(())
}

/// All named disks of a plane.
#[derive(Default)]
pub struct Disks(Mutex<BTreeMap<String, Named>>);

impl Disks {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Named>> {
        // Changed in single calls: a panic leaves it whole.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn get(&self, name: &str) -> Result<Named, Error> {
        self.lock().get(name).cloned().ok_or_else(|| Error::UnknownDisk(name.to_owned()))
    }

    pub fn all(&self) -> Vec<Named> {
        self.lock().values().cloned().collect()
    }

    /// Keeps a disk whose name is free.
    pub fn insert(&self, disk: Named) -> Result<(), Error> {
        let mut disks = self.lock();
        if disks.contains_key(&disk.name) {
            return Err(Error::ExistingDisk(disk.name));
        }
        disks.insert(disk.name.clone(), disk);
        Ok(())
    }

    pub fn remove(&self, name: &str) -> Option<Named> {
        self.lock().remove(name)
    }
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
