//! One request at a time, carried to virtiofsd's library.
//!
//! The library takes a message as a chain of descriptors in a guest's memory. Slipway hands it no
//! memory of a guest, which another CPU could change meanwhile, but a private piece of memory with
//! a queue of one chain in it: the request's bytes, which the device has copied, and room for the
//! reply. What it costs is a copy.

use vhost_user_backend::bitmap::BitmapMmapRegion;
use virtio_queue::{Queue, QueueT};
use virtiofsd::descriptor_utils::{Reader, Writer};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use slipway_virtio_fs::{LONGEST_REPLY, LONGEST_REQUEST};

use crate::names;

/// The places of the queue's parts and of the buffers.
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const REQUEST: u64 = 0x3000;
const REPLY: u64 = REQUEST + (LONGEST_REQUEST as u64).next_multiple_of(4096);
const BYTES: usize = REPLY as usize + LONGEST_REPLY;

/// Entries of the queue: a chain has two descriptors.
const ENTRIES: u16 = 2;
/// Flags of a descriptor: another follows; the device writes it.
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Bytes of a reply's header, and the offset of the request's number in a request's header.
const REPLY_HEADER: usize = 16;
const UNIQUE: usize = 8;

/// The private memory of one thread.
pub struct ScratchMemory {
    /// Memory of the type that the library insists on.
    memory: GuestMemoryMmap<BitmapMmapRegion>,
}

impl ScratchMemory {
    /// Makes a desk. Its memory, 2.1 MiB, is taken as it is used.
    ///
    /// # Errors
    /// There is no memory.
    pub fn new() -> Result<Self, String> {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), BYTES)]);
        Ok(Self { memory: memory.map_err(|error| format!("no memory for requests: {error}"))? })
    }

    /// Has `handle` answer `message`, and returns the reply, of `room` bytes at most. A message
    /// that `handle` cannot make out is answered with EIO, and one with a path in place of a name
    /// with EINVAL.
    pub fn answer(
        &self,
        message: &[u8],
        room: usize,
        handle: impl FnOnce(Reader<'_>, Writer<'_>) -> virtiofsd::Result<usize>,
    ) -> Vec<u8> {
        let room = room.min(LONGEST_REPLY);
        if !names::is_allowed(message) {
            return refusal(message, room, libc::EINVAL);
        }
        let replied = self.handle(message, room, handle);
        replied.unwrap_or_else(|| refusal(message, room, libc::EIO))
    }

    fn handle(
        &self,
        message: &[u8],
        room: usize,
        handle: impl FnOnce(Reader<'_>, Writer<'_>) -> virtiofsd::Result<usize>,
    ) -> Option<Vec<u8>> {
        let message = message.get(..LONGEST_REQUEST.min(message.len()))?;
        self.memory.write_slice(message, GuestAddress(REQUEST)).ok()?;
        let mut queue = self.queue(message.len() as u32, room as u32)?;
        let chain = queue.pop_descriptor_chain(&self.memory)?;
        let reader = Reader::new(&self.memory, chain.clone()).ok()?;
        let writer = Writer::new(&self.memory, chain).ok()?;
        let len = handle(reader, writer).ok()?;
        let mut reply = vec![0; len.min(room)];
        self.memory.read_slice(&mut reply, GuestAddress(REPLY)).ok()?;
        Some(reply)
    }

    /// Makes a queue in which one chain waits.
    fn queue(&self, len: u32, room: u32) -> Option<Queue> {
        let first = descriptor(REQUEST, len, if room > 0 { NEXT } else { 0 });
        let second = descriptor(REPLY, room, WRITE);
        // Flags, the index behind the last chain, and the first chain's head.
        let available: [u8; 6] = [0, 0, 1, 0, 0, 0];
        self.memory.write_slice(&[first, second].concat(), GuestAddress(DESCRIPTORS)).ok()?;
        self.memory.write_slice(&available, GuestAddress(AVAILABLE)).ok()?;
        self.memory.write_slice(&[0; 4], GuestAddress(USED)).ok()?;
        let mut queue = Queue::new(ENTRIES).ok()?;
        queue.try_set_desc_table_address(GuestAddress(DESCRIPTORS)).ok()?;
        queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).ok()?;
        queue.try_set_used_ring_address(GuestAddress(USED)).ok()?;
        queue.set_ready(true);
        Some(queue)
    }
}

fn descriptor(at: u64, len: u32, flags: u16) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&at.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&1_u16.to_le_bytes());
    bytes
}

/// Returns the reply that a request failed; nothing if there is no room for it.
fn refusal(message: &[u8], room: usize, errno: i32) -> Vec<u8> {
    let unique = message.get(UNIQUE..UNIQUE + 8);
    let Some(unique) = unique.filter(|_| room >= REPLY_HEADER) else { return Vec::new() };
    let mut reply = vec![0; REPLY_HEADER];
    reply[..4].copy_from_slice(&(REPLY_HEADER as u32).to_le_bytes());
    reply[4..8].copy_from_slice(&(-errno).to_le_bytes());
    reply[8..].copy_from_slice(unique);
    reply
}
