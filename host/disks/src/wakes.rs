//! One descriptor for all disks of an endpoint, which can be attached and detached.
//!
//! An endpoint watches its backends' descriptors from the start. The descriptors of later disks are
//! added to an epoll instance, which the endpoint watches as one of them: it is readable exactly
//! while one of its descriptors is. A detached disk closes its descriptor, which removes it from
//! the instance.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll;
use slipway_block::Disk;

use crate::Error;
use crate::open::Opened;

/// The descriptors of an endpoint's disks.
pub struct Wakes(OwnedFd);

impl Wakes {
    /// Makes an empty set of descriptors.
    ///
    /// # Errors
    /// [`Error::Resources`].
    pub fn new() -> Result<Self, Error> {
        epoll::create(epoll::CreateFlags::CLOEXEC).map(Self).map_err(lacking)
    }

    /// Adds a disk's descriptor, if it has one.
    fn add(&self, disk: &dyn Disk) -> Result<(), Error> {
        let Some(wake) = disk.wake_descriptor() else { return Ok(()) };
        let data = epoll::EventData::new_u64(0);
        epoll::add(&self.0, wake, data, epoll::EventFlags::IN).map_err(lacking)
    }

    /// Returns a duplicate of the epoll descriptor, to be watched.
    ///
    /// # Errors
    /// [`Error::Resources`].
    pub fn descriptor(&self) -> Result<OwnedFd, Error> {
        self.0.as_fd().try_clone_to_owned().map_err(|error| Error::Resources(error.to_string()))
    }
}

/// Adds a namespace's descriptors: that of its disk to the first set, that of each lane's disk to
/// the lane's set.
///
/// # Errors
/// [`Error::Resources`].
pub fn watch_all(wakes: &[Wakes], opened: &Opened) -> Result<(), Error> {
    let disks = std::iter::once(&opened.disk).chain(&opened.lanes);
    wakes.iter().zip(disks).try_for_each(|(wakes, disk)| wakes.add(&**disk))
}

fn lacking(errno: rustix::io::Errno) -> Error {
    Error::Resources(errno.to_string())
}
