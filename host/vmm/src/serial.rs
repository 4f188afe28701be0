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

/// The saved registers of the port (16550), and the bytes that the guest has not read yet.
#[derive(Serialize, Deserialize)]
#[serde(remote = "SerialState", deny_unknown_fields)]
pub struct SerialRegisters {
    baud_divisor_low: u8,
    baud_divisor_high: u8,
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    in_buffer: Vec<u8>,
}

/// The port.
pub struct SerialPort(Serial<Line, NoEvents, Console>);

impl SerialPort {
    /// Makes the port.
    pub fn new(interrupts: Arc<Interrupts>, console: Arc<Output>) -> Self {
        Self(Serial::new(Line(interrupts), Console(console)))
    }

    /// Returns the registers for a successor.
    pub fn save(&self) -> SerialState {
        self.0.state()
    }

    /// Makes the port of a predecessor's registers. A pending interrupt is raised anew.
    ///
    /// # Errors
    /// [`Error::State`].
    pub fn restore(
        saved: &SerialState,
        interrupts: Arc<Interrupts>,
        console: Arc<Output>,
    ) -> Result<Self> {
        let port = Serial::from_state(saved, Line(interrupts), NoEvents, Console(console));
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
