//! Interrupts: a handle per vector, and one for the pin, in front of a sink of the host's.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Where interrupts go: eventfds of a VMM, a table in our own VMM, a queue in a test.
pub trait InterruptSink: Send + Sync {
    /// Delivers one interrupt of MSI-X vector `vector`. Must not block. A vector that nobody
    /// listens to is dropped.
    fn signal(&self, vector: u16);

    /// Asserts or deasserts the function's interrupt pin, a level: it stays asserted until the
    /// function has it otherwise. Must not block. A host without pin interrupts leaves it at this.
    fn set_pin(&self, asserted: bool) {
        let _ = asserted;
    }
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

    /// The interrupt pin of the same function, deasserted.
    pub fn pin(&self) -> Pin {
        Pin { sink: self.sink.clone(), asserted: false }
    }
}

/// A function's interrupt pin, INTA# (PCI Local Bus 3.0, 2.2.6): a level. Its one owner is the
/// function, which asserts it as long as [`ConfigSpace::pin_enabled`](crate::ConfigSpace::pin_enabled)
/// and its own status say so.
pub struct Pin {
    sink: Arc<dyn InterruptSink>,
    asserted: bool,
}

impl Pin {
    /// Asserts or deasserts it; the host hears of changes.
    pub fn set(&mut self, asserted: bool) {
        if asserted != self.asserted {
            self.asserted = asserted;
            self.sink.set_pin(asserted);
        }
    }

    /// Whether it is asserted.
    pub fn is_asserted(&self) -> bool {
        self.asserted
    }
}

/// Keeps interrupts in order of arrival, and the pin's level, for tests.
#[derive(Default)]
pub struct FifoSink {
    vectors: Mutex<Vec<u16>>,
    pin: AtomicBool,
}

impl FifoSink {
    /// An empty sink.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Takes all vectors signalled since the last call.
    pub fn take(&self) -> Vec<u16> {
        let mut vectors = self.vectors.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        std::mem::take(&mut *vectors)
    }

    /// Whether the pin is asserted.
    pub fn pin(&self) -> bool {
        self.pin.load(Ordering::SeqCst)
    }
}

impl InterruptSink for FifoSink {
    fn signal(&self, vector: u16) {
        self.vectors.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(vector);
    }

    fn set_pin(&self, asserted: bool) {
        self.pin.store(asserted, Ordering::SeqCst);
    }
}
