//! The saved state of a function behind a socket: the machine's part of it, and the server's.

use std::fmt::Display;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use super::{Attached, FunctionError, SocketFunction};
use crate::part::Part;
use crate::state::RemoteState;
use crate::{Error, Machine, Result};

/// The most bytes of a function's own state that a machine's state has room for: 1 MiB.
pub const MAX_STATE: usize = 1 << 20;

impl Attached {
    /// Stops the function, and returns the state for a successor. The function stays stopped until
    /// [`Attached::start`], unless its server refuses to stop it. The guest is stopped. Waits for
    /// the server, so call it on a thread of its own.
    ///
    /// # Errors
    /// [`Error::Function`]; `index` is the function's number in it.
    pub fn save(&self, index: usize) -> Result<RemoteState> {
        let stopped = self.remote.function.stop();
        stopped.map_err(failed(index, "it cannot be stopped"))?;
        self.stopped.store(true, Ordering::Relaxed);
        let function = self.remote.function.save();
        let function = function.map_err(failed(index, "its state"))?;
        if function.len() > MAX_STATE {
            let len = function.len();
            let reason = format!("its state has {len} bytes, of {MAX_STATE} at most");
            return Err(Error::Function { index, reason });
        }
        let registers = self.remote.config.save();
        Ok(RemoteState { slot: self.slot.save(), registers, function })
    }

    /// Lets the function go on if [`Attached::save`] has stopped it. Waits for the server, so call
    /// it on a thread of its own.
    ///
    /// # Errors
    /// [`Error::Function`]; `index` is the function's number in it.
    pub fn start(&self, index: usize) -> Result<()> {
        if !self.stopped.load(Ordering::Relaxed) {
            return Ok(());
        }
        let started = self.remote.function.start();
        started.map_err(|error| Error::Function { index, reason: error.to_string() })?;
        self.stopped.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Has the function note the pages of RAM that it writes to, or stop doing so. Waits for the
    /// server, so call it on a thread of its own.
    ///
    /// # Errors
    /// [`Error::Function`]; `index` is the function's number in it.
    pub(crate) fn set_log(&self, index: usize, log: bool) -> Result<()> {
        let function = &self.remote.function;
        let done = if log { function.log_writes() } else { function.end_log() };
        done.map_err(failed(index, "it does not tell what it writes"))
    }

    /// Adds the bits of the pages of RAM from the guest-physical address `start` on that the
    /// function has written to since the last call to `words`. Waits for the server.
    ///
    /// # Errors
    /// [`Error::Function`]: the function has no log, or does not report it.
    pub(crate) fn take_written(&self, index: usize, part: &Part, words: &mut [u64]) -> Result<()> {
        let pages = part.len as usize / slipway_ram::PAGE;
        let written = self.remote.function.report_log(part.start, pages);
        let written = written.map_err(failed(index, "it does not tell what it has written"))?;
        words.iter_mut().zip(written).for_each(|(word, more)| *word |= more);
        Ok(())
    }

    /// Connects the function behind `socket`, as [`Attached::new`] does, in the place of the saved
    /// one. The machine's CPUs have their state.
    ///
    /// # Errors
    /// [`Error::Function`], [`Error::Config`], [`Error::State`].
    pub fn succeed(
        machine: &Machine,
        number: u8,
        index: usize,
        socket: OwnedFd,
        saved: &RemoteState,
    ) -> Result<Self> {
        let attached = Self::plug(&machine.chassis, number, index, socket)?;
        attached.remote.config.restore_own(&saved.registers);
        machine.chassis.pci.restore(&attached.slot, &saved.slot)?;
        Ok(attached)
    }

    /// Lets the function go on where the saved one was stopped. Its interrupts are routed
    /// ([`Machine::route_interrupts`]).
    ///
    /// # Errors
    /// [`Error::Function`]; `index` is the function's number in it.
    pub fn load(&self, index: usize, saved: &RemoteState) -> Result<()> {
        let SocketFunction { function, config, .. } = &*self.remote;
        let load = || -> std::result::Result<(), FunctionError> {
            function.load(&saved.function)?;
            config.fetch_again(function)?;
            if self.pin.is_some() {
                // The server asserts the pin if the function still does.
                function.unmask_pin()?;
            }
            Ok(())
        };
        load().map_err(failed(index, "it cannot take over the saved state"))
    }
}

/// Makes the error of function `index` that has failed at `what`.
fn failed<E: Display>(index: usize, what: &'static str) -> impl FnOnce(E) -> Error {
    move |error| Error::Function { index, reason: format!("{what}: {error}") }
}
