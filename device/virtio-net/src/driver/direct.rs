//! Registers by direct calls.

use slipway_pci::{Access, Function};

use super::{DriverError, RegisterAccess};

/// Polls without a register write until waiting fails: a wait that never ends makes a test fail
/// instead of hang.
const PATIENCE: u32 = 1_000_000;

/// Reaches a function of this process. While the driver waits, polls the function and the others
/// that have to work. Waiting is counted in polls, not in time.
pub struct Direct<F> {
    /// The function.
    pub function: F,
    /// Lets the switch, or another owner of the port, work.
    pub others: Box<dyn FnMut()>,
    patience: u32,
}

impl<F: Function> Direct<F> {
    /// Makes the access to the registers of `function`.
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
