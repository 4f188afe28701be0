//! A queue's ring in guest memory, kept pinned between accesses.

use crate::{Access, Fault, Memory, Span};

/// The guest memory of a queue. Its addresses are looked up at the first access and again after a
/// change of the client's map, not with every entry.
pub struct Window {
    base: u64,
    len: usize,
    access: Access,
    /// Version of the map at the last lookup.
    version: u64,
    place: WindowMapping,
}

enum WindowMapping {
    Unknown,
    /// The whole window is one span.
    Pinned(Span),
    /// The window is not mapped, in several regions, message-only, or does not allow the access:
    /// each access is looked up on its own.
    Elsewhere,
}

impl Window {
    /// Returns a window of `len` bytes at `base` without looking it up. The memory is pinned if its
    /// region allows `access`; otherwise permissions are checked at each access.
    pub fn new(base: u64, len: usize, access: Access) -> Self {
        Self { base, len, access, version: 0, place: WindowMapping::Unknown }
    }

    /// Copies from `offset` of the window into `into`.
    ///
    /// # Errors
    /// [`Fault`].
    ///
    /// # Panics
    /// If the range leaves the pinned window: a programmer's error.
    pub fn read(&mut self, memory: &Memory, offset: usize, into: &mut [u8]) -> Result<(), Fault> {
        match self.span(memory) {
            Some(span) => span.read(offset, into),
            None => memory.read(self.base.wrapping_add(offset as u64), into),
        }
    }

    /// Prefetches the cache line at `offset` if the memory is pinned already.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        if let WindowMapping::Pinned(span) = &self.place {
            span.prefetch(offset);
        }
    }

    /// Stores an entry of 16 bytes, little-endian, so that a reader that sees its last four bytes
    /// sees all of it.
    ///
    /// # Errors
    /// [`Fault`].
    ///
    /// # Panics
    /// As for [`Window::read`].
    #[inline]
    pub fn publish(&mut self, memory: &Memory, offset: usize, entry: u128) -> Result<(), Fault> {
        match self.span(memory) {
            Some(span) => span.publish(offset, entry),
            None => memory.publish(self.base.wrapping_add(offset as u64), entry),
        }
    }

    /// Unpins the memory until the next access.
    pub fn release(&mut self) {
        self.place = WindowMapping::Unknown;
    }

    /// Returns the whole window as one span, for many accesses in a row. Returns `None` if the
    /// window is not mapped, in several regions, message-only, or does not allow the access.
    #[inline]
    pub fn span(&mut self, memory: &Memory) -> Option<&Span> {
        let version = memory.version();
        if version != self.version || matches!(self.place, WindowMapping::Unknown) {
            self.version = version;
            self.place = self.look_up(memory);
        }
        match &self.place {
            WindowMapping::Pinned(span) => Some(span),
            _ => None,
        }
    }

    #[cold]
    fn look_up(&self, memory: &Memory) -> WindowMapping {
        let mut spans = Vec::new();
        let pinned = memory.pin(self.base, self.len, self.access, &mut spans);
        match spans.pop() {
            Some(span) if pinned.is_ok() && spans.is_empty() => WindowMapping::Pinned(span),
            _ => WindowMapping::Elsewhere,
        }
    }
}
