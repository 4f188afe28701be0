//! The buffers of one descriptor chain, and the errors of queues.

use slipway_ram::{Fault, Memory};
use slipway_virtio_spec::queue::{Descriptor, flag};

/// The reason why a queue cannot go on: the device needs a reset (section 2.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// A ring, or a table of descriptors, is not at its address.
    Memory,
    /// There are more buffers than the queue has room for, or a descriptor that does not exist.
    Index,
    /// A chain is too long, goes in a circle, or has a table within a table.
    Chain,
}

impl From<Fault> for Broken {
    fn from(_: Fault) -> Self {
        Self::Memory
    }
}

/// A piece of memory that the driver named: address, bytes.
pub type Range = (u64, u32);

/// The buffers of one chain. The vectors are reused, so that nothing is allocated in the steady
/// state.
#[derive(Default)]
pub struct Chain {
    /// The buffers that the device reads.
    pub readable: Vec<Range>,
    /// The buffers that the device writes.
    pub writable: Vec<Range>,
    /// The table of an indirect descriptor.
    pub(crate) table: Vec<u8>,
}

impl Chain {
    /// Returns the bytes of all buffers that the device reads.
    pub fn readable_len(&self) -> u64 {
        self.readable.iter().map(|(_, len)| u64::from(*len)).sum()
    }

    /// Returns the bytes of all buffers that the device writes.
    pub fn writable_len(&self) -> u64 {
        self.writable.iter().map(|(_, len)| u64::from(*len)).sum()
    }

    /// Copies `from` into the buffers that the device writes, as far as there is room. Returns the
    /// bytes copied.
    ///
    /// # Errors
    /// [`Broken::Memory`].
    pub fn scatter(&self, memory: &Memory, from: &[u8]) -> Result<usize, Broken> {
        let mut done = 0;
        for &(at, len) in &self.writable {
            let part = (len as usize).min(from.len() - done);
            if part > 0 {
                reachable(memory, at, part)?;
                memory.write(at, &from[done..done + part])?;
                done += part;
            }
        }
        Ok(done)
    }

    /// Copies the first bytes of the buffers that the device reads, as far as `into` has room.
    /// Returns the bytes copied.
    ///
    /// # Errors
    /// [`Broken::Memory`].
    pub fn gather(&self, memory: &Memory, into: &mut [u8]) -> Result<usize, Broken> {
        let mut done = 0;
        for &(at, len) in &self.readable {
            let part = (len as usize).min(into.len() - done);
            if part > 0 {
                reachable(memory, at, part)?;
                memory.read(at, &mut into[done..done + part])?;
                done += part;
            }
        }
        Ok(done)
    }

    #[inline]
    pub(crate) fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
    }

    #[inline]
    pub(crate) fn push(&mut self, descriptor: &Descriptor) {
        let range = (descriptor.address.get(), descriptor.len.get());
        match descriptor.flags.get() & flag::WRITE {
            0 => self.readable.push(range),
            _ => self.writable.push(range),
        }
    }
}

/// Refuses memory that is reached by messages: a thread that waits for these could be stalled by a
/// client.
///
/// # Errors
/// [`Broken::Memory`].
pub fn reachable(memory: &Memory, at: u64, len: usize) -> Result<(), Broken> {
    if memory.is_remote(at, len) { Err(Broken::Memory) } else { Ok(()) }
}
