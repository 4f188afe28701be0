//! The first serial port (COM1), a 16550: for what the kernel says before its console's driver
//! works, and when it panics.

use std::io::{self, Write};
use std::sync::Arc;

use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};

use crate::interrupts::Interrupts;
use crate::layout::SERIAL_PIN;
use crate::output::Output;

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

/// The port.
pub struct SerialPort(Serial<Line, NoEvents, Console>);

impl SerialPort {
    /// Makes the port.
    pub fn new(interrupts: Arc<Interrupts>, console: Arc<Output>) -> Self {
        Self(Serial::new(Line(interrupts), Console(console)))
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
