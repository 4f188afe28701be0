//! Registers by direct calls.

use slipway_pci::{Access, Function};

use super::{DriverError, RegisterAccess};

/// Polls without a register write until waiting fails: a command that never ends makes a test fail
/// instead of hang.
const PATIENCE: u32 = 50_000_000;

/// Reaches a function of this process, and polls it while the driver waits. Waiting is counted in
/// polls, not in time.
pub struct Direct<F> {
    /// The function.
    pub function: F,
    /// Polls left.
    patience: u32,
}

impl<F: Function> Direct<F> {
    /// Makes the access to the registers of `function`.
    pub fn new(function: F) -> Self {
        Self { function, patience: PATIENCE }
    }
}

fn done(access: Access, what: &str) -> Result<(), DriverError> {
    match access {
        Access::Done => Ok(()),
        other => Err(DriverError::Access(format!("{what}: {other:?}"))),
    }
}

impl<F: Function> RegisterAccess for Direct<F> {
    fn read32(&mut self, offset: u64) -> Result<u32, DriverError> {
        let mut bytes = [0; 4];
        done(self.function.read(0, offset, &mut bytes), "read")?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn write32(&mut self, offset: u64, value: u32) -> Result<(), DriverError> {
        self.patience = PATIENCE;
        done(self.function.write(0, offset, &value.to_le_bytes()), "write")
    }

    fn idle(&mut self) -> Result<(), DriverError> {
        self.patience = self
            .patience
            .checked_sub(1)
            .ok_or_else(|| DriverError::Access("the controller does not answer".into()))?;
        self.function.poll();
        Ok(())
    }
}
