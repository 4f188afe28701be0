//! The saved state of a function behind a socket: the machine's part of it, and the server's.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use super::{Attached, FunctionError, Remote};
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
        let failed = |reason: String| Error::Function { index, reason };
        let stopped = self.remote.function.stop();
        stopped.map_err(|error| failed(format!("it cannot be stopped: {error}")))?;
        self.stopped.store(true, Ordering::Relaxed);
        let function = self.remote.function.save();
        let function = function.map_err(|error| failed(format!("its state: {error}")))?;
        if function.len() > MAX_STATE {
            let len = function.len();
            let what = format!("its state has {len} bytes, of {MAX_STATE} at most");
            return Err(failed(what));
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
        let attached = Self::plug(machine.chassis(), number, index, socket)?;
        attached.remote.config.restore_own(&saved.registers);
        machine.pci().restore(&attached.slot, &saved.slot)?;
        Ok(attached)
    }

    /// Lets the function go on where the saved one was stopped. Its interrupts are routed
    /// ([`Machine::route_interrupts`]).
    ///
    /// # Errors
    /// [`Error::Function`]; `index` is the function's number in it.
    pub fn load(&self, index: usize, saved: &RemoteState) -> Result<()> {
        let Remote { function, config, .. } = &*self.remote;
        let load = || -> std::result::Result<(), FunctionError> {
            function.load(&saved.function)?;
            config.fetch_again(function)?;
            if self.pin.is_some() {
                // The server asserts the pin if the function still does.
                function.unmask_pin()?;
            }
            Ok(())
        };
        load().map_err(|error| {
            let reason = format!("it cannot take over the saved state: {error}");
            Error::Function { index, reason }
        })
    }
}
