//! Endpoints that outlive the daemon: what of each lies with the keeper, and how the next daemon
//! finds it.
//!
//! Each kept endpoint has a shelf of [`KEPT_SLOTS`] slots. The first holds its memory: the request
//! that it was made by, the endpoint's session, the controller's journal. Its RAM disks lie on the
//! shelf as well.
//!
//! Before a successor opens a disk, nothing of the predecessor may still be under way: requests
//! that io_uring works on outlive a killed process for as long as the medium takes. Each ring holds
//! a descriptor of one locked file (the *witness*), and gives it back when its last request has
//! ended; so whoever gets the lock knows that there is none.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use prost::Message;
use rustix::fs::FlockOperation;
use slipway_keeper::{Keeper, Shelf};
use slipway_nvme::{Limits, journal_len};
use slipway_plane_api::v1;
use slipway_ram::{Lasting, Snapshots};
use slipway_vfio_user::{HOST_SLOTS, KEPT_LEN, KEPT_SLOTS, Kept};

use crate::Error;

/// How long a predecessor may take to be gone, its requests to disks included.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at the witness.
const LOOK: Duration = Duration::from_millis(2);
/// Bytes for the request, twice.
const REQUEST_LEN: usize = 256 << 10;

/// A plane's keeper.
pub struct Keep {
    keeper: Arc<Keeper>,
    witness: Arc<OwnedFd>,
    places: Mutex<BTreeSet<u32>>,
}

/// Where one endpoint is kept.
pub struct Place {
    number: u32,
    shelf: Shelf,
    request: Snapshots,
    session: Lasting,
    /// The controller's.
    pub journal: Lasting,
    /// What a predecessor left, by slot.
    pub found: BTreeMap<u32, OwnedFd>,
    /// See the module's head.
    pub witness: Arc<OwnedFd>,
}

/// Endpoints of a predecessor: what they were made by, and where they are.
pub type Found = Vec<(v1::CreateEndpointRequest, Place)>;

impl Keep {
    /// Waits for the predecessor to be gone and finds what it left. `witness` is a file's path.
    ///
    /// # Errors
    /// The keeper is gone; the predecessor, or one of its requests, does not end.
    pub fn open(keeper: Keeper, witness: &Path) -> std::io::Result<(Self, Found)> {
        let taken = keeper.take(PATIENCE)?;
        let witness = Arc::new(lock(witness)?);
        let keep = Self { keeper: Arc::new(keeper), witness, places: Mutex::default() };
        let mut shelves: BTreeMap<u32, BTreeMap<u32, OwnedFd>> = BTreeMap::new();
        for (slot, file) in taken {
            shelves.entry(slot / KEPT_SLOTS).or_default().insert(slot % KEPT_SLOTS, file);
        }
        let mut all = Vec::new();
        for (number, found) in shelves {
            match keep.find(number, found) {
                Ok(one) => all.push(one),
                Err(error) => {
                    tracing::error!(%error, number, "what was left of an endpoint is of no use");
                    keep.shelf(number).clear_all()?;
                }
            }
        }
        Ok((keep, all))
    }

    fn find(
        &self,
        number: u32,
        mut found: BTreeMap<u32, OwnedFd>,
    ) -> Result<(v1::CreateEndpointRequest, Place), Error> {
        let useless = |what: &str| Error::Resources(what.to_owned());
        let memory = found.remove(&0).ok_or_else(|| useless("it has no memory"))?;
        let memory = Lasting::of(memory).map_err(|error| useless(&error.to_string()))?;
        let place = self.place(number, &memory, found)?;
        let request = place.request.load().ok_or_else(|| useless("it has no description"))?;
        let request = v1::CreateEndpointRequest::decode(request.as_slice());
        let request = request.map_err(|error| useless(&error.to_string()))?;
        self.lock().insert(number);
        Ok((request, place))
    }

    /// A place for a new endpoint.
    pub fn make(&self, request: &v1::CreateEndpointRequest) -> Result<Place, Error> {
        let full = |what: std::io::Error| Error::Resources(what.to_string());
        let number = {
            let mut places = self.lock();
            let most = slipway_keeper::SLOTS / KEPT_SLOTS;
            let free = (0..most).find(|number| !places.contains(number));
            let number = free.ok_or_else(|| Error::Resources("the keeper is full".into()))?;
            places.insert(number);
            number
        };
        let made = Lasting::new("slipway-endpoint", Self::memory_len()).map_err(full);
        let made = made.and_then(|memory| {
            let place = self.place(number, &memory, BTreeMap::new())?;
            let file = memory.file().ok_or_else(|| Error::Resources("no memory".into()))?;
            if !place.request.store(&request.encode_to_vec()) {
                return Err(Error::Invalid("the request is too long to be kept".into()));
            }
            place.shelf.put(0, file).map_err(full)?;
            Ok(place)
        });
        made.inspect_err(|_| self.give_back(number))
    }

    fn place(
        &self,
        number: u32,
        memory: &Lasting,
        found: BTreeMap<u32, OwnedFd>,
    ) -> Result<Place, Error> {
        let parts = memory.split(REQUEST_LEN).and_then(|(request, rest)| {
            let (session, journal) = rest.split(KEPT_LEN)?;
            Some((Snapshots::new(&request)?, session, journal))
        });
        let short = || Error::Resources("its memory is too short".into());
        let (request, session, journal) = parts.ok_or_else(short)?;
        let (shelf, witness) = (self.shelf(number), self.witness.clone());
        Ok(Place { number, shelf, request, session, journal, found, witness })
    }

    fn memory_len() -> usize {
        REQUEST_LEN + KEPT_LEN + journal_len(&Limits::default())
    }

    /// An endpoint is gone: nothing of it is kept any more.
    pub fn give_back(&self, number: u32) {
        // A keeper that is gone holds nothing.
        let _ = self.shelf(number).clear_all();
        self.lock().remove(&number);
    }

    fn shelf(&self, number: u32) -> Shelf {
        let start = number * KEPT_SLOTS;
        Shelf::new(self.keeper.clone(), start..start + KEPT_SLOTS)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        // The set is changed in single calls: a panic leaves it whole.
        self.places.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Place {
    pub fn number(&self) -> u32 {
        self.number
    }

    /// A successor shall not go on with it: what is kept is not what it is any more.
    pub fn forget(&mut self) {
        // A request without an id makes no endpoint.
        let _ = self.request.store(&[]);
    }

    /// The endpoint's part.
    pub fn kept(&mut self) -> Kept {
        let found = std::mem::take(&mut self.found);
        Kept { shelf: self.shelf.clone(), memory: self.session.clone(), found }
    }

    /// The memory of the RAM disk number `at` (from 0) of `bytes` bytes.
    pub fn ram(&mut self, at: usize, bytes: u64) -> Result<OwnedFd, Error> {
        let slot = HOST_SLOTS.start + at as u32;
        if !HOST_SLOTS.contains(&slot) {
            return Err(Error::Invalid("too many RAM disks to be kept".into()));
        }
        if let Some(file) = self.found.remove(&slot) {
            return Ok(file);
        }
        let full = |error: std::io::Error| Error::Resources(error.to_string());
        let file = slipway_block::ram_file(bytes).map_err(full)?;
        self.shelf.put(slot, file.as_fd()).map_err(full)?;
        Ok(file)
    }
}

/// Whether an endpoint like this can be kept: an overlay's map lies in this process, and so do
/// named disks and doorbells that a client maps.
pub fn can_keep(request: &v1::CreateEndpointRequest) -> bool {
    use v1::disk::Kind;
    let Some(nvme) = &request.nvme else { return true };
    let kinds = nvme.namespaces.iter().filter_map(|one| one.disk.as_ref()?.kind.as_ref());
    nvme.doorbells() == v1::nvme_controller::DoorbellMode::Trapped
        && kinds.into_iter().all(|kind| !matches!(kind, Kind::Overlay(_) | Kind::Named(_)))
}

/// Waits until nobody else holds the lock, not even a ring of a process that was killed.
fn lock(path: &Path) -> std::io::Result<OwnedFd> {
    let file = File::options().create(true).truncate(false).write(true).open(path)?;
    let begun = Instant::now();
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file.into()),
            Err(rustix::io::Errno::WOULDBLOCK) if begun.elapsed() < PATIENCE => {
                std::thread::sleep(LOOK);
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let text = "requests of the last daemon to its disks do not end";
                return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, text));
            }
            Err(error) => return Err(error.into()),
        }
    }
}
