//! One descriptor for all disks of an endpoint, whose disks come and go.
//!
//! An endpoint watches its backends' descriptors from the start. Disks that come later have theirs
//! added to an epoll instance that the endpoint watches as one of them: it is readable exactly
//! while one of its descriptors is. A disk that goes closes its descriptor, and with that it leaves.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll;
use slipway_block::Disk;

use crate::Error;
use crate::disk::Opened;

/// The descriptors of an endpoint's disks.
pub struct Wakes(OwnedFd);

impl Wakes {
    /// None yet.
    pub fn new() -> Result<Self, Error> {
        epoll::create(epoll::CreateFlags::CLOEXEC).map(Self).map_err(lacking)
    }

    /// Adds a disk's descriptor, if it has one.
    pub fn add(&self, disk: &dyn Disk) -> Result<(), Error> {
        let Some(wake) = disk.wake_descriptor() else { return Ok(()) };
        let data = epoll::EventData::new_u64(0);
        epoll::add(&self.0, wake, data, epoll::EventFlags::IN).map_err(lacking)
    }

    /// A duplicate to watch.
    pub fn descriptor(&self) -> Result<OwnedFd, Error> {
        self.0.as_fd().try_clone_to_owned().map_err(|error| Error::Resources(error.to_string()))
    }
}

/// Adds a namespace's descriptors: of its disk to the first, of each lane's disk to that lane's.
pub fn watch_all(wakes: &[Wakes], opened: &Opened) -> Result<(), Error> {
    let disks = std::iter::once(&opened.disk).chain(&opened.lanes);
    wakes.iter().zip(disks).try_for_each(|(wakes, disk)| wakes.add(&**disk))
}

fn lacking(errno: rustix::io::Errno) -> Error {
    Error::Resources(errno.to_string())
}
