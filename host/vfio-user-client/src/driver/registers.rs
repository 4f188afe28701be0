//! A driver's access to the registers of the function behind a socket.

use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slipway_pci::driver::{AccessError, RegisterAccess};

use crate::{Client, ClientError, IoFds, RegisterWindow, RemoteFunction};

/// The pauses between a driver's looks at its function.
struct Pauses {
    /// The first pause after a write. Each further one is twice the last.
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Pauses {
    /// Returns the next pause.
    fn take(&mut self) -> Duration {
        let pause = self.next;
        self.next = pause.saturating_mul(2).min(self.longest);
        pause
    }
}

/// A driver's wait for its function. Each write begins it anew.
struct Wait {
    longest: Duration,
    since: Instant,
    /// Without pauses, the driver yields the processor between two looks.
    pauses: Option<Pauses>,
}

impl Wait {
    fn new(longest: Duration) -> Self {
        Self { longest, since: Instant::now(), pauses: None }
    }

    fn restart(&mut self) {
        self.since = Instant::now();
        if let Some(pauses) = &mut self.pauses {
            pauses.next = pauses.first;
        }
    }

    fn go_on(&mut self) -> Result<(), AccessError> {
        if self.since.elapsed() > self.longest {
            return Err(AccessError("the function does not answer".into()));
        }
        match &mut self.pauses {
            Some(pauses) => std::thread::sleep(pauses.take()),
            None => std::thread::yield_now(),
        }
        Ok(())
    }
}

fn failed(error: impl Display) -> AccessError {
    AccessError(error.to_string())
}

/// The registers of BAR 0, for a driver.
pub struct Registers {
    /// The connection.
    pub client: Client,
    /// The doorbells, if they are mapped, and their offset.
    doorbells: Option<(u64, RegisterWindow)>,
    /// Registers that are written without messages.
    io_fds: IoFds,
    wait: Wait,
}

impl Registers {
    /// Makes the access over `client`. A driver that has waited for `patience` without a write
    /// fails.
    pub fn new(client: Client, patience: Duration) -> Self {
        let (io_fds, wait) = (IoFds::default(), Wait::new(patience));
        Self { client, doorbells: None, io_fds, wait }
    }

    /// Sleeps between two looks of a driver that waits: for `first` after a write, then for twice
    /// the last pause each time, at most for `longest`. Hundreds of drivers that yield instead
    /// leave their functions no processor.
    #[must_use]
    pub fn with_pauses(mut self, first: Duration, longest: Duration) -> Self {
        self.wait.pauses = Some(Pauses { first, longest, next: first });
        self
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

impl RegisterAccess for Registers {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        self.client.read(0, offset, into).map_err(failed)
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.wait.restart();
        self.client.put(0, offset, from).map_err(failed)
    }

    fn post(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.wait.restart();
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
        self.wait.restart();
        self.client.post_and_read(0, write, read).map_err(failed)
    }

    fn idle(&mut self) -> Result<(), AccessError> {
        self.wait.go_on()
    }
}

/// The registers of BAR 0 of a function that other threads use as well, for a driver.
pub struct SharedRegisters {
    /// The function.
    pub function: Arc<RemoteFunction>,
    wait: Wait,
}

impl SharedRegisters {
    /// Makes the access to `function`. A driver that has waited for `patience` without a write
    /// fails.
    pub fn new(function: Arc<RemoteFunction>, patience: Duration) -> Self {
        Self { function, wait: Wait::new(patience) }
    }
}

impl RegisterAccess for SharedRegisters {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        self.function.read(0, offset, into).map_err(failed)
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.wait.restart();
        self.function.write(0, offset, from).map_err(failed)
    }

    fn post(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.wait.restart();
        self.function.post(0, offset, from).map_err(failed)
    }

    fn idle(&mut self) -> Result<(), AccessError> {
        self.wait.go_on()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_begin_anew_with_a_write() {
        let [first, longest] = [1, 5].map(Duration::from_micros);
        let pauses = Some(Pauses { first, longest, next: first });
        let mut wait = Wait { pauses, ..Wait::new(Duration::from_secs(60)) };
        for _ in 0..2 {
            let pauses = wait.pauses.as_mut().unwrap();
            let taken: Vec<_> = (0..5).map(|_| pauses.take().as_micros()).collect();
            assert_eq!(taken, [1, 2, 4, 5, 5]);
            wait.restart();
        }
    }
}
