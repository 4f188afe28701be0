//! A ring of the engine's own, between two executors of a chain.

use slipway_ram::Span;

use crate::{BrokenFifo, Sink, Source, Stretch};

/// A FIFO with both ends on one thread: one stage of a chain writes it and the next one reads it.
#[derive(Debug)]
pub struct Fifo {
    memory: Span,
    /// The number of bytes ever written.
    head: u64,
    /// The number of bytes ever read.
    tail: u64,
}

impl Fifo {
    /// Creates an empty ring of `size` bytes, a power of two, in memory of this process.
    ///
    /// # Panics
    /// If `size` is not a power of two: a programmer's error.
    pub fn new(size: usize) -> Self {
        assert!(size.is_power_of_two(), "a ring's size is a power of two");
        Self { memory: Span::heap(size), head: 0, tail: 0 }
    }

    /// Returns the number of bytes that can be read.
    pub fn length(&self) -> usize {
        self.head.wrapping_sub(self.tail) as usize
    }

    fn stretch(&self, position: u64, length: u64) -> Result<Stretch, BrokenFifo> {
        Stretch::new(position, length, self.memory.len() as u64).ok_or(BrokenFifo)
    }
}

impl Source for Fifo {
    fn memory(&self) -> &Span {
        &self.memory
    }

    fn readable(&mut self) -> Result<Stretch, BrokenFifo> {
        self.stretch(self.tail, self.head.wrapping_sub(self.tail))
    }

    fn consume(&mut self, bytes: usize) {
        debug_assert!(bytes <= self.length(), "no more than was there");
        self.tail = self.tail.wrapping_add(bytes as u64);
    }
}

impl Sink for Fifo {
    fn memory(&self) -> &Span {
        &self.memory
    }

    fn writable(&mut self) -> Result<Stretch, BrokenFifo> {
        let used = self.head.wrapping_sub(self.tail);
        self.stretch(self.head, (self.memory.len() as u64).checked_sub(used).ok_or(BrokenFifo)?)
    }

    fn produce(&mut self, bytes: usize) {
        self.head = self.head.wrapping_add(bytes as u64);
        debug_assert!(self.length() <= self.memory.len(), "no more than there was room for");
    }
}
