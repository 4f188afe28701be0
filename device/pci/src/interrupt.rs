//! Interrupts: a handle per vector in front of a sink of the host's.

use std::sync::{Arc, Mutex};

/// Where interrupts go: eventfds of a VMM, a table in our own VMM, a queue in a test.
pub trait InterruptSink: Send + Sync {
    /// Delivers one interrupt of MSI-X vector `vector`. Must not block. A vector that nobody
    /// listens to is dropped.
    fn signal(&self, vector: u16);
}

/// One vector of a function. Cheap to clone.
#[derive(Clone)]
pub struct Interrupt {
    sink: Arc<dyn InterruptSink>,
    vector: u16,
}

impl Interrupt {
    /// The vector `vector` of `sink`.
    pub fn new(sink: Arc<dyn InterruptSink>, vector: u16) -> Self {
        Self { sink, vector }
    }

    /// The MSI-X vector number.
    pub fn vector(&self) -> u16 {
        self.vector
    }

    /// Interrupts the guest.
    pub fn signal(&self) {
        self.sink.signal(self.vector);
    }
}

/// Keeps interrupts in order of arrival, for tests.
#[derive(Default)]
pub struct FifoSink(Mutex<Vec<u16>>);

impl FifoSink {
    /// An empty sink.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Takes all vectors signalled since the last call.
    pub fn take(&self) -> Vec<u16> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }
}

impl InterruptSink for FifoSink {
    fn signal(&self, vector: u16) {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(vector);
    }
}
