//! A driver's access to the registers of the function behind a socket.

use std::time::{Duration, Instant};

use slipway_pci::driver::{AccessError, RegisterAccess};

use crate::{Client, ClientError, IoFds, Window};

/// The registers of BAR 0, for a driver.
pub struct Registers {
    /// The connection.
    pub client: Client,
    /// The doorbells, if they are mapped, and their offset.
    doorbells: Option<(u64, Window)>,
    /// Registers that are written without messages.
    io_fds: IoFds,
    /// The longest wait of the driver without a write.
    patience: Duration,
    /// The time of the last write.
    since: Instant,
}

impl Registers {
    /// Makes the access over `client`. A driver that has waited for `patience` without a write
    /// fails.
    pub fn new(client: Client, patience: Duration) -> Self {
        Self { client, doorbells: None, io_fds: IoFds::default(), patience, since: Instant::now() }
    }

    /// Stores to the page of doorbells at `offset`, if the server lets clients map it.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn with_doorbells(mut self, offset: u64) -> Result<Self, ClientError> {
        let window = self.client.window(0, offset)?;
        self.doorbells = window.map(|window| (offset, window));
        Ok(self)
    }

    /// Writes registers without messages where the server says how. Such a write overtakes earlier
    /// ones that were posted.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn with_io_fds(mut self) -> Result<Self, ClientError> {
        let size = self.client.region(0)?.size;
        self.io_fds = self.client.io_fds(0, size)?;
        Ok(self)
    }

    /// Writes a register without a message, if the server has said how. Returns whether it was
    /// written.
    fn ring(&self, offset: u64, from: &[u8]) -> bool {
        let IoFds { notifications, bells } = &self.io_fds;
        if let Some(found) = notifications.iter().find(|found| found.offset == offset) {
            return found.datamatch.is_none() && found.event.raise();
        }
        let (bell, value) = (bells.iter().find(|bell| bell.offset == offset), from.try_into());
        let (Some(bell), Ok(value)) = (bell, value) else { return false };
        bell.ring(u32::from_le_bytes(value))
    }
}

fn failed(error: ClientError) -> AccessError {
    AccessError(error.to_string())
}

impl RegisterAccess for Registers {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        self.client.read(0, offset, into).map_err(failed)
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.since = Instant::now();
        self.client.put(0, offset, from).map_err(failed)
    }

    fn post(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.since = Instant::now();
        if let (Some((first, window)), Ok(value)) = (&self.doorbells, from.try_into())
            && offset >= *first
        {
            window.store_u32(offset, u32::from_le_bytes(value));
            return Ok(());
        }
        if self.ring(offset, from) {
            return Ok(());
        }
        self.client.post(0, offset, from).map_err(failed)
    }

    fn post_and_read(
        &mut self,
        write: (u64, &[u8]),
        read: (u64, &mut [u8]),
    ) -> Result<(), AccessError> {
        self.since = Instant::now();
        self.client.post_and_read(0, write, read).map_err(failed)
    }

    fn idle(&mut self) -> Result<(), AccessError> {
        if self.since.elapsed() > self.patience {
            return Err(AccessError("the function does not answer".into()));
        }
        std::thread::yield_now();
        Ok(())
    }
}
