//! The other side of a function: a driver's access to registers, and the interrupts that it sees.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::{Access, Function, Interrupt, InterruptSink};

/// The reason why a register access failed, or why a driver waits no longer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("register access: {0}")]
pub struct AccessError(pub String);

/// A driver's access to BAR 0 of its function.
pub trait RegisterAccess {
    /// Reads registers at byte `offset`: 1, 2, 4 or 8 bytes.
    ///
    /// # Errors
    /// [`AccessError`].
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError>;

    /// Writes registers at byte `offset`.
    ///
    /// # Errors
    /// [`AccessError`].
    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError>;

    /// Writes without waiting for the end of the write, as for doorbells and notifications; by a
    /// store where these are mapped.
    ///
    /// # Errors
    /// [`AccessError`].
    fn post(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.write(offset, from)
    }

    /// Writes the registers at byte `offset` as [`RegisterAccess::post`], then reads the ones at
    /// `at`, as a PCI driver that flushes a posted write.
    ///
    /// # Errors
    /// [`AccessError`].
    fn post_and_read(
        &mut self,
        (offset, from): (u64, &[u8]),
        (at, into): (u64, &mut [u8]),
    ) -> Result<(), AccessError> {
        self.post(offset, from)?;
        self.read(at, into)
    }

    /// Lets the function work, or lets time pass. A driver calls it again and again while it waits.
    ///
    /// # Errors
    /// [`AccessError`] when it has taken too long.
    fn idle(&mut self) -> Result<(), AccessError>;

    /// Reads the 32-bit register at byte `offset`.
    ///
    /// # Errors
    /// [`AccessError`].
    fn read32(&mut self, offset: u64) -> Result<u32, AccessError> {
        let mut bytes = [0; 4];
        self.read(offset, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Writes the 32-bit register at byte `offset`.
    ///
    /// # Errors
    /// [`AccessError`].
    fn write32(&mut self, offset: u64, value: u32) -> Result<(), AccessError> {
        self.write(offset, &value.to_le_bytes())
    }
}

/// Polls without a register write until waiting fails: a wait that never ends makes a test fail
/// instead of hang.
const PATIENCE: u32 = 50_000_000;
/// The same where others work in each poll.
const PATIENCE_BESIDE: u32 = 1_000_000;

/// Reaches a function of this process, and polls it while the driver waits. Waiting is counted in
/// polls, not in time.
pub struct Direct<F> {
    /// The function.
    pub function: F,
    /// Lets the owner of the function's backend work.
    pub others: Option<Box<dyn FnMut()>>,
    /// Polls left.
    patience: u32,
}

impl<F: Function> Direct<F> {
    /// Makes the access to the registers of `function`, which is polled while the driver waits.
    pub fn new(function: F) -> Self {
        Self { function, others: None, patience: PATIENCE }
    }

    /// Makes the access to the registers of `function`, which is polled after each write as well.
    /// While the driver waits, `others` work, too.
    pub fn beside(function: F, others: impl FnMut() + 'static) -> Self {
        Self { function, others: Some(Box::new(others)), patience: PATIENCE_BESIDE }
    }
}

fn done(access: Access, what: &str) -> Result<(), AccessError> {
    match access {
        Access::Done => Ok(()),
        Access::Refused => Err(AccessError(format!("a {what} was refused"))),
    }
}

impl<F: Function> RegisterAccess for Direct<F> {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        done(self.function.read(0, offset, into), "read")
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.patience = if self.others.is_some() { PATIENCE_BESIDE } else { PATIENCE };
        done(self.function.write(0, offset, from), "write")?;
        if self.others.is_some() {
            self.function.poll();
        }
        Ok(())
    }

    fn idle(&mut self) -> Result<(), AccessError> {
        let left = self.patience.checked_sub(1);
        self.patience = left.ok_or_else(|| AccessError("the function does not answer".into()))?;
        if let Some(others) = &mut self.others {
            others();
        }
        self.function.poll();
        Ok(())
    }
}

/// Keeps interrupts in order of arrival, and the pin's level, for tests.
#[derive(Default)]
pub struct FifoSink {
    vectors: Mutex<Vec<u16>>,
    pin: AtomicBool,
}

impl FifoSink {
    /// Makes an empty sink.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Returns the handles of the first `count` vectors, for the parts of a function.
    pub fn interrupts(self: &Arc<Self>, count: u16) -> Vec<Interrupt> {
        (0..count).map(|vector| Interrupt::new(self.clone(), vector)).collect()
    }

    /// Takes all vectors signalled since the last call.
    pub fn take(&self) -> Vec<u16> {
        let mut vectors = self.vectors.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        std::mem::take(&mut *vectors)
    }

    /// Returns whether the pin is asserted.
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
