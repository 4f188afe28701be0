//! Where one named disk is kept: what it is, and the content of a RAM disk.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use prost::Message;
use slipway_keeper::Shelf;
use slipway_plane_api::v1;
use slipway_ram::{Lasting, Snapshots};

use crate::Error;
use crate::disk::Lasts;

/// Slots of one disk: its memory, its content.
pub const SLOTS: u32 = 2;
/// Bytes for the description, twice.
pub const DESCRIPTION_LEN: usize = 32 << 10;

/// Where one named disk is kept.
pub struct DiskPlace {
    pub(super) number: u32,
    pub(super) shelf: Shelf,
    stored: Snapshots,
    /// What a predecessor left.
    content: Option<OwnedFd>,
    witness: Arc<OwnedFd>,
}

impl DiskPlace {
    /// In `memory`, what follows the head.
    pub(super) fn new(
        number: u32,
        (shelf, memory): (Shelf, &Lasting),
        witness: Arc<OwnedFd>,
        content: Option<OwnedFd>,
    ) -> Option<Self> {
        Some(Self { number, shelf, stored: Snapshots::new(memory)?, content, witness })
    }

    /// What a predecessor stored.
    pub(super) fn load(&self) -> Option<v1::CreateDiskRequest> {
        v1::CreateDiskRequest::decode(self.stored.load()?.as_slice()).ok()
    }

    /// From now on the disk is what `request` says.
    pub fn store(&self, request: &v1::CreateDiskRequest) -> Result<(), Error> {
        match self.stored.store(&request.encode_to_vec()) {
            true => Ok(()),
            false => Err(Error::Invalid("the disk's description is too long to be kept".into())),
        }
    }

    pub fn number(&self) -> u32 {
        self.number
    }

    /// How the disk is opened.
    pub fn lasts(&mut self) -> Lasts {
        Lasts { witness: self.witness.clone(), content: self.content.take() }
    }

    /// Leaves the content of a RAM disk on the shelf.
    pub fn put_content(&self, file: &OwnedFd) -> Result<(), Error> {
        let put = self.shelf.put(1, file.as_fd());
        put.map_err(|error| Error::Resources(error.to_string()))
    }
}
