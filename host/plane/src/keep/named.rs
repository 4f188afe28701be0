//! The place where one named disk is kept: its description, and the content of a RAM disk.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use prost::Message;
use slipway_keeper::Shelf;
use slipway_plane_api::v1;
use slipway_ram::{Lasting, Snapshots};

use super::Lasts;
use crate::Error;

/// The slots of one disk: its memory, its content.
pub const SLOTS: u32 = 2;
/// The size in bytes of the memory for two copies of the description.
pub const DESCRIPTION_LEN: usize = 32 << 10;

/// The place where one named disk is kept.
pub struct DiskPlace {
    pub(super) number: u32,
    pub(super) shelf: Shelf,
    stored: Snapshots,
    /// The content that a predecessor left.
    content: Option<OwnedFd>,
    witness: Arc<OwnedFd>,
}

impl DiskPlace {
    /// Makes a place in `memory`, which is the part after the head.
    pub(super) fn new(
        number: u32,
        (shelf, memory): (Shelf, &Lasting),
        witness: Arc<OwnedFd>,
        content: Option<OwnedFd>,
    ) -> Option<Self> {
        Some(Self { number, shelf, stored: Snapshots::new(memory)?, content, witness })
    }

    /// Returns the description that a predecessor stored, or `None` if there is no valid one.
    pub(super) fn load(&self) -> Option<v1::CreateDiskRequest> {
        v1::CreateDiskRequest::decode(self.stored.load()?.as_slice()).ok()
    }

    /// Stores `request` as the disk's description.
    pub fn store(&self, request: &v1::CreateDiskRequest) -> Result<(), Error> {
        match self.stored.store(&request.encode_to_vec()) {
            true => Ok(()),
            false => Err(Error::Invalid("the disk's description is too long to be kept".into())),
        }
    }

    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the resources for opening the disk.
    pub fn lasts(&mut self) -> Lasts {
        Lasts { witness: self.witness.clone(), content: self.content.take() }
    }

    /// Leaves the content of a RAM disk on the shelf.
    pub fn put_content(&self, file: &OwnedFd) -> Result<(), Error> {
        let put = self.shelf.put(1, file.as_fd());
        put.map_err(|error| Error::Resources(error.to_string()))
    }
}
