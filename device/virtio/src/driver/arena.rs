//! Memory for DMA.

use slipway_ram::{Access, Memory, Span};

use super::DriverError;

/// Hands out cache-line-aligned pieces of a range that driver and device both reach, until the
/// arena is cleared.
pub struct Arena {
    memory: Memory,
    base: u64,
    next: u64,
    end: u64,
}

const LINE: u64 = 64;

impl Arena {
    /// Makes an arena of the `len` bytes of `memory` at page-aligned address `base`.
    pub fn new(memory: Memory, base: u64, len: u64) -> Self {
        Self { memory, base, next: base, end: base + len }
    }

    /// Returns the arena's memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Takes all pieces back.
    pub fn clear(&mut self) {
        self.next = self.base;
    }

    /// Returns the address of `len` zeroed bytes.
    ///
    /// # Errors
    /// [`DriverError::Memory`] when nothing is left.
    pub fn allocate(&mut self, len: usize) -> Result<u64, DriverError> {
        let size = (len as u64).next_multiple_of(LINE);
        if size > self.end - self.next {
            return Err(DriverError::Memory);
        }
        let at = self.next;
        self.next += size;
        self.memory.write(at, &vec![0; len])?;
        Ok(at)
    }

    /// Returns `len` zeroed bytes, pinned.
    ///
    /// # Errors
    /// The errors of [`Arena::allocate`]; [`DriverError::Memory`] also if the bytes lie in several
    /// regions.
    pub fn allocate_span(&mut self, len: usize) -> Result<Span, DriverError> {
        let at = self.allocate(len)?;
        let mut spans = Vec::new();
        self.memory.pin(at, len, Access::Write, &mut spans)?;
        match spans.pop() {
            Some(span) if spans.is_empty() => Ok(span),
            _ => Err(DriverError::Memory),
        }
    }
}
