//! Interrupts: a handle per vector, and one for the pin. Both lead to a sink of the host.

use std::sync::Arc;

/// The destination of interrupts: eventfds of a VMM, a table in our own VMM, a queue in a test.
pub trait InterruptSink: Send + Sync {
    /// Delivers one interrupt of MSI-X vector `vector`. Must not block. An interrupt of a vector
    /// without a listener is dropped.
    fn signal(&self, vector: u16);

    /// Asserts or deasserts the function's interrupt pin. The pin is a level: it stays asserted
    /// until the function deasserts it. Must not block. A host without pin interrupts keeps this
    /// default, which does nothing.
    #[cfg(any(test, feature = "plane"))]
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
    /// Makes the handle of vector `vector` of `sink`.
    pub fn new(sink: Arc<dyn InterruptSink>, vector: u16) -> Self {
        Self { sink, vector }
    }

    /// Interrupts the guest.
    pub fn signal(&self) {
        self.sink.signal(self.vector);
    }

    /// Returns the interrupt pin of the same function, deasserted.
    #[cfg(any(test, feature = "plane"))]
    pub fn pin(&self) -> Pin {
        Pin { sink: self.sink.clone(), asserted: false }
    }
}

/// A function's interrupt pin, INTA# (PCI Local Bus 3.0, 2.2.6): a level. Its one owner is the
/// function, which asserts it as long as
/// [`ConfigSpace::pin_enabled`](crate::ConfigSpace::pin_enabled) and its own interrupt status are
/// both true.
#[cfg(any(test, feature = "plane"))]
pub struct Pin {
    sink: Arc<dyn InterruptSink>,
    asserted: bool,
}

#[cfg(any(test, feature = "plane"))]
impl Pin {
    /// Asserts or deasserts the pin; the host is told only of changes.
    pub fn set(&mut self, asserted: bool) {
        if asserted != self.asserted {
            self.asserted = asserted;
            self.sink.set_pin(asserted);
        }
    }

    /// Returns whether the pin is asserted.
    pub fn is_asserted(&self) -> bool {
        self.asserted
    }
}
