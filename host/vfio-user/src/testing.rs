//! A small function to test hosts with: a few registers, a copy engine that moves guest memory, one
//! doorbell, interrupts.
//!
//! BAR 0, 16 KiB, 64-bit:
//!
//! | offset | content |
//! |---|---|
//! | 0x000 | [`ID`], read-only |
//! | 0x008 to 0x03f | memory-like, any width |
//! | 0x040 | source of a copy, 64 bits |
//! | 0x048 | destination, 64 bits |
//! | 0x050 | length, at most [`MAX_COPY`] |
//! | 0x054 | a write copies; a read returns the result of the last copy: [`DONE`], [`FAULT`] |
//! | 0x058 | a write signals the interrupt of this number; [`PIN_ON`] and [`PIN_OFF`] set the pin |
//! | 0x060 | reads and writes are refused by the bus |
//! | 0x1000 | doorbell 0: a new value copies and then signals interrupt 0 |
//! | 0x2000 | MSI-X table, 0x3000 pending bits (never set) |
//! | 0x3800, 0x3808 | a write of any value signals the interrupt [`NOTIFIED`] |

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use slipway_doorbells::Doorbells;
use slipway_pci::{
    Access, Bar, Description, DoorbellRegisters, Function, Interrupt, InterruptSink, Notifications,
    Pin, Progress, StateError,
};
use slipway_ram::Memory;

/// The value of the first register.
pub const ID: u32 = 0x5343_5241;
/// The longest copy, in bytes.
pub const MAX_COPY: u32 = 1 << 20;
/// The status after a copy that succeeded.
pub const DONE: u32 = 1;
/// The status after a copy that met a fault.
pub const FAULT: u32 = 2;
/// The register value that asserts the pin.
pub const PIN_ON: u32 = 1 << 31 | 1;
/// The register value that deasserts the pin.
pub const PIN_OFF: u32 = 1 << 31;
/// The longest state, in bytes: that of all registers, and some more.
pub const MAX_STATE: usize = 0x80;
/// The number of interrupts.
pub const VECTORS: u16 = 4;
/// The interrupt that a notification signals.
pub const NOTIFIED: usize = 3;
/// The number of doorbell cells.
pub const DOORBELLS: usize = 4;
/// The PCI vendor and device identifiers.
pub const IDENTIFIERS: (u16, u16) = (0x1234, 0x5c2a);
/// A time limit far beyond the duration of any operation; a test that waits for it has failed.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `condition` holds.
///
/// # Panics
/// The condition `what` does not hold within [`PATIENCE`].
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let limit = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < limit, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Settings by which a test controls a running [`Scratch`] from outside, and its counters.
#[derive(Default)]
pub struct Knobs {
    /// While set, the function does not become quiet.
    pub restless: AtomicBool,
    /// While set, dropping the function waits, as for a medium that does not respond.
    pub clinging: AtomicBool,
    /// While set, a poll panics, as no proper function does.
    pub broken: AtomicBool,
    /// While set, a poll sleeps, as a page fault on memory of the client can.
    pub asleep: AtomicBool,
    /// While set, a poll first reads 4 bytes at the source of a copy, as a device reads a ring in
    /// guest memory.
    pub fetching: AtomicBool,
    /// The number of resets.
    pub resets: AtomicU32,
    /// The number of polls.
    pub polls: AtomicU32,
    /// How often the function was asked to become quiet.
    pub quiesces: AtomicU32,
}

/// The test function.
pub struct Scratch {
    description: Description,
    memory: Memory,
    interrupts: Vec<Interrupt>,
    pin: Pin,
    doorbells: Doorbells,
    knobs: Arc<Knobs>,
    config: Box<[u8; 4096]>,
    registers: Box<[u8; 0x60]>,
    table: Box<[u8; 0x1000]>,
    status: u32,
    rung: u32,
    quiet: bool,
}

impl Scratch {
    /// Makes the function from the parts that a host made.
    pub fn new(
        memory: Memory,
        sink: &Arc<dyn InterruptSink>,
        doorbells: Doorbells,
        knobs: Arc<Knobs>,
    ) -> Self {
        let bar = Bar {
            index: 0,
            size: 0x4000,
            wide: true,
            ports: false,
            doorbells: Some(DoorbellRegisters::Page(0x1000..0x2000)),
            notifications: Some(Notifications { range: 0x3800..0x3810, stride: 8 }),
        };
        let mut scratch = Self {
            description: Description { bars: vec![bar], vectors: VECTORS, pin: true },
            memory,
            interrupts: (0..VECTORS).map(|v| Interrupt::new(sink.clone(), v)).collect(),
            pin: Interrupt::new(sink.clone(), 0).pin(),
            doorbells,
            knobs,
            config: Box::new([0; 4096]),
            registers: Box::new([0; 0x60]),
            table: Box::new([0; 0x1000]),
            status: 0,
            rung: 0,
            quiet: false,
        };
        scratch.power_on();
        scratch
    }

    fn power_on(&mut self) {
        self.config.fill(0);
        let mut put =
            |at: usize, bytes: &[u8]| self.config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0x00, &IDENTIFIERS.0.to_le_bytes());
        put(0x02, &IDENTIFIERS.1.to_le_bytes());
        put(0x06, &0x0010u16.to_le_bytes()); // status: has capabilities
        put(0x0a, &[0x80, 0x08]); // class: other system peripheral
        put(0x10, &0x4u32.to_le_bytes()); // BAR 0: 64-bit memory
        put(0x34, &[0x40]);
        put(0x3d, &[1]); // interrupt pin: INTA#
        // MSI-X: capability, next, size - 1, table in BAR 0, pending bits in BAR 0.
        put(0x40, &[0x11, 0x00]);
        put(0x42, &(VECTORS - 1).to_le_bytes());
        put(0x44, &0x2000u32.to_le_bytes());
        put(0x48, &0x3000u32.to_le_bytes());
        self.registers.fill(0);
        self.table.fill(0);
        self.registers[..4].copy_from_slice(&ID.to_le_bytes());
        (self.status, self.rung) = (0, 0);
        self.doorbells.clear();
        self.pin.set(false);
    }

    fn u64_at(&self, at: usize) -> u64 {
        let bytes = self.registers[at..at + 8].try_into();
        u64::from_le_bytes(bytes.unwrap_or_default())
    }

    fn copy(&mut self) {
        let len = (self.u64_at(0x50) as u32).min(MAX_COPY);
        let mut buffer = vec![0; len as usize];
        let moved = self.memory.read(self.u64_at(0x40), &mut buffer);
        let moved = moved.and_then(|()| self.memory.write(self.u64_at(0x48), &buffer));
        self.status = if moved.is_ok() { DONE } else { FAULT };
    }

    fn write_register(&mut self, offset: usize, from: &[u8]) -> Access {
        let mut word = [0; 4];
        let len = from.len().min(4);
        word[..len].copy_from_slice(&from[..len]);
        let value = u32::from_le_bytes(word);
        match offset {
            0x54 => self.copy(),
            0x58 if value >> 31 == 1 => self.pin.set(value & 1 == 1),
            0x58 => {
                if let Some(interrupt) = self.interrupts.get(value as usize) {
                    interrupt.signal();
                }
            }
            _ => match self.registers.get_mut(offset..offset + from.len()) {
                Some(place) if offset >= 8 => place.copy_from_slice(from),
                Some(_) => {} // read-only
                None => return Access::Refused,
            },
        }
        Access::Done
    }

    fn read_register(&mut self, offset: usize, into: &mut [u8]) -> Access {
        let status = self.status.to_le_bytes();
        let place = match offset {
            0x54 => status.get(..into.len()),
            _ => self.registers.get(offset..offset + into.len()),
        };
        let Some(place) = place else { return Access::Refused };
        into.copy_from_slice(place);
        Access::Done
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        while self.knobs.clinging.load(Ordering::SeqCst) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

impl Function for Scratch {
    fn description(&self) -> &Description {
        &self.description
    }

    fn config_read(&mut self, offset: u16, into: &mut [u8]) {
        let start = usize::from(offset);
        into.copy_from_slice(&self.config[start..start + into.len()]);
    }

    fn config_write(&mut self, offset: u16, from: &[u8]) {
        for (at, byte) in (usize::from(offset)..).zip(from) {
            // Command, cache line, the BAR's address bits above its size, MSI-X control.
            let mask = match at {
                0x04 | 0x05 | 0x0c | 0x12..=0x17 => 0xff,
                0x11 => 0xc0,
                0x43 => 0xc0,
                _ => 0,
            };
            self.config[at] = self.config[at] & !mask | byte & mask;
        }
    }

    fn read(&mut self, _bar: u8, offset: u64, into: &mut [u8]) -> Access {
        let offset = offset as usize;
        match offset {
            0x0000..0x1000 => self.read_register(offset, into),
            0x2000..0x3000 if offset + into.len() <= 0x3000 => {
                into.copy_from_slice(&self.table[offset - 0x2000..][..into.len()]);
                Access::Done
            }
            _ => {
                into.fill(0);
                Access::Done
            }
        }
    }

    fn write(&mut self, _bar: u8, offset: u64, from: &[u8]) -> Access {
        self.quiet = false;
        let at = offset as usize;
        match at {
            0x0000..0x1000 => self.write_register(at, from),
            0x1000..0x1010 if at.is_multiple_of(4) && from.len() == 4 => {
                let value = u32::from_le_bytes([from[0], from[1], from[2], from[3]]);
                self.doorbells.store((at - 0x1000) / 4, value);
                Access::Done
            }
            0x2000..0x3000 if at + from.len() <= 0x3000 => {
                self.table[at - 0x2000..][..from.len()].copy_from_slice(from);
                Access::Done
            }
            0x3800 | 0x3808 => {
                self.notified(1);
                Access::Done
            }
            _ => Access::Refused,
        }
    }

    fn notified(&mut self, _: u64) {
        self.interrupts[NOTIFIED].signal();
    }

    fn poll(&mut self) -> Progress {
        self.quiet = false;
        self.knobs.polls.fetch_add(1, Ordering::Relaxed);
        while self.knobs.asleep.load(Ordering::Relaxed) {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        assert!(!self.knobs.broken.load(Ordering::Relaxed), "broken by a test");
        if self.knobs.fetching.load(Ordering::SeqCst) {
            let _ = self.memory.read(self.u64_at(0x40), &mut [0; 4]);
        }
        let rung = self.doorbells.load(0);
        if rung == self.rung {
            return Progress::Idle(None);
        }
        self.rung = rung;
        self.copy();
        self.interrupts[0].signal();
        Progress::Busy
    }

    fn reset(&mut self) {
        self.knobs.resets.fetch_add(1, Ordering::SeqCst);
        self.power_on();
    }

    fn quiesce(&mut self) -> bool {
        self.knobs.quiesces.fetch_add(1, Ordering::SeqCst);
        self.quiet = !self.knobs.restless.load(Ordering::SeqCst);
        self.quiet
    }

    fn max_state(&self) -> usize {
        MAX_STATE
    }

    fn save(&self) -> Vec<u8> {
        self.registers.to_vec()
    }

    fn take_over(&mut self, state: &[u8]) -> Result<(), StateError> {
        let unknown = || StateError::Unknown("not a scratch function's".into());
        *self.registers = state.try_into().map_err(|_| unknown())?;
        Ok(())
    }
}
