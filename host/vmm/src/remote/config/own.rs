//! The registers of configuration space that are the machine's own: saved with the machine, while a
//! function's state has all others.

use slipway_vfio_user_client::RemoteFunction;

use super::{Config, Outcome, SIZE, State, dword, fetch, put, register, word};
use crate::state::OwnRegisters;

impl Config {
    /// Returns the machine's own registers.
    pub fn save(&self) -> OwnRegisters {
        let state = self.state();
        self.own(&state.bytes)
    }

    fn own(&self, bytes: &[u8; SIZE]) -> OwnRegisters {
        OwnRegisters {
            command: word(bytes, register::COMMAND.start),
            bars: std::array::from_fn(|bar| dword(bytes, register::BARS.start + 4 * bar)),
            interrupt_line: bytes[register::INTERRUPT_LINE],
            msix_control: self.msix.map_or(0, |at| word(bytes, at + 2)),
        }
    }

    /// Sets the machine's own registers, as far as the guest can change them. The server is not
    /// told: its function's state has what it needs.
    pub fn restore_own(&self, saved: &OwnRegisters) {
        let mut state = self.state();
        let State { bytes, command } = &mut *state;
        self.overlay(bytes, saved);
        *command = word(bytes, register::COMMAND.start);
    }

    /// Reads the server's registers again, after its function took over a state.
    ///
    /// # Errors
    /// [`slipway_vfio_user_client::FunctionError`].
    pub fn fetch_again(&self, function: &RemoteFunction) -> Outcome<()> {
        let mut bytes = fetch(function)?;
        self.clear_own(&mut bytes);
        let mut state = self.state();
        let own = self.own(&state.bytes);
        self.overlay(&mut bytes, &own);
        state.bytes = bytes;
        Ok(())
    }

    fn overlay(&self, bytes: &mut [u8; SIZE], own: &OwnRegisters) {
        self.set(bytes, register::COMMAND.start, &own.command.to_le_bytes());
        for (at, bar) in register::BARS.step_by(4).zip(own.bars) {
            self.set(bytes, at, &bar.to_le_bytes());
        }
        self.set(bytes, register::INTERRUPT_LINE, &[own.interrupt_line]);
        if let Some(at) = self.msix {
            self.set(bytes, at + 2, &own.msix_control.to_le_bytes());
        }
    }

    /// Stores a value in the bits that the guest may change.
    fn set(&self, bytes: &mut [u8; SIZE], start: usize, value: &[u8]) {
        let mut merged = [0; 4];
        for ((at, new), place) in (start..).zip(value).zip(&mut merged) {
            let mask = self.writable(at);
            *place = bytes[at] & !mask | new & mask;
        }
        put(bytes, start, &merged[..value.len()]);
    }
}
