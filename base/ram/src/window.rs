//! A ring of guest memory, kept pinned.

use crate::{Access, Fault, Memory, Span};

/// The memory of a queue. Its addresses are looked up once and again when the client's map has
/// changed, not with every entry.
pub struct Window {
    base: u64,
    len: usize,
    access: Access,
    /// The map's version at the last lookup.
    version: u64,
    place: Place,
}

enum Place {
    Unknown,
    /// All of it in one piece.
    Pinned(Span),
    /// Not mapped, in several regions, or message-only: every access looks for itself.
    Elsewhere,
}

impl Window {
    /// The `len` bytes at `base`, of which nothing is looked up yet. `access` is the one that the
    /// region must allow for the memory to be pinned; others are checked as they are made.
    pub fn new(base: u64, len: usize, access: Access) -> Self {
        Self { base, len, access, version: 0, place: Place::Unknown }
    }

    /// Fills `into` from `offset` on.
    ///
    /// # Errors
    /// [`Fault`].
    ///
    /// # Panics
    /// When the range leaves the window, here and below: a programmer's error.
    pub fn read(&mut self, memory: &Memory, offset: usize, into: &mut [u8]) -> Result<(), Fault> {
        match self.span(memory) {
            Some(span) => span.read(offset, into),
            None => memory.read(self.base.wrapping_add(offset as u64), into),
        }
    }

    /// Has the processor fetch what lies at `offset`, where the memory is pinned already.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        if let Place::Pinned(span) = &self.place {
            span.prefetch(offset);
        }
    }

    /// Stores an entry of 16 bytes, little-endian, so that whoever sees its last four sees all of
    /// it.
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

    /// Lets go of the memory until it is used again.
    pub fn release(&mut self) {
        self.place = Place::Unknown;
    }

    /// All of it in one piece, for whoever makes many accesses in a row. None: it is not mapped, in
    /// several regions, message-only, or does not allow the access.
    #[inline]
    pub fn span(&mut self, memory: &Memory) -> Option<&Span> {
        let version = memory.version();
        if version != self.version || matches!(self.place, Place::Unknown) {
            self.version = version;
            self.place = self.look_up(memory);
        }
        match &self.place {
            Place::Pinned(span) => Some(span),
            _ => None,
        }
    }

    #[cold]
    fn look_up(&self, memory: &Memory) -> Place {
        let mut spans = Vec::new();
        let pinned = memory.pin(self.base, self.len, self.access, &mut spans);
        match spans.pop() {
            Some(span) if pinned.is_ok() && spans.is_empty() => Place::Pinned(span),
            _ => Place::Elsewhere,
        }
    }
}
