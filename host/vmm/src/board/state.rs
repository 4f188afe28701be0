//! The saved state of a board.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use vm_superio::serial::SerialState;

use super::Board;
use crate::lock::lock;
use crate::output::Output;
use crate::plug::{Bank, Kind};
use crate::power::{self, Power};
use crate::serial::{SerialPort, SerialRegisters};
use crate::{Error, Result};

/// The saved state of a board: its registers, and whether the guest has reported a panic.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BoardState {
    #[serde(with = "SerialRegisters")]
    serial: SerialState,
    power: Power,
    functions: Bank,
    cpus: Bank,
    panicked: bool,
}

impl BoardState {
    /// Returns whether the state can be that of a board with these slots for functions and CPUs.
    pub(crate) fn is_sound(&self, functions: &Range<u8>, cpus: &Range<u8>) -> bool {
        self.functions.is_sound(functions) && self.cpus.is_sound(cpus)
    }

    /// Returns the plugged CPUs, a bit each.
    pub fn plugged_cpus(&self) -> u32 {
        self.cpus.taken()
    }
}

impl Board {
    /// Returns the state for a successor. The guest is stopped.
    pub fn save(&self) -> BoardState {
        BoardState {
            serial: lock(&self.serial).save(),
            power: lock(&self.power).clone(),
            functions: self.bank(Kind::Function).clone(),
            cpus: self.bank(Kind::Cpu).clone(),
            panicked: self.has_panicked(),
        }
    }

    /// Takes over the state of a predecessor. The interrupt lines have theirs; what the serial port
    /// sends goes to `console`.
    ///
    /// # Errors
    /// [`Error::State`].
    pub fn restore(&self, saved: &BoardState, console: Arc<Output>) -> Result<()> {
        if !saved.is_sound(&self.slots.functions, &self.slots.cpus) {
            return Err(Error::State("slots for hot plug that cannot be".into()));
        }
        let interrupts = Arc::clone(&self.interrupts);
        *lock(&self.serial) = SerialPort::restore(&saved.serial, interrupts, console)?;
        lock(&self.power).clone_from(&saved.power);
        self.bank(Kind::Function).clone_from(&saved.functions);
        self.bank(Kind::Cpu).clone_from(&saved.cpus);
        self.panicked.store(saved.panicked, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the parts of a kind that are there and can be removed, a bit each.
    pub fn taken(&self, kind: Kind) -> u32 {
        self.bank(kind).taken()
    }

    /// Tells the guest that the VM generation ID has changed: it is in a copy of a machine.
    pub fn generation_changed(&self) {
        self.announce(power::EVENT_GENERATION);
    }
}
