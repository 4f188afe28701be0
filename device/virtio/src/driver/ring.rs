//! The driver's side of a split virtqueue (section 2.7.13), pinned: no lookup, lock or allocation
//! per buffer.

use std::sync::atomic::{Ordering, fence};

use slipway_ram::{Fault, Span};
use slipway_virtio_spec::queue::{
    DESCRIPTOR, Descriptor, UsedElement, available, descriptor_area, flag, passes, used,
};
use zerocopy::IntoBytes;

use super::{Arena, DriverError};

/// A piece of memory for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// The piece's address.
    pub at: u64,
    /// The piece's length in bytes.
    pub len: u32,
    /// `true` if the device writes the piece.
    pub writable: bool,
}

impl Buffer {
    /// Returns a piece that the device reads.
    pub const fn readable(at: u64, len: u32) -> Self {
        Self { at, len, writable: false }
    }

    /// Returns a piece that the device writes.
    pub const fn writable(at: u64, len: u32) -> Self {
        Self { at, len, writable: true }
    }
}

/// A chain that the device has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The result of [`Ring::push`] for the chain, as the device says it: not to be trusted as an
    /// index.
    pub id: u16,
    /// Bytes that the device wrote.
    pub len: u32,
}

/// The driver's side of one queue.
pub struct Ring {
    entries: u16,
    event_index: bool,
    descriptors: Span,
    available: Span,
    used: Span,
    /// The addresses of the descriptor table, the available ring and the used ring.
    pub places: [u64; 3],
    /// Free descriptors; the last one is taken first.
    free: Vec<u16>,
    /// The descriptors of each chain, by the chain's first descriptor.
    chains: Vec<Vec<u16>>,
    /// The available index behind all chains that were pushed.
    next: u16,
    /// The available index that the device sees.
    published: u16,
    /// The used index behind all chains that were popped.
    seen: u16,
    /// The used index as loaded last: elements before it can be popped.
    limit: u16,
}

impl Ring {
    /// Makes an empty queue of `entries` entries.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(arena: &mut Arena, entries: u16, event_index: bool) -> Result<Self, DriverError> {
        let descriptors = arena.allocate_span(descriptor_area(entries))?;
        let available = arena.allocate_span(available::area(entries))?;
        let used = arena.allocate_span(used::area(entries))?;
        let places = [descriptors.iova(), available.iova(), used.iova()];
        if !event_index {
            available.store_u16(available::FLAGS, available::NO_INTERRUPT)?;
        }
        Ok(Self {
            entries,
            event_index,
            descriptors,
            available,
            used,
            places,
            free: (0..entries).rev().collect(),
            chains: vec![Vec::new(); usize::from(entries)],
            next: 0,
            published: 0,
            seen: 0,
            limit: 0,
        })
    }

    /// Returns the number of free descriptors.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of entries of the queue.
    pub fn entries(&self) -> u16 {
        self.entries
    }

    /// Makes a chain of `buffers` available, and returns its ID. [`Ring::publish`] makes it visible
    /// to the device.
    ///
    /// # Errors
    /// [`DriverError::Memory`] if `buffers` is empty or there are too few free descriptors;
    /// [`DriverError::Fault`] if the queue's memory is gone.
    #[inline]
    pub fn push(&mut self, buffers: &[Buffer]) -> Result<u16, DriverError> {
        if buffers.is_empty() || buffers.len() > self.free.len() {
            return Err(DriverError::Memory);
        }
        let base = self.free.len() - buffers.len();
        let head = self.free[self.free.len() - 1];
        let chain = &mut self.chains[usize::from(head)];
        chain.clear();
        chain.extend(self.free.drain(base..).rev());
        for (at, buffer) in buffers.iter().enumerate() {
            let next = chain.get(at + 1);
            let mut flags = if buffer.writable { flag::WRITE } else { 0 };
            flags |= if next.is_some() { flag::NEXT } else { 0 };
            let descriptor = Descriptor {
                address: buffer.at.into(),
                len: buffer.len.into(),
                flags: flags.into(),
                next: next.copied().unwrap_or(0).into(),
            };
            let place = DESCRIPTOR * usize::from(chain[at]);
            self.descriptors.write(place, descriptor.as_bytes())?;
        }
        self.push_head(head)?;
        Ok(head)
    }

    /// Makes an indirect chain available, and returns its ID. The caller has written the chain's
    /// table of `len` bytes to address `at`.
    ///
    /// # Errors
    /// The errors of [`Ring::push`].
    pub fn push_indirect(&mut self, at: u64, len: u32) -> Result<u16, DriverError> {
        let head = self.push(&[Buffer::readable(at, len)])?;
        let flags = usize::from(head) * DESCRIPTOR + std::mem::offset_of!(Descriptor, flags);
        self.descriptors.store_u16(flags, flag::INDIRECT)?;
        Ok(head)
    }

    /// Makes the chain that begins at descriptor `head` available, without a check: callers may
    /// have written other descriptors than [`Ring::push`] does, invalid ones too.
    ///
    /// # Errors
    /// The memory is gone.
    #[inline]
    pub fn push_head(&mut self, head: u16) -> Result<(), Fault> {
        self.available.store_u16(available::entry(self.next, self.entries), head)?;
        self.next = self.next.wrapping_add(1);
        Ok(())
    }

    /// Makes the pushed chains visible to the device. Returns whether the device wants to be
    /// notified (section 2.7.10.1).
    ///
    /// # Errors
    /// The memory is gone.
    #[inline]
    pub fn publish(&mut self) -> Result<bool, Fault> {
        let (old, new) = (self.published, self.next);
        if old == new {
            return Ok(false);
        }
        self.available.store_u16(available::INDEX, new)?;
        self.published = new;
        fence(Ordering::SeqCst);
        if self.event_index {
            let event = self.used.load_u16(used::avail_event(self.entries))?;
            return Ok(passes(event, old, new));
        }
        Ok(self.used.load_u16(used::FLAGS)? & used::NO_NOTIFY == 0)
    }

    /// Takes the next chain that the device has used, and frees its descriptors. Returns `None` if
    /// the device has used no further chain.
    ///
    /// # Errors
    /// The memory is gone.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Used>, Fault> {
        if self.seen == self.limit {
            self.limit = self.used.load_u16(used::INDEX)?;
            if self.seen == self.limit {
                return Ok(None);
            }
        }
        let mut element = UsedElement::default();
        self.used.read(used::entry(self.seen, self.entries), element.as_mut_bytes())?;
        self.seen = self.seen.wrapping_add(1);
        let id = element.id.get() as u16;
        if let Some(chain) = self.chains.get_mut(usize::from(id)) {
            self.free.extend(chain.drain(..).rev());
        }
        Ok(Some(Used { id, len: element.len.get() }))
    }

    /// Asks for an interrupt when the next chain is used. Returns whether one has been used
    /// already.
    ///
    /// # Errors
    /// The memory is gone.
    pub fn want_interrupt(&mut self) -> Result<bool, Fault> {
        match self.event_index {
            true => self.available.store_u16(available::used_event(self.entries), self.seen)?,
            false => self.available.store_u16(available::FLAGS, 0)?,
        }
        fence(Ordering::SeqCst);
        Ok(self.used.load_u16(used::INDEX)? != self.seen)
    }

    /// Returns the three areas (descriptors, available ring, used ring), for hostile callers.
    pub fn areas(&self) -> [&Span; 3] {
        [&self.descriptors, &self.available, &self.used]
    }
}
