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
    resized: Option<Resized>,
    witness: Arc<OwnedFd>,
}

/// The part of a description that the request lacks. It follows the request's bytes, and a build
/// without it passes it over.
#[derive(Clone, PartialEq, Message)]
struct DescriptionExtras {
    #[prost(message, optional, tag = "100")]
    device: Option<v1::DeviceIdentity>,
    #[prost(message, optional, tag = "101")]
    resized: Option<Resized>,
}

/// The size of a disk whose file or device may have more bytes: it was resized, and the file is not
/// cut yet, or never is.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Resized {
    /// The disk's size in bytes.
    #[prost(uint64, tag = "1")]
    pub to: u64,
    /// The size in bytes that the disk's file had once the disk was resized. A file that has
    /// another size when a successor opens it was changed by somebody else, and is not cut.
    #[prost(uint64, tag = "2")]
    pub from: u64,
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
        let (stored, device, resized) = (Snapshots::new(memory)?, None, None);
        Some(Self { number, shelf, stored, content, device, resized, witness })
    }

    /// Returns the description that a predecessor stored, or `None` if there is no valid one.
    pub fn load(&mut self) -> Option<v1::CreateDiskRequest> {
        let stored = self.stored.load()?;
        let (request, extras) = decode(&stored)?;
        (self.device, self.resized) = (extras.device, extras.resized);
        Some(request)
    }

    /// Stores `request` as the description of a new disk, with the device that it is on.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the description is too long.
    pub fn describe(&mut self, request: &v1::CreateDiskRequest) -> Result<(), Error> {
        self.device = request.disk.as_ref().and_then(device::of);
        self.store(request, None)
    }

    /// Stores `request` as the disk's description. `resized` is `None` if the disk has the size of
    /// its file.
    pub(crate) fn store(
        &self,
        request: &v1::CreateDiskRequest,
        resized: Option<Resized>,
    ) -> Result<(), Error> {
        let extras = DescriptionExtras { device: self.device, resized };
        match self.stored.store(&encode(request, &extras)) {
            true => Ok(()),
            false => Err(Error::Invalid("the disk's description is too long to be kept".into())),
        }
    }

    /// Returns the place's number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the size to which a predecessor resized the disk, or `None` if the disk has the size
    /// of its file.
    pub(crate) fn resized(&self) -> Option<Resized> {
        self.resized
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

fn encode(request: &v1::CreateDiskRequest, extras: &DescriptionExtras) -> Vec<u8> {
    let mut bytes = request.encode_to_vec();
    bytes.extend(extras.encode_to_vec());
    bytes
}

fn decode(bytes: &[u8]) -> Option<(v1::CreateDiskRequest, DescriptionExtras)> {
    let request = v1::CreateDiskRequest::decode(bytes).ok()?;
    Some((request, DescriptionExtras::decode(bytes).ok()?))
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
        let resized = Some(Resized { to: 1 << 20, from: 2 << 20 });
        let extras = DescriptionExtras { device, resized };
        let none = DescriptionExtras::default();
        assert_eq!(decode(&encode(&request, &extras)), Some((request.clone(), extras.clone())));
        assert_eq!(decode(&request.encode_to_vec()), Some((request.clone(), none)));
        let earlier = v1::CreateDiskRequest::decode(encode(&request, &extras).as_slice());
        assert_eq!(earlier.unwrap(), request);
    }
}
