//! The place where one named disk is kept: its description, and the content of a RAM disk.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use prost::Message;
use slipway_keeper::Shelf;
use slipway_plane_api::v1;
use slipway_ram::{Lasting, Snapshots};

use crate::Error;
use crate::device;

/// The slot of the content of a RAM disk.
const CONTENT: u32 = 1;

/// The resources for opening a disk that is to outlive the process.
pub struct Lasts {
    /// The witness, a locked file that each io_uring refers to: a successor that gets the lock
    /// knows that none of this process's requests is in flight.
    pub witness: Arc<OwnedFd>,
    /// The content that a disk in memory had under a predecessor.
    pub content: Option<OwnedFd>,
    /// The device that the disk was on when it was described, if it was on one.
    pub device: Option<v1::DeviceIdentity>,
}

/// The place where one named disk is kept.
pub struct DiskPlace {
    number: u32,
    shelf: Shelf,
    stored: Snapshots,
    /// The content that a predecessor left.
    content: Option<OwnedFd>,
    device: Option<v1::DeviceIdentity>,
    witness: Arc<OwnedFd>,
}

/// The part of a description that the request lacks. It follows the request's bytes, and a build
/// without it passes it over.
#[derive(Clone, PartialEq, Message)]
struct DescriptionExtras {
    #[prost(message, optional, tag = "100")]
    device: Option<v1::DeviceIdentity>,
}

impl DiskPlace {
    /// The number of slots of one disk: its memory, which the owner of the keeper puts there, and
    /// its content.
    pub const SLOTS: u32 = 2;
    /// The size in bytes of the memory for two copies of the description.
    pub const DESCRIPTION_LEN: usize = 32 << 10;

    /// Makes a place with this number in `memory`, of [`DiskPlace::DESCRIPTION_LEN`] bytes, and on
    /// a shelf of [`DiskPlace::SLOTS`] slots. `content` is what a predecessor left in the second
    /// slot. Returns `None` if the memory is too short.
    pub fn new(
        number: u32,
        (shelf, memory): (Shelf, &Lasting),
        witness: Arc<OwnedFd>,
        content: Option<OwnedFd>,
    ) -> Option<Self> {
        let (stored, device) = (Snapshots::new(memory)?, None);
        Some(Self { number, shelf, stored, content, device, witness })
    }

    /// Returns the description that a predecessor stored, or `None` if there is no valid one.
    pub fn load(&mut self) -> Option<v1::CreateDiskRequest> {
        let stored = self.stored.load()?;
        let (request, device) = decode(&stored)?;
        self.device = device;
        Some(request)
    }

    /// Stores `request` as the description of a new disk, with the device that it is on.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the description is too long.
    pub fn describe(&mut self, request: &v1::CreateDiskRequest) -> Result<(), Error> {
        self.device = request.disk.as_ref().and_then(device::of);
        self.store(request)
    }

    /// Stores `request` as the disk's description.
    pub(crate) fn store(&self, request: &v1::CreateDiskRequest) -> Result<(), Error> {
        match self.stored.store(&encode(request, self.device)) {
            true => Ok(()),
            false => Err(Error::Invalid("the disk's description is too long to be kept".into())),
        }
    }

    /// Returns the place's number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the resources for opening the disk.
    pub(crate) fn lasts(&mut self) -> Lasts {
        let (witness, content) = (self.witness.clone(), self.content.take());
        Lasts { witness, content, device: self.device }
    }

    /// Leaves the content of a RAM disk on the shelf.
    pub(crate) fn put_content(&self, file: &OwnedFd) -> Result<(), Error> {
        let put = self.shelf.put(CONTENT, file.as_fd());
        put.map_err(|error| Error::Resources(error.to_string()))
    }
}

fn encode(request: &v1::CreateDiskRequest, device: Option<v1::DeviceIdentity>) -> Vec<u8> {
    let mut bytes = request.encode_to_vec();
    bytes.extend(DescriptionExtras { device }.encode_to_vec());
    bytes
}

fn decode(bytes: &[u8]) -> Option<(v1::CreateDiskRequest, Option<v1::DeviceIdentity>)> {
    let request = v1::CreateDiskRequest::decode(bytes).ok()?;
    Some((request, DescriptionExtras::decode(bytes).ok()?.device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_of_both_builds_are_read() {
        let file = v1::FileDisk { path: "/dev/sdb".into(), ..Default::default() };
        let disk = Some(v1::Disk { block_size: 512, kind: Some(v1::disk::Kind::File(file)) });
        let request = v1::CreateDiskRequest { name: "data".into(), disk };
        let device = Some(v1::DeviceIdentity { number: 0x810, sequence: 7 });
        assert_eq!(decode(&encode(&request, device)), Some((request.clone(), device)));
        assert_eq!(decode(&request.encode_to_vec()), Some((request.clone(), None)));
        let earlier = v1::CreateDiskRequest::decode(encode(&request, device).as_slice());
        assert_eq!(earlier.unwrap(), request);
    }
}
