//! Named disks: shared by any number of endpoints.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

use slipway_block::SharedDisk;
use slipway_plane_api::v1;

use crate::Error;
use crate::device;
use crate::file_options::file_options;
use crate::id::uuid;
use crate::place::{DiskPlace, Lasts, Resized};

/// The size of a logical block in bytes, unless the description has another: every guest supports
/// it.
const BLOCK_SIZE: u32 = 512;

/// A named disk, without its users.
#[derive(Clone)]
pub struct NamedDisk {
    /// The disk's name, by which descriptions refer to it.
    pub name: String,
    /// The kind in one word: ram, null, file.
    pub(crate) kind: &'static str,
    /// The path of a file; empty for other kinds.
    path: String,
    pub(crate) shared: SharedDisk,
    /// The request that the disk was made by.
    request: v1::CreateDiskRequest,
    /// The place where the disk is kept, if it is.
    place: Option<Arc<DiskPlace>>,
}

impl NamedDisk {
    /// Makes the disk that `request` describes. In a `place` that a predecessor used, the disk has
    /// the predecessor's content.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a name or description that is no named disk's, or a path that leads
    /// to another device; [`Error::Open`]; [`Error::Resources`] if the keeper is gone.
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
                let shared = open_file(&file, block_size, lasts, request.disk.as_ref())?;
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
        let resized = place.as_ref().and_then(DiskPlace::resized);
        let made = Self { name, kind, path, shared, request, place: place.map(Arc::new) };
        resized.map_or(Ok(()), |resized| made.go_on_with(resized))?;
        Ok(made)
    }

    /// Goes on with the size of a predecessor, which may have ended before it cut the disk's file
    /// to that size. Nobody uses the disk yet.
    fn go_on_with(&self, Resized { to, from }: Resized) -> Result<(), Error> {
        // A file of another size was changed by somebody else. A device stays as it is.
        let is_known = self.file_bytes().is_none_or(|bytes| bytes == from);
        if is_known && to < self.bytes() {
            self.shared.resize(Some(to))?;
        }
        // A file that stays longer is no reason to have no disk.
        self.trim().or_else(|error| {
            tracing::warn!(%error, name = self.name, "a file is longer than its disk");
            Ok(())
        })
    }

    /// Returns the number of the place where the disk is kept, or `None` if it is not kept.
    pub fn place(&self) -> Option<u32> {
        self.place.as_ref().map(|place| place.number())
    }

    /// Returns the size in bytes of the disk's file, which is longer than the disk until it is cut.
    /// Returns `None` if the disk is no regular file.
    fn file_bytes(&self) -> Option<u64> {
        self.shared.content()?.file_bytes().ok()
    }

    /// Returns the disk's present size in bytes.
    pub fn bytes(&self) -> u64 {
        self.shared.geometry().bytes()
    }

    /// Changes the size to that of `request`, also for a successor. Users adopt it when they are
    /// told; the part that a smaller disk gives up exists until [`NamedDisk::trim`].
    ///
    /// # Errors
    /// [`Error::Invalid`] if the disk would be smaller and the request does not ask for that;
    /// [`Error::Open`]. The size is unchanged then.
    pub fn resize(&self, request: &v1::ResizeDiskRequest) -> Result<(), Error> {
        let before = self.bytes();
        let bytes = (request.size_bytes > 0).then_some(request.size_bytes);
        if bytes.is_some_and(|bytes| bytes < before) && !request.shrink {
            return Err(Error::Invalid(format!(
                "disk {} has {before} bytes: what lies behind a smaller size is lost; `--shrink` \
                 allows it",
                self.name
            )));
        }
        self.shared.resize(bytes)?;
        // The file may have more bytes than the disk had: a part of a block behind its end.
        let from = self.file_bytes().unwrap_or(before);
        self.keep_size(bytes.map(|to| Resized { to, from }))
    }

    /// Gives up the part behind the disk's end, once every user has adopted the size.
    ///
    /// # Errors
    /// [`Error::Open`].
    pub fn trim(&self) -> Result<(), Error> {
        self.shared.trim()?;
        // From now on the size is the file's own, which others may change. A device is never cut.
        let is_cut = self.shared.content().is_some() && !self.shared.geometry().read_only;
        if is_cut { self.keep_size(None) } else { Ok(()) }
    }

    /// Stores the disk's present size, so that a successor makes it with that size. `resized` is
    /// that of a disk whose file or device may have more bytes.
    fn keep_size(&self, resized: Option<Resized>) -> Result<(), Error> {
        use v1::disk::Kind;
        let Some(place) = &self.place else { return Ok(()) };
        let (mut request, bytes) = (self.request.clone(), self.bytes());
        match request.disk.as_mut().and_then(|disk| disk.kind.as_mut()) {
            Some(Kind::Ram(ram)) => ram.size_bytes = bytes,
            Some(Kind::Null(null)) => null.size_bytes = bytes,
            _ => {}
        }
        place.store(&request, resized.filter(|_| self.kind == "file"))
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

/// Opens the file of a named disk. `described` is the disk's description, which may name the device
/// that the file must be on.
fn open_file(
    file: &v1::FileDisk,
    block_size: u32,
    lasts: Option<Lasts>,
    described: Option<&v1::Disk>,
) -> Result<SharedDisk, Error> {
    let kept = lasts.as_ref().and_then(|lasts| lasts.device);
    let meant = kept.or(file.device);
    let options = file_options(file, block_size, lasts.map(|lasts| lasts.witness));
    let shared = SharedDisk::file(Path::new(&file.path), &options)?;
    // If this host has no io_uring, that is better reported now than at the first attachment.
    drop(shared.open(true)?);
    if let (Some(meant), Some(disk)) = (meant, described) {
        device::check(meant, disk)?;
    }
    Ok(shared)
}

/// Checks that a name is a valid id and not a number: a number names a namespace.
fn check_name(name: &str) -> Result<(), Error> {
    slipway_plane_api::check_id(name).map_err(Error::Invalid)?;
    if name.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(Error::Invalid(format!("\"{name}\" is no name for a disk: digits alone")));
    }
    Ok(())
}

/// All named disks of a node.
#[derive(Default)]
pub struct Disks {
    by_name: Mutex<BTreeMap<String, NamedDisk>>,
    /// Read-locked while a named disk is opened, until its namespace is listed at its endpoint.
    /// Write-locked while a disk is resized and its users are told. Not locked while anybody waits
    /// for a user's client.
    sizes: RwLock<()>,
    /// Locked until all users of a disk that is resized have adopted its size.
    resizing: Mutex<()>,
}

impl Disks {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, NamedDisk>> {
        // The map is changed in single calls: a panic leaves it consistent.
        self.by_name.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Locks the sizes for reading: while the guard is held, no named disk changes its size.
    pub fn sizes_stay(&self) -> RwLockReadGuard<'_, ()> {
        self.sizes.read().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Locks the sizes for writing: while the guard is held, no named disk is being attached.
    pub fn sizes_change(&self) -> RwLockWriteGuard<'_, ()> {
        self.sizes.write().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Waits until no other disk is being resized. No other one is while the guard is held.
    pub fn resizing(&self) -> MutexGuard<'_, ()> {
        self.resizing.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns the disk of this name.
    ///
    /// # Errors
    /// [`Error::UnknownDisk`].
    pub fn get(&self, name: &str) -> Result<NamedDisk, Error> {
        self.lock().get(name).cloned().ok_or_else(|| Error::UnknownDisk(name.to_owned()))
    }

    /// Returns all disks, by name.
    pub fn all(&self) -> Vec<NamedDisk> {
        self.lock().values().cloned().collect()
    }

    /// Checks that no disk has this name.
    ///
    /// # Errors
    /// [`Error::ExistingDisk`].
    pub fn check_free(&self, name: &str) -> Result<(), Error> {
        free_in(&self.lock(), name)
    }

    /// Adds a disk, if its name is free.
    ///
    /// # Errors
    /// [`Error::ExistingDisk`].
    pub fn insert(&self, disk: NamedDisk) -> Result<(), Error> {
        let mut disks = self.lock();
        free_in(&disks, &disk.name)?;
        disks.insert(disk.name.clone(), disk);
        Ok(())
    }

    /// Removes a disk from the table. Returns it, or `None` if there is none of this name.
    pub fn remove(&self, name: &str) -> Option<NamedDisk> {
        self.lock().remove(name)
    }
}

/// Checks that no disk of the table has this name.
fn free_in(disks: &BTreeMap<String, NamedDisk>, name: &str) -> Result<(), Error> {
    match disks.contains_key(name) {
        true => Err(Error::ExistingDisk(name.to_owned())),
        false => Ok(()),
    }
}

/// Returns the size of a logical block in bytes.
pub fn block_size(disk: &v1::Disk) -> u32 {
    if disk.block_size == 0 { BLOCK_SIZE } else { disk.block_size }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use slipway_block::OpenError;
    use slipway_keeper::{Keeper, Shelf};
    use slipway_ram::Lasting;

    use super::*;

    #[test]
    fn names() {
        for bad in ["", "7", "0123", "a/b", "a:ro", "a b", &"x".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        assert!(check_name("7a").is_ok());
    }

    #[test]
    fn a_name_is_one_disks_until_that_is_removed() {
        let kind = v1::disk::Kind::Null(v1::NullDisk { size_bytes: 1 << 20 });
        let disk = Some(v1::Disk { block_size: 0, kind: Some(kind) });
        let request = v1::CreateDiskRequest { name: "data".into(), disk };
        let made = || NamedDisk::make(&request, None).unwrap();
        let disks = Disks::default();
        assert!(matches!(disks.get("data"), Err(Error::UnknownDisk(_))));
        disks.check_free("data").unwrap();
        disks.insert(made()).unwrap();
        assert!(matches!(disks.check_free("data"), Err(Error::ExistingDisk(_))));
        assert!(matches!(disks.insert(made()), Err(Error::ExistingDisk(_))));
        assert_eq!(disks.all().len(), 1);
        assert_eq!(disks.remove("data").map(|disk| disk.bytes()), Some(1 << 20));
        disks.check_free("data").unwrap();
    }

    #[test]
    fn a_file_that_was_not_cut_before_the_end_is_cut_by_the_successor() {
        const MIB: u64 = 1 << 20;
        let folder = tempfile::tempdir().unwrap();
        let (socket, path) = (folder.path().join("keeper"), folder.path().join("disk"));
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(2 * MIB).unwrap();
        let serves = socket.clone();
        std::thread::spawn(move || slipway_keeper::serve(&serves).unwrap());
        let keeper = loop {
            match Keeper::connect(&socket) {
                Ok(keeper) => break keeper,
                Err(_) => std::thread::yield_now(),
            }
        };
        let shelf = Shelf::new(Arc::new(keeper), 0..DiskPlace::SLOTS);
        let memory = Lasting::heap(DiskPlace::DESCRIPTION_LEN);
        let witness = Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
        let place = || DiskPlace::new(1, (shelf.clone(), &memory), witness.clone(), None).unwrap();
        let described = v1::FileDisk { path: path.to_string_lossy().into(), ..Default::default() };
        let kind = Some(v1::disk::Kind::File(described));
        let disk = Some(v1::Disk { block_size: 0, kind });
        let request = v1::CreateDiskRequest { name: "data".into(), disk };
        let mut first = place();
        first.describe(&request).unwrap();
        let made = NamedDisk::make(&request, Some(first)).unwrap();
        for size_bytes in [MIB + MIB / 2, MIB] {
            let smaller = v1::ResizeDiskRequest { name: "data".into(), size_bytes, shrink: true };
            made.resize(&smaller).unwrap();
        }
        // The process ends here.
        drop(made);
        // The second change has cut what the first one gave up.
        assert_eq!(file.metadata().unwrap().len(), MIB + MIB / 2);
        let successor = || {
            loop {
                let mut place = place();
                let request = place.load().unwrap();
                match NamedDisk::make(&request, Some(place)) {
                    Ok(disk) => break disk.bytes(),
                    // The kernel has not closed the last ring yet.
                    Err(Error::Open(OpenError::InUse(_))) => std::thread::yield_now(),
                    Err(error) => panic!("{error}"),
                }
            }
        };
        assert_eq!((successor(), file.metadata().unwrap().len()), (MIB, MIB));
        // Somebody else makes the file longer: that is not cut, whether it was cut before or not.
        file.set_len(3 * MIB).unwrap();
        assert_eq!((successor(), file.metadata().unwrap().len()), (3 * MIB, 3 * MIB));
        let resized = Some(Resized { to: MIB, from: 2 * MIB });
        place().store(&request, resized).unwrap();
        assert_eq!((successor(), file.metadata().unwrap().len()), (3 * MIB, 3 * MIB));
    }

    #[test]
    fn a_disk_becomes_smaller_only_if_that_is_asked_for() {
        let kind = v1::disk::Kind::Null(v1::NullDisk { size_bytes: 1 << 20 });
        let disk = Some(v1::Disk { block_size: 0, kind: Some(kind) });
        let request = v1::CreateDiskRequest { name: "data".into(), disk };
        let disk = NamedDisk::make(&request, None).unwrap();
        let resize = |size_bytes, shrink| {
            disk.resize(&v1::ResizeDiskRequest { name: "data".into(), size_bytes, shrink })
        };
        resize(2 << 20, false).unwrap();
        assert!(matches!(resize(1 << 20, false), Err(Error::Invalid(_))));
        assert_eq!(disk.bytes(), 2 << 20);
        resize(1 << 20, true).unwrap();
        assert!(matches!(resize(1000, true), Err(Error::Open(_))));
        assert_eq!(disk.bytes(), 1 << 20);
    }
}
