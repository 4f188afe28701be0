//! The devices that a CPU's exit reaches: ports and addresses that are no RAM.
//!
//! Every access may be hostile. An access that nothing answers reads as all ones and writes
//! nothing, as on a real bus.
//!
//! A new device at a port has its range in `layout`, a field of `Board` and its branches in
//! `port_read` and `port_write`; one at an address in `memory_read` and `memory_write`. What it
//! keeps is in `BoardState` (`board/state.rs`), whose fields are all required: `state::VERSION` is
//! raised. The guest learns of it by the tables of `acpi`, unless its kernel looks there anyway.
//! Its registers are an object of their own, as `power` has them, which `registers` of `fuzz`
//! accesses (target `vmm-registers`); tests are in `tests/guests`, and `docs/vmm.md`, "The
//! machine", has a row. The crate's lines count: `deploy/check/vmm_lines.py`.

mod state;

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::interrupts::Interrupts;
use crate::lock::lock;
use crate::output::Output;
use crate::pci::Bus;
use crate::plug::{self, Bank, Kind};
use crate::power::{self, Power};
use crate::serial::SerialPort;
use crate::{Result, eventfd, layout};

pub use state::BoardState;

/// The cause of a machine's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The guest powered off.
    PowerOff,
    /// The guest reset the machine.
    Reset,
    /// The guest's kernel reported a panic, and then reset the machine or powered it off.
    Panic,
    /// The machine cannot continue, for the given reason.
    Failed(String),
}

/// A kind of exit to user space, for the statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// A write to a port.
    PortWrite,
    /// A read of a port.
    PortRead,
    /// A write to an address that is no RAM.
    MemoryWrite,
    /// A read of an address that is no RAM.
    MemoryRead,
    /// The end of a level-triggered interrupt.
    EndOfInterrupt,
}

impl Exit {
    /// The names of all kinds in statistics, in the order of their declaration.
    pub const NAMES: [&str; 5] =
        ["port_write", "port_read", "memory_write", "memory_read", "end_of_interrupt"];
}

/// The parts of a machine that come and go while it runs, by their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Slots {
    /// PCI devices.
    pub functions: Range<u8>,
    /// CPUs.
    pub cpus: Range<u8>,
}

/// The board of a machine.
pub struct Board {
    interrupts: Arc<Interrupts>,
    serial: Mutex<SerialPort>,
    power: Mutex<Power>,
    pci: Arc<Bus>,
    /// The PCI devices and CPUs that can be plugged and removed.
    slots: Slots,
    /// Their registers, by [`Kind`].
    banks: [Mutex<Bank>; 2],
    exits: [AtomicU64; Exit::NAMES.len()],
    /// The guest's kernel has reported a panic.
    panicked: AtomicBool,
    end: Mutex<Option<End>>,
    /// Counts changes of `panicked` and `end`, ejections, and CPUs that have stopped, for the
    /// thread that reports them.
    changed: OwnedFd,
}

/// The event flag of the panic device: the guest's kernel panicked.
const PANICKED: u8 = 1;

impl Board {
    /// Makes the board of a machine of which `slots` come and go, and are not there yet. What the
    /// serial port sends goes to `console`.
    ///
    /// # Errors
    /// [`crate::Error::System`]: no descriptor is left.
    pub fn new(
        interrupts: Arc<Interrupts>,
        pci: Arc<Bus>,
        slots: Slots,
        console: Arc<Output>,
    ) -> Result<Self> {
        let changed = eventfd::new()?;
        Ok(Self {
            serial: Mutex::new(SerialPort::new(Arc::clone(&interrupts), console)),
            power: Mutex::default(),
            slots,
            banks: Default::default(),
            exits: Default::default(),
            panicked: AtomicBool::new(false),
            end: Mutex::default(),
            interrupts,
            pci,
            changed,
        })
    }

    /// Returns the descriptor that becomes readable when the guest panics or ejects something, a
    /// CPU has stopped, or the machine ends.
    pub fn changed(&self) -> BorrowedFd<'_> {
        self.changed.as_fd()
    }

    /// Clears the readiness of [`Board::changed`].
    pub fn clear_changed(&self) {
        let _ = rustix::io::read(&self.changed, &mut [0; 8]);
    }

    /// Returns the cause of the machine's end, or `None` while it has not ended.
    pub fn ended(&self) -> Option<End> {
        lock(&self.end).clone()
    }

    /// Returns whether the guest's kernel has reported a panic.
    pub fn has_panicked(&self) -> bool {
        self.panicked.load(Ordering::Relaxed)
    }

    /// Returns the number of exits of each kind since the start, in the order of [`Exit::NAMES`].
    pub fn exits(&self) -> [u64; Exit::NAMES.len()] {
        std::array::from_fn(|kind| self.exits[kind].load(Ordering::Relaxed))
    }

    /// Counts an exit.
    pub fn count(&self, exit: Exit) {
        self.exits[exit as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Notes the cause of the machine's end; the first one counts.
    pub fn end(&self, end: End) {
        lock(&self.end).get_or_insert(end);
        self.tell();
    }

    /// Makes [`Board::changed`] readable.
    pub fn tell(&self) {
        // The counter overflows after 2^64 changes.
        let _ = rustix::io::write(&self.changed, &1u64.to_ne_bytes());
    }

    /// Returns the end of a machine that its guest reset.
    pub fn reset(&self) -> End {
        if self.has_panicked() { End::Panic } else { End::Reset }
    }

    /// Asks the guest to power off, by the power button. The guest may ignore it.
    pub fn press_power_button(&self) {
        self.announce(power::EVENT_POWER_BUTTON);
    }

    fn announce(&self, events: u8) {
        lock(&self.power).announce(events);
        self.interrupts.pulse(layout::EVENT_PIN);
    }

    /// Returns the PCI devices and CPUs that can be plugged and removed.
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Notes that a function is on the bus since the start, as PCI device `device`.
    pub fn function_present(&self, device: u8) {
        if self.slots.functions.contains(&device) {
            self.bank(Kind::Function).take(device);
        }
    }

    /// Tells the guest that a part has been added, which is one of [`Board::slots`]: a function on
    /// the bus, or a CPU.
    pub fn plugged(&self, kind: Kind, number: u8) {
        self.bank(kind).plug(number);
        self.announce(kind.event());
    }

    /// Asks the guest to give up a part, which it may ignore. Once it has ejected the part,
    /// [`Board::ejected`] returns the part.
    pub fn ask_for(&self, kind: Kind, number: u8) {
        if self.bank(kind).ask(number) {
            self.announce(kind.event());
        }
    }

    /// Returns the parts that the guest has ejected since the last call, a bit each. Functions are
    /// off the bus.
    pub fn ejected(&self, kind: Kind) -> u32 {
        self.bank(kind).take_ejected()
    }

    fn bank(&self, kind: Kind) -> MutexGuard<'_, Bank> {
        lock(&self.banks[kind as usize])
    }

    fn write_bank(&self, kind: Kind, offset: u16, data: &[u8]) {
        let ejected = {
            let mut bank = self.bank(kind);
            let ejected = bank.write(offset, data);
            // Whoever finds the device ejected finds it off the bus.
            if kind == Kind::Function {
                plug::slots(ejected).for_each(|device| self.pci.eject(device));
            }
            ejected
        };
        if ejected != 0 {
            self.tell();
        }
    }

    /// Serves a write to `port`. Returns the cause if the machine ends by it.
    ///
    /// # Errors
    /// The end of the machine.
    pub fn port_write(&self, port: u16, data: &[u8]) -> Result<(), End> {
        if layout::SERIAL.contains(&port) {
            lock(&self.serial).write(port - layout::SERIAL.start, data);
        } else if layout::POWER.contains(&port) {
            match lock(&self.power).write(port - layout::POWER.start, data) {
                power::Effect::None => {}
                power::Effect::PowerOff if self.has_panicked() => return Err(End::Panic),
                power::Effect::PowerOff => return Err(End::PowerOff),
                power::Effect::Reset => return Err(self.reset()),
            }
        } else if layout::FUNCTION_SLOTS.contains(&port) {
            self.write_bank(Kind::Function, port - layout::FUNCTION_SLOTS.start, data);
        } else if layout::CPU_SLOTS.contains(&port) {
            self.write_bank(Kind::Cpu, port - layout::CPU_SLOTS.start, data);
        } else if port == layout::PANIC_PORT && data.first().is_some_and(|b| b & PANICKED != 0) {
            self.panicked.store(true, Ordering::Relaxed);
            self.tell();
        }
        Ok(())
    }

    /// Serves a read of `port`.
    pub fn port_read(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        if layout::SERIAL.contains(&port) {
            lock(&self.serial).read(port - layout::SERIAL.start, data);
        } else if layout::POWER.contains(&port) {
            lock(&self.power).read(port - layout::POWER.start, data);
        } else if layout::FUNCTION_SLOTS.contains(&port) {
            self.bank(Kind::Function).read(port - layout::FUNCTION_SLOTS.start, data);
        } else if layout::CPU_SLOTS.contains(&port) {
            self.bank(Kind::Cpu).read(port - layout::CPU_SLOTS.start, data);
        } else if let (layout::PANIC_PORT, [first, ..]) = (port, data) {
            *first = PANICKED;
        }
    }

    /// Serves a read at a guest-physical address that is no RAM.
    pub fn memory_read(&self, address: u64, data: &mut [u8]) {
        data.fill(0xff);
        if layout::IOAPIC.contains(&address) {
            self.interrupts.read(address - layout::IOAPIC.start, data);
        } else if layout::ECAM.contains(&address) {
            self.pci.config_read(address - layout::ECAM.start, data);
        } else {
            self.pci.read(address, data);
        }
    }

    /// Serves a write at a guest-physical address that is no RAM.
    ///
    /// # Errors
    /// The end of the machine: KVM refused an interrupt's route.
    pub fn memory_write(&self, address: u64, data: &[u8]) -> Result<(), End> {
        if layout::IOAPIC.contains(&address) {
            let written = self.interrupts.write(address - layout::IOAPIC.start, data);
            // An edge is lost while its pin is masked: an event may have come before its driver.
            if lock(&self.power).is_pending() {
                self.interrupts.pulse(layout::EVENT_PIN);
            }
            return written.map_err(|error| End::Failed(error.to_string()));
        }
        if layout::ECAM.contains(&address) {
            self.pci.config_write(address - layout::ECAM.start, data);
        } else {
            self.pci.write(address, data);
        }
        Ok(())
    }

    /// Serves the end of a level-triggered interrupt.
    pub fn end_of_interrupt(&self, vector: u8) {
        let devices = self.interrupts.end(vector);
        self.pci.end_of_interrupt(devices);
    }
}
