//! Memory of a client that the server accesses by messages, since it has no file to map.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use slipway_vfio_user_spec::{Command, DmaAccess, DmaMap};
use slipway_vfio_user_wire::Message;
use zerocopy::{FromBytes, IntoBytes};

use crate::{Client, ClientError};

/// Message-only memory, by its address.
#[derive(Default)]
pub(crate) struct MessageMemory(BTreeMap<u64, Vec<u8>>);

impl MessageMemory {
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

impl Client {
    /// Permits the device to access `content` under the address `iova`, by messages.
    pub fn map_remote(
        &mut self,
        iova: u64,
        content: Vec<u8>,
        writable: bool,
    ) -> Result<(), ClientError> {
        let request = DmaMap::new(iova, content.len() as u64, 0, writable);
        self.memory.0.insert(iova, content);
        let outcome = self.call(Command::DmaMap, request.as_bytes(), &[]).map(drop);
        if outcome.is_err() {
            self.memory.0.remove(&iova);
        }
        outcome
    }

    /// Removes message-only memory, and returns its content. When this returns, the device does not
    /// access the memory any more.
    pub fn unmap_remote(&mut self, iova: u64, len: u64) -> Result<Option<Vec<u8>>, ClientError> {
        self.unmap(iova, len)?;
        Ok(self.memory.0.remove(&iova))
    }

    /// Returns the content of the message-only memory at `iova`.
    pub fn remote(&self, iova: u64) -> Option<&[u8]> {
        self.memory.0.get(&iova).map(Vec::as_slice)
    }

    /// Serves the server's accesses to message-only memory until `time` has passed.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn serve(&mut self, time: Duration) -> Result<(), ClientError> {
        match self.next_message(Instant::now() + time, &[]) {
            Err(ClientError::Timeout) => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(ClientError::Malformed("a reply to nothing")),
        }
    }

    /// Answers an access of the server to message-only memory.
    pub(crate) fn access_memory(&mut self, message: &Message) -> Result<Vec<u8>, Errno> {
        match Command::from_code(message.header.command.get()) {
            Some(Command::DmaRead) => self.memory.dma_read(&message.payload),
            Some(Command::DmaWrite) => self.memory.dma_write(&message.payload),
            _ => Err(Errno::NOTSUP),
        }
    }
}
