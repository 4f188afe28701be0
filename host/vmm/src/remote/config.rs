//! The machine's view of a remote function's configuration space.
//!
//! BARs are decoded by the machine, so their registers are here alone. Command and MSI-X's Message
//! Control are here and with the server. Everything else is the server's, read once: only
//! vendor-specific capabilities (virtio's window to the BARs among them) and, for a function with a
//! pin, the status register change by themselves, so these are read from the server each time.

mod own;

use std::sync::{Mutex, MutexGuard};

use slipway_vfio_user_client::{FunctionError, RemoteFunction};
use slipway_vfio_user_spec::region;

/// Bytes of configuration space.
const SIZE: usize = 4096;

/// Registers of the type 0 header (PCI Local Bus 3.0, 6.1).
mod register {
    use std::ops::Range;
    pub const COMMAND: Range<usize> = 0x04..0x06;
    pub const STATUS: Range<usize> = 0x06..0x08;
    pub const BARS: Range<usize> = 0x10..0x28;
    pub const EXPANSION_ROM: Range<usize> = 0x30..0x34;
    pub const CAPABILITIES: usize = 0x34;
    pub const INTERRUPT_LINE: usize = 0x3c;
    pub const INTERRUPT_PIN: usize = 0x3d;
}

/// Command: memory space, bus master, parity error response, SERR#, interrupt disable.
const COMMAND_WRITABLE: u16 = 1 << 1 | 1 << 2 | 1 << 6 | 1 << 8 | 1 << 10;
/// BAR: I/O space, and 64-bit (PCI Local Bus 3.0, 6.2.5.1).
const BAR_IO: u32 = 1;
const BAR_WIDE: u32 = 0b10 << 1;
/// Capability IDs.
const EXPRESS: u8 = 0x10;
const MSIX: u8 = 0x11;
const VENDOR: u8 = 0x09;
/// Message Control: enable, and function mask.
const MSIX_WRITABLE: u16 = 1 << 15 | 1 << 14;
/// Offset of the high byte of Device Control in the PCI Express capability; bit 7 resets.
const EXPRESS_RESET: usize = 9;
/// The largest BAR.
const MAX_BAR: u64 = 256 << 20;

/// The effect of a write beyond the register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    None,
    /// The function was reset.
    Reset,
}

struct State {
    bytes: Box<[u8; SIZE]>,
    /// The value of Command that the server has last got.
    command: u16,
}

/// The configuration space of a function.
pub struct Config {
    state: Mutex<State>,
    /// Size of each BAR in bytes; 0 if there is none.
    sizes: [u64; 6],
    /// The low four bits of each BAR, which tell its kind.
    kinds: [u32; 6],
    msix: Option<usize>,
    express: Option<usize>,
    /// Vendor-specific capabilities, each as its first byte and the one behind its last.
    vendor: Vec<(usize, usize)>,
}

type Outcome<T> = Result<T, FunctionError>;

impl Config {
    /// Reads the configuration space of `function`, which has just been connected.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub fn read(function: &RemoteFunction) -> Outcome<Self> {
        let mut bytes = fetch(function)?;
        let mut config = Self {
            sizes: [0; 6],
            kinds: [0; 6],
            msix: None,
            express: None,
            vendor: Vec::new(),
            state: Mutex::new(State { bytes: Box::new([0; SIZE]), command: 0 }),
        };
        config.learn_bars(function, &bytes);
        config.learn_capabilities(&bytes);
        config.clear_own(&mut bytes);
        config.state = Mutex::new(State { bytes, command: 0 });
        Ok(config)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn learn_bars(&mut self, function: &RemoteFunction, bytes: &[u8; SIZE]) {
        let mut upper = false;
        for bar in 0..6 {
            let kind = dword(bytes, register::BARS.start + 4 * bar) & 0xf;
            if std::mem::take(&mut upper) || kind & BAR_IO != 0 {
                continue;
            }
            let size = function.regions().get(region::BAR0 as usize + bar);
            let size = size.map_or(0, |region| region.size);
            if size == 0 || size > MAX_BAR {
                continue;
            }
            self.sizes[bar] = size.next_power_of_two().max(SIZE as u64);
            self.kinds[bar] = kind;
            upper = kind & BAR_WIDE != 0;
        }
    }

    fn learn_capabilities(&mut self, bytes: &[u8; SIZE]) {
        let mut at = usize::from(bytes[register::CAPABILITIES] & !3);
        // At most 48 fit into 192 bytes: a loop in a server's list ends there.
        for _ in 0..48 {
            if at < 0x40 {
                return;
            }
            match bytes[at] {
                MSIX => self.msix = self.msix.or(Some(at)),
                EXPRESS => self.express = self.express.or(Some(at)),
                // Behind ID and next comes the length.
                VENDOR => self.vendor.push((at, at + usize::from(bytes[at + 2].max(3)))),
                _ => {}
            }
            at = usize::from(bytes[at + 1] & !3);
        }
    }

    /// Returns number and size of each BAR.
    pub fn bars(&self) -> Vec<(u8, u64)> {
        let sizes = (0..).zip(self.sizes);
        sizes.filter(|(_, size)| *size > 0).collect()
    }

    /// Returns whether the function has an interrupt pin, INTA#.
    pub fn has_pin(&self) -> bool {
        self.state().bytes[register::INTERRUPT_PIN] == 1
    }

    /// Sets what the machine keeps itself to its state after a reset.
    fn clear_own(&self, bytes: &mut [u8; SIZE]) {
        for bar in 0..6 {
            put(bytes, register::BARS.start + 4 * bar, &self.kinds[bar].to_le_bytes());
        }
        bytes[register::EXPANSION_ROM].fill(0);
        bytes[register::COMMAND].fill(0);
        bytes[register::INTERRUPT_LINE] = 0;
        if let Some(at) = self.msix {
            let control = word(bytes, at + 2) & !MSIX_WRITABLE;
            put(bytes, at + 2, &control.to_le_bytes());
        }
    }

    /// Reads as the guest sees it.
    pub fn load(&self, function: &RemoteFunction, offset: u16, into: &mut [u8]) {
        let start = usize::from(offset);
        let end = (start + into.len()).min(SIZE);
        let asks = self.vendor.iter().any(|&(first, last)| start < last && first < end)
            || self.state().bytes[register::INTERRUPT_PIN] != 0
                && start < register::STATUS.end
                && register::STATUS.start < end;
        if asks {
            let _ = function.read(region::CONFIG, offset.into(), into);
        }
        let state = self.state();
        for (at, byte) in (start..end).zip(into.iter_mut()) {
            if !asks || register::COMMAND.contains(&at) {
                *byte = state.bytes[at];
            }
        }
    }

    /// Writes as the guest asks for.
    pub fn store(&self, function: &RemoteFunction, offset: u16, from: &[u8]) -> Action {
        let start = usize::from(offset);
        let resets = self.express.is_some_and(|at| {
            let byte = (at + EXPRESS_RESET).checked_sub(start).and_then(|at| from.get(at));
            byte.is_some_and(|byte| byte & 0x80 != 0)
        });
        if self.vendor.iter().any(|&(first, last)| (first..last).contains(&start)) {
            let _ = function.write(region::CONFIG, offset.into(), from);
            return Action::None;
        }
        if start >= 0x40 && !self.is_msix_control(start) {
            let _ = function.write(region::CONFIG, offset.into(), from);
            if resets {
                self.reset(function);
                return Action::Reset;
            }
            // Which bits the server has taken, it alone knows.
            let mut now = vec![0; from.len()];
            if function.read(region::CONFIG, offset.into(), &mut now).is_ok() {
                let mut state = self.state();
                for (at, byte) in (start..SIZE).zip(now) {
                    state.bytes[at] = byte;
                }
            }
            return Action::None;
        }
        let mut state = self.state();
        for (at, &byte) in (start..SIZE).zip(from) {
            let mask = self.writable(at);
            state.bytes[at] = state.bytes[at] & !mask | byte & mask;
        }
        self.pass_on(function, &mut state, start);
        Action::None
    }

    fn is_msix_control(&self, at: usize) -> bool {
        self.msix.is_some_and(|msix| (msix..msix + 4).contains(&at))
    }

    /// Returns the bits of a byte that is the machine's which the guest may change.
    fn writable(&self, at: usize) -> u8 {
        let half = |value: u16| value.to_le_bytes()[at % 2];
        match at {
            _ if register::COMMAND.contains(&at) => half(COMMAND_WRITABLE),
            _ if register::BARS.contains(&at) => {
                self.bar_mask((at - register::BARS.start) / 4).to_le_bytes()[at % 4]
            }
            register::INTERRUPT_LINE => 0xff,
            _ if self.msix.is_some_and(|msix| (msix + 2..msix + 4).contains(&at)) => {
                half(MSIX_WRITABLE)
            }
            _ => 0,
        }
    }

    /// Returns the bits of BAR register `bar` that hold an address.
    fn bar_mask(&self, bar: usize) -> u32 {
        if self.sizes[bar] > 0 {
            return !(self.sizes[bar] - 1) as u32 & !0xf;
        }
        // The upper half of a wide BAR.
        let lower = bar.checked_sub(1);
        let wide = lower.is_some_and(|lower| self.kinds[lower] & BAR_WIDE != 0);
        if wide { u32::MAX } else { 0 }
    }

    /// Tells the server what it has to know of a write at `start`.
    fn pass_on(&self, function: &RemoteFunction, state: &mut State, start: usize) {
        let command = word(&state.bytes, register::COMMAND.start);
        if command != state.command {
            state.command = command;
            let at = register::COMMAND.start as u64;
            let _ = function.write(region::CONFIG, at, &command.to_le_bytes());
        }
        if let Some(msix) = self.msix.filter(|_| self.is_msix_control(start)) {
            let control = word(&state.bytes, msix + 2).to_le_bytes();
            let _ = function.write(region::CONFIG, msix as u64 + 2, &control);
        }
    }

    /// Takes over the state of a function that has just been reset.
    fn reset(&self, function: &RemoteFunction) {
        if let Ok(mut bytes) = fetch(function) {
            self.clear_own(&mut bytes);
            *self.state() = State { bytes, command: 0 };
        }
    }

    /// Writes what the guest has set to a server that presents the function anew.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub fn restore(&self, function: &RemoteFunction) -> Outcome<()> {
        let mut state = self.state();
        state.command = word(&state.bytes, register::COMMAND.start);
        let at = register::COMMAND.start as u64;
        function.write_connected(region::CONFIG, at, &state.command.to_le_bytes())?;
        match self.msix {
            Some(msix) => {
                let control = word(&state.bytes, msix + 2).to_le_bytes();
                function.write_connected(region::CONFIG, msix as u64 + 2, &control)
            }
            None => Ok(()),
        }
    }
}

/// Reads all of configuration space that the server has; what it has not reads as zeros.
fn fetch(function: &RemoteFunction) -> Outcome<Box<[u8; SIZE]>> {
    let mut bytes = Box::new([0; SIZE]);
    let size = function.regions().get(region::CONFIG as usize).map_or(0, |region| region.size);
    let len = size.min(SIZE as u64) as usize;
    function.read(region::CONFIG, 0, &mut bytes[..len])?;
    Ok(bytes)
}

fn word(bytes: &[u8; SIZE], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn dword(bytes: &[u8; SIZE], at: usize) -> u32 {
    u32::from(word(bytes, at)) | u32::from(word(bytes, at + 2)) << 16
}

fn put(bytes: &mut [u8; SIZE], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}
