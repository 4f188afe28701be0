//! A function in this process.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use slipway_pci::{Access, Function, InterruptSink};

use super::slot::{Backend, Slot};

/// The way of a local function's interrupts to its slot, which is made after the function.
#[derive(Default)]
pub struct Sink(OnceLock<Weak<Slot>>);

impl Sink {
    /// Names the slot.
    pub fn connect(&self, slot: &Arc<Slot>) {
        let _ = self.0.set(Arc::downgrade(slot));
    }
}

impl InterruptSink for Sink {
    fn signal(&self, vector: u16) {
        if let Some(slot) = self.0.get().and_then(Weak::upgrade) {
            slot.signal(vector);
        }
    }
}

/// A function in this process, which the CPUs' threads and the thread that serves its backend
/// share.
pub struct Local<F>(Arc<Mutex<F>>);

impl<F: Function> Local<F> {
    /// Wraps a function.
    pub fn new(function: Arc<Mutex<F>>) -> Self {
        Self(function)
    }

    fn function(&self) -> MutexGuard<'_, F> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Polls until the function has nothing to do: what these functions may do in a poll, and how often
/// they are busy, is bounded by the size of the guest's rings.
pub fn poll_until_idle(function: &mut impl Function) {
    const MOST: usize = 1024;
    for _ in 0..MOST {
        if !function.poll().is_busy() {
            return;
        }
    }
}

impl<F: Function> Backend for Local<F> {
    fn config_read(&self, offset: u16, into: &mut [u8]) {
        self.function().config_read(offset, into);
    }

    fn config_write(&self, offset: u16, from: &[u8]) {
        let mut function = self.function();
        function.config_write(offset, from);
        poll_until_idle(&mut *function);
    }

    fn read(&self, bar: u8, offset: u64, into: &mut [u8]) {
        if self.function().read(bar, offset, into) == Access::Refused {
            into.fill(0xff);
        }
    }

    fn write(&self, bar: u8, offset: u64, from: &[u8]) {
        let mut function = self.function();
        let _ = function.write(bar, offset, from);
        poll_until_idle(&mut *function);
    }
}
