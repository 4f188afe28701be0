//! The first serial port (COM1), a 16550: for what the kernel says before its console's driver
//! works, and when it panics.

use std::io::{self, Write};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial, Trigger};

use crate::interrupts::Interrupts;
use crate::layout::SERIAL_PIN;
use crate::output::Output;
use crate::{Error, Result};

/// Interrupts by the port's pin.
struct Line(Arc<Interrupts>);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.pulse(SERIAL_PIN);
        Ok(())
    }
}

/// The console behind the port.
struct Console(Arc<Output>);

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write_or_drop(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The saved registers of the port (16550). Pairs are low and high byte, or control and status.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SerialRegisters {
    baud_divisor: [u8; 2],
    interrupt_enable: u8,
    interrupt_identification: u8,
    line: [u8; 2],
    modem: [u8; 2],
    scratch: u8,
    received: Vec<u8>,
}

/// The port.
pub struct SerialPort(Serial<Line, NoEvents, Console>);

impl SerialPort {
    /// Makes the port.
    pub fn new(interrupts: Arc<Interrupts>, console: Arc<Output>) -> Self {
        Self(Serial::new(Line(interrupts), Console(console)))
    }

    /// Returns the registers for a successor.
    pub fn save(&self) -> SerialRegisters {
        let state = self.0.state();
        SerialRegisters {
            baud_divisor: [state.baud_divisor_low, state.baud_divisor_high],
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line: [state.line_control, state.line_status],
            modem: [state.modem_control, state.modem_status],
            scratch: state.scratch,
            received: state.in_buffer,
        }
    }

    /// Makes the port of a predecessor's registers. A pending interrupt is raised anew.
    ///
    /// # Errors
    /// [`Error::State`].
    pub fn restore(
        saved: &SerialRegisters,
        interrupts: Arc<Interrupts>,
        console: Arc<Output>,
    ) -> Result<Self> {
        let state = SerialState {
            baud_divisor_low: saved.baud_divisor[0],
            baud_divisor_high: saved.baud_divisor[1],
            interrupt_enable: saved.interrupt_enable,
            interrupt_identification: saved.interrupt_identification,
            line_control: saved.line[0],
            line_status: saved.line[1],
            modem_control: saved.modem[0],
            modem_status: saved.modem[1],
            scratch: saved.scratch,
            in_buffer: saved.received.clone(),
        };
        let port = Serial::from_state(&state, Line(interrupts), NoEvents, Console(console));
        port.map(Self).map_err(|error| Error::State(format!("the serial port: {error}")))
    }

    /// Reads the register at `offset`, 0 to 7; all registers have 8 bits.
    pub fn read(&mut self, offset: u16, into: &mut [u8]) {
        if let [byte] = into {
            *byte = self.0.read(offset as u8);
        }
    }

    /// Writes the register at `offset`, 0 to 7. A byte that the console does not take is lost.
    pub fn write(&mut self, offset: u16, from: &[u8]) {
        if let [byte] = *from {
            let _ = self.0.write(offset as u8, byte);
        }
    }
}
