//! Registers by direct calls.

use slipway_pci::{Access, Function};

use super::{DriverError, RegisterAccess};

/// Polls without a register write until waiting fails: what never ends fails a test, and does not hang
/// it.
const PATIENCE: u32 = 1_000_000;

/// Reaches a function of this process, and polls it, and whatever else has to, while the driver waits.
/// Waiting is counted in polls, not in time.
pub struct Direct<F> {
    /// The function.
    pub function: F,
    /// Has the switch, or whoever has the port, do something.
    pub others: Box<dyn FnMut()>,
    patience: u32,
}

impl<F: Function> Direct<F> {
    /// Registers of `function`.
    pub fn new(function: F, others: impl FnMut() + 'static) -> Self {
        Self { function, others: Box::new(others), patience: PATIENCE }
    }
}

fn done(access: Access, what: &str) -> Result<(), DriverError> {
    match access {
        Access::Done => Ok(()),
        other => Err(DriverError::Access(format!("{what}: {other:?}"))),
    }
}

impl<F: Function> RegisterAccess for Direct<F> {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), DriverError> {
        done(self.function.read(0, offset, into), "read")
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), DriverError> {
        self.patience = PATIENCE;
        done(self.function.write(0, offset, from), "write")?;
        self.function.poll();
        Ok(())
    }

    fn idle(&mut self) -> Result<(), DriverError> {
        self.patience = self
            .patience
            .checked_sub(1)
            .ok_or_else(|| DriverError::Access("the device does not answer".into()))?;
        (self.others)();
        self.function.poll();
        Ok(())
    }
}
