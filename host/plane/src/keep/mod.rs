//! Endpoints and named disks that outlive the daemon: the parts of each that lie with the keeper,
//! and how the next daemon finds them.
//!
//! The keeper is a table of numbered slots, each for one descriptor. A *shelf* is a run of
//! [`KEPT_SLOTS`] of them that is filled and emptied as one. Each kept endpoint has a shelf. Its
//! first slot holds the endpoint's memory: the layout's version, a description of its present
//! state, the endpoint's session, the controller's journal. The content of its disks in memory,
//! overlays included, lies on the shelf as well. The last shelf holds the named disks, two slots
//! each, and the shelves before it the memory that sandboxes have of the pool (`slipway_pool`).
//!
//! A change (a disk attached, detached or resized, a limit) is described first and made then. A
//! successor that is started in between makes what is described; its controller tells the guest of
//! every namespace that has changed (`slipway_nvme::Controller::recover`).
//!
//! A predecessor with another layout is refused before anything of it is touched.
//!
//! A new part of an endpoint's state is a field of [`place::Description`], which a build without it
//! ignores: no version changes. A part of the server's or a device's is in its own journal, whose
//! version is a word of `layout`. A descriptor has a slot of the shelf (`HOST_SLOTS` of
//! `host/vfio-user`). `layout::VERSION` is raised if the meaning of slots or the order of parts is
//! another one. Tests: `host/plane/tests`, `kept.rs`, `plane/kept_full.rs` and `killed`, and
//! `tests/e2e/35-restart.sh`; `docs/walks/restart.md` and `docs/operation.md` say what goes on.
//!
//! Before a successor opens a disk, no request of the predecessor may be in flight: requests in
//! io_uring outlive a killed process for as long as the medium takes. Each ring holds a descriptor
//! of one locked file (the *witness*), and releases it when its last request has ended. So a
//! process that gets the lock knows that no request is left.

mod layout;
mod place;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use slipway_disks::DiskPlace;
use slipway_keeper::{Keeper, Shelf};
use slipway_lock::Lock;
use slipway_nvme::journal_len;
use slipway_plane_api::v1;
use slipway_pool::{Left, Shelves};
use slipway_ram::Lasting;
use slipway_vfio_user::{KEPT_LEN, KEPT_SLOTS};

use crate::Error;
use layout::Unknown;

pub use layout::MOST_LANES;
pub use place::{KeptPlace, endpoint_parts};

/// The time that a predecessor may take to end, including its requests to disks.
const PATIENCE: Duration = Duration::from_secs(60);
/// The number of the shelf that holds the named disks.
const DISKS: u32 = slipway_keeper::SLOTS / KEPT_SLOTS - 1;
/// The number of the first of the shelves that hold the memory of sandboxes; endpoints have the
/// shelves below.
const MEMORY: u32 = DISKS - 8;

/// Returns whether a removed endpoint has ended.
type HasEnded = Box<dyn Fn() -> bool + Send>;

/// A plane's keeper.
pub struct PlaneKeeper {
    keeper: Arc<Keeper>,
    witness: Arc<OwnedFd>,
    endpoints: Numbers,
    disks: Numbers,
    /// The numbers of removed endpoints that had not ended.
    ending: Mutex<Vec<(u32, HasEnded)>>,
}

/// The endpoints and disks that a predecessor left.
#[derive(Default)]
pub struct Inheritance {
    pub disks: Vec<(v1::CreateDiskRequest, DiskPlace)>,
    pub endpoints: Vec<KeptPlace>,
    pub memory: Vec<Left>,
}

/// Descriptors by slot.
type Files = BTreeMap<u32, OwnedFd>;

/// The descriptors that a predecessor left, by the number of what they belong to.
#[derive(Default)]
struct LeftFiles {
    endpoints: BTreeMap<u32, Files>,
    disks: BTreeMap<u32, Files>,
    memory: BTreeMap<u32, Files>,
}

impl LeftFiles {
    /// Sorts what the keeper had in its slots.
    fn sort(taken: Vec<(u32, OwnedFd)>) -> Self {
        let mut left = Self::default();
        for (slot, file) in taken {
            let (shelf, slot) = (slot / KEPT_SLOTS, slot % KEPT_SLOTS);
            let (all, number, slot) = match shelf {
                DISKS => (&mut left.disks, slot / DiskPlace::SLOTS, slot % DiskPlace::SLOTS),
                MEMORY.. => {
                    let slot = (shelf - MEMORY) * KEPT_SLOTS + slot;
                    (&mut left.memory, slot / slipway_pool::SLOTS, slot % slipway_pool::SLOTS)
                }
                _ => (&mut left.endpoints, shelf, slot),
            };
            all.entry(number).or_default().insert(slot, file);
        }
        left
    }
}

/// Returns what was found on a shelf. Returns `None` if it is damaged, and adds its `shelf` to the
/// useless ones.
///
/// # Errors
/// Another layout than this build's.
fn or_useless<T>(
    found: Result<T, Unknown>,
    shelf: impl FnOnce() -> Shelf,
    useless: &mut Vec<Shelf>,
) -> std::io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(Unknown::Layout(layout)) => Err(refuse(&layout)),
        Err(Unknown::Damaged) => {
            useless.push(shelf());
            Ok(None)
        }
    }
}

impl PlaneKeeper {
    /// Waits for the predecessor to end and finds what it left. `witness` is the path of a file.
    ///
    /// # Errors
    /// The keeper is gone; the predecessor, or one of its requests, does not end; or the
    /// predecessor was a build with another layout: then everything that it left stays unchanged.
    pub fn open(keeper: Keeper, witness: &Path) -> std::io::Result<(Self, Inheritance)> {
        let left = LeftFiles::sort(keeper.take(PATIENCE)?);
        let witness = Arc::new(lock(witness)?);
        let (endpoints, disks) = (Numbers::default(), Numbers::default());
        let (keeper, ending) = (Arc::new(keeper), Mutex::default());
        let keep = Self { keeper, witness, endpoints, disks, ending };
        let (mut found, mut useless) = (Inheritance::default(), Vec::new());
        for (number, files) in left.disks {
            let disk = keep.find_disk(number, files);
            found.disks.extend(or_useless(disk, || keep.disk_shelf(number), &mut useless)?);
        }
        for (number, files) in left.endpoints {
            let place = keep.find(number, files);
            found.endpoints.extend(or_useless(place, || keep.shelf(number), &mut useless)?);
        }
        let memory = left.memory.into_iter().map(|(number, files)| Left { number, files });
        found.memory.extend(memory);
        for shelf in useless {
            tracing::error!("something was left with the keeper that is of no use");
            shelf.clear_all()?;
        }
        Ok((keep, found))
    }

    /// Returns the place of an endpoint whose shelf had `files`.
    fn find(&self, number: u32, mut files: Files) -> Result<KeptPlace, Unknown> {
        let memory = files.remove(&0).ok_or(Unknown::Damaged)?;
        let memory = Lasting::of(memory).map_err(|_| Unknown::Damaged)?;
        let rest = layout::check(&memory, layout::endpoint())?;
        let place = KeptPlace::new(number, self.shelf(number), &rest, self.witness.clone(), files);
        let mut place = place.ok_or(Unknown::Damaged)?;
        if !place.load() {
            return Err(Unknown::Damaged);
        }
        self.endpoints.take(number);
        Ok(place)
    }

    /// Returns a named disk whose slots had `files`: its description and its place.
    fn find_disk(
        &self,
        number: u32,
        mut files: Files,
    ) -> Result<(v1::CreateDiskRequest, DiskPlace), Unknown> {
        let memory = files.remove(&0).ok_or(Unknown::Damaged)?;
        let memory = Lasting::of(memory).map_err(|_| Unknown::Damaged)?;
        let rest = layout::check(&memory, layout::disk())?;
        let shelf = self.disk_shelf(number);
        let place = DiskPlace::new(number, (shelf, &rest), self.witness.clone(), files.remove(&1));
        let mut place = place.ok_or(Unknown::Damaged)?;
        let request = place.load().ok_or(Unknown::Damaged)?;
        self.disks.take(number);
        Ok((request, place))
    }

    /// Makes a place for a new endpoint.
    pub fn make(&self, request: &v1::CreateEndpointRequest) -> Result<KeptPlace, Error> {
        self.free_ended();
        let number = self.endpoints.next(MEMORY)?;
        let made = fresh("slipway-endpoint", Self::endpoint_len(), layout::endpoint());
        let made = made.and_then(|(memory, rest)| {
            let shelf = self.shelf(number);
            let place = KeptPlace::new(number, shelf, &rest, self.witness.clone(), Files::new());
            let mut place = place.ok_or_else(short)?;
            place.describe(request)?;
            put(&place.shelf, &memory)?;
            Ok(place)
        });
        made.inspect_err(|_| self.give_back(number))
    }

    /// Makes a place for a new named disk.
    pub fn make_disk(&self, request: &v1::CreateDiskRequest) -> Result<DiskPlace, Error> {
        let number = self.disks.next(KEPT_SLOTS / DiskPlace::SLOTS)?;
        let made = fresh("slipway-disk", Self::disk_len(), layout::disk());
        let made = made.and_then(|(memory, rest)| {
            let shelf = self.disk_shelf(number);
            let at = (shelf.clone(), &rest);
            let place = DiskPlace::new(number, at, self.witness.clone(), None);
            let mut place = place.ok_or_else(short)?;
            place.describe(request)?;
            put(&shelf, &memory)?;
            Ok(place)
        });
        made.inspect_err(|_| self.give_back_disk(number))
    }

    fn endpoint_len() -> usize {
        layout::HEAD + place::DESCRIPTION_LEN + KEPT_LEN + journal_len(&layout::journal_limits())
    }

    fn disk_len() -> usize {
        layout::HEAD + DiskPlace::DESCRIPTION_LEN
    }

    /// Releases the place of an endpoint that has ended.
    pub fn give_back(&self, number: u32) {
        // An error means that the keeper is gone, and then it holds nothing.
        let _ = self.shelf(number).clear_all();
        self.endpoints.give_back(number);
    }

    /// Clears the place of a removed endpoint that has not ended. The place has no other endpoint
    /// before `has_ended` returns `true`: until then the removed one may clear slots of the shelf.
    pub fn give_back_later(&self, number: u32, has_ended: impl Fn() -> bool + Send + 'static) {
        let _ = self.shelf(number).clear_all();
        self.ending().push((number, Box::new(has_ended)));
    }

    /// Releases the places of removed endpoints that have ended by now.
    fn free_ended(&self) {
        let ended: Vec<_> = self.ending().extract_if(.., |one| (one.1)()).collect();
        ended.into_iter().for_each(|(number, _)| self.give_back(number));
    }

    fn ending(&self) -> MutexGuard<'_, Vec<(u32, HasEnded)>> {
        // The list is changed in single calls: a panic leaves it consistent.
        self.ending.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Releases the place of a named disk that was removed.
    pub fn give_back_disk(&self, number: u32) {
        let _ = self.disk_shelf(number).clear_all();
        self.disks.give_back(number);
    }

    /// Returns the places for memory of sandboxes.
    pub fn memory_shelves(&self) -> Shelves {
        Shelves::new(self.keeper.clone(), MEMORY * KEPT_SLOTS..DISKS * KEPT_SLOTS)
    }

    fn shelf(&self, number: u32) -> Shelf {
        let start = number * KEPT_SLOTS;
        Shelf::new(self.keeper.clone(), start..start + KEPT_SLOTS)
    }

    fn disk_shelf(&self, number: u32) -> Shelf {
        let start = DISKS * KEPT_SLOTS + number * DiskPlace::SLOTS;
        Shelf::new(self.keeper.clone(), start..start + DiskPlace::SLOTS)
    }
}

/// Makes memory with `layout` in its head. Returns it, and the rest after the head.
fn fresh(name: &str, len: usize, layout: [u64; 4]) -> Result<(Lasting, Lasting), Error> {
    let memory = Lasting::new(name, len).map_err(|error| Error::Resources(error.to_string()))?;
    let rest = layout::begin(&memory, layout).ok_or_else(short)?;
    Ok((memory, rest))
}

fn put(shelf: &Shelf, memory: &Lasting) -> Result<(), Error> {
    let file = memory.file().ok_or_else(short)?;
    shelf.put(0, file).map_err(|error| Error::Resources(error.to_string()))
}

fn short() -> Error {
    Error::Resources("memory to keep it in is too short".into())
}

fn refuse(layout: &str) -> std::io::Error {
    std::io::Error::other(format!(
        "the last daemon was of another build and left {layout}. Nothing was touched: start the \
         build that left it, or end the keeper and lose what it holds"
    ))
}

/// A set of numbers that are in use.
#[derive(Default)]
struct Numbers(Mutex<BTreeSet<u32>>);

impl Numbers {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        // The set is changed in single calls: a panic leaves it consistent.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Takes the lowest number that is free and below `most`.
    fn next(&self, most: u32) -> Result<u32, Error> {
        let mut taken = self.lock();
        let free = (0..most).find(|number| !taken.contains(number));
        let number = free.ok_or_else(|| Error::Resources("the keeper is full".into()))?;
        taken.insert(number);
        Ok(number)
    }

    fn take(&self, number: u32) {
        self.lock().insert(number);
    }

    fn give_back(&self, number: u32) {
        self.lock().remove(&number);
    }
}

/// Waits until nobody else holds the lock, not even a ring of a process that was killed. The file
/// belongs to this daemon's user alone: a lock of another user would keep the node without a
/// daemon.
fn lock(path: &Path) -> std::io::Result<OwnedFd> {
    match Lock::within(path, PATIENCE) {
        Ok(lock) => Ok(lock.into()),
        Err(slipway_lock::Error::Io { source, .. }) => Err(source),
        Err(error @ slipway_lock::Error::Held { .. }) => {
            let text = format!("requests of the last daemon to its disks do not end: {error}");
            Err(std::io::Error::new(std::io::ErrorKind::TimedOut, text))
        }
        Err(error) => Err(std::io::Error::other(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::FlockOperation;

    use super::*;

    #[test]
    fn the_place_of_a_removed_endpoint_is_free_once_it_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keeper");
        let served = path.clone();
        std::thread::spawn(move || slipway_keeper::serve(&served));
        let keeper = loop {
            match Keeper::connect(&path) {
                Ok(keeper) => break keeper,
                Err(_) => std::thread::yield_now(),
            }
        };
        let (keep, _) = PlaneKeeper::open(keeper, &dir.path().join("witness")).unwrap();
        let request = v1::CreateEndpointRequest { id: "one".into(), ..Default::default() };
        let make = || keep.make(&request).unwrap().number();
        assert_eq!([make(), make()], [0, 1]);
        let has_ended = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&has_ended);
        keep.give_back_later(0, move || ended.load(Ordering::Relaxed));
        assert_eq!(make(), 2);
        has_ended.store(true, Ordering::Relaxed);
        assert_eq!(make(), 0);
        keep.give_back(1);
        assert_eq!(make(), 1);
    }

    /// Opening the witness for reading would be enough to hold its lock for any time.
    #[test]
    fn the_witness_is_a_lock_that_no_other_user_can_take() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("io.lock");
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
        drop(lock(&path).unwrap());
        assert_eq!(mode(), 0o600);
        // A witness that a daemon of an older build has left, and that another user has open.
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        let theirs = File::open(&path).unwrap();
        drop(lock(&path).unwrap());
        assert_eq!(mode(), 0o600);
        #[allow(clippy::disallowed_methods)] // the attacker's own call
        rustix::fs::flock(&theirs, FlockOperation::NonBlockingLockShared).unwrap();
        // Waits a minute if the file that the other user has locked is still the witness.
        lock(&path).unwrap();
    }
}
