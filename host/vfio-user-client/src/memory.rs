//! Memory of a client that the server accesses by messages, since it has no file to map. Programs
//! with a VMM have none.

use std::collections::BTreeMap;

use rustix::io::Errno;
use slipway_vfio_user_spec::{Command, DmaAccess};
use slipway_vfio_user_wire::Message;
use zerocopy::{FromBytes, IntoBytes};

/// Message-only memory, by its address.
#[derive(Default)]
pub(crate) struct MessageMemory(pub BTreeMap<u64, Vec<u8>>);

impl MessageMemory {
    /// Answers an access of the server.
    pub fn access(&mut self, message: &Message) -> Result<Vec<u8>, Errno> {
        match Command::from_code(message.header.command.get()) {
            Some(Command::DmaRead) => self.dma_read(&message.payload),
            Some(Command::DmaWrite) => self.dma_write(&message.payload),
            _ => Err(Errno::NOTSUP),
        }
    }

    fn dma_read(&mut self, payload: &[u8]) -> Result<Vec<u8>, Errno> {
        let request = DmaAccess::read_from_bytes(payload).map_err(|_| Errno::INVAL)?;
        let place = self.place(&request)?;
        Ok([request.as_bytes(), place].concat())
    }

    fn dma_write(&mut self, payload: &[u8]) -> Result<Vec<u8>, Errno> {
        let (request, data) = DmaAccess::read_from_prefix(payload).map_err(|_| Errno::INVAL)?;
        let place = self.place(&request)?;
        if place.len() != data.len() {
            return Err(Errno::INVAL);
        }
        place.copy_from_slice(data);
        Ok(request.as_bytes().to_vec())
    }

    /// Returns the bytes that an access refers to.
    fn place(&mut self, request: &DmaAccess) -> Result<&mut [u8], Errno> {
        let (iova, count) = (request.address.get(), request.count.get());
        let (start, content) = self.0.range_mut(..=iova).next_back().ok_or(Errno::FAULT)?;
        let offset = usize::try_from(iova - start).map_err(|_| Errno::FAULT)?;
        let end = usize::try_from(count).ok().and_then(|count| offset.checked_add(count));
        content.get_mut(offset..end.ok_or(Errno::FAULT)?).ok_or(Errno::FAULT)
    }
}
