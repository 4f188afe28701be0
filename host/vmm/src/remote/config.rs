//! The machine's view of a remote function's configuration space.
//!
//! BARs are decoded by the machine, so their registers are here alone. Command and MSI-X's Message
//! Control are here and with the server. Everything else is the server's, read once: only virtio's
//! window to the BARs, vendor-specific capabilities of others and, for a function with a pin, the
//! status register change by themselves, so these are read from the server each time.

use std::sync::Mutex;

use slipway_pci_spec::{
    BARS, CONFIG_SIZE, bar, capability, command, dword, express, msix, put, register, word,
};
use slipway_vfio_user_client::{FunctionError, RemoteFunction};
use slipway_vfio_user_spec::region;
use slipway_virtio_spec::pci as virtio;

use crate::lock::lock;
use crate::state::OwnRegisters;

/// The bits of MSI-X's Message Control that the guest may change.
const MSIX_WRITABLE: u16 = msix::ENABLE | msix::FUNCTION_MASK;
/// The offset of Command.
const COMMAND_AT: u64 = register::COMMAND as u64;
/// The bytes of Command.
const COMMAND: std::ops::Range<usize> = register::COMMAND..register::COMMAND + 2;
/// Device IDs of virtio devices (virtio 1.3, 4.1.2).
const VIRTIO: std::ops::Range<u16> = 0x1000..0x1080;
/// The largest BAR.
const MAX_BAR: u64 = 256 << 20;

/// Configuration space as bytes.
type Space = Box<[u8; CONFIG_SIZE]>;

struct ConfigState {
    bytes: Space,
    /// The value of Command that the server has last got.
    command: u16,
}

/// The configuration space of a function.
pub struct Config {
    state: Mutex<ConfigState>,
    /// The bits of the machine's own registers that the guest may change.
    writable: Space,
    /// Number and size of each BAR.
    pub bars: Vec<(u8, u64)>,
    /// The type of each BAR, as at the connection: the lowest bits of its register.
    kinds: [u8; BARS],
    msix: Option<usize>,
    express: Option<usize>,
    /// The parts of vendor-specific capabilities that change by themselves, each as its first byte
    /// and the one behind its last.
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
            writable: Box::new([0; CONFIG_SIZE]),
            bars: Vec::new(),
            kinds: [0; BARS],
            msix: None,
            express: None,
            vendor: Vec::new(),
            state: Mutex::new(ConfigState { bytes: Box::new([0; CONFIG_SIZE]), command: 0 }),
        };
        config.learn_bars(function, &bytes);
        config.learn_capabilities(&bytes);
        put(&mut config.writable, register::COMMAND, &command::WRITABLE.to_le_bytes());
        config.writable[register::INTERRUPT_LINE] = 0xff;
        config.clear_own(&mut bytes);
        config.state = Mutex::new(ConfigState { bytes, command: 0 });
        Ok(config)
    }

    fn learn_bars(&mut self, function: &RemoteFunction, bytes: &Space) {
        let mut upper = false;
        for number in 0..BARS {
            let at = register::BAR0 + 4 * number;
            let kind = dword(bytes, at);
            if std::mem::take(&mut upper) || kind & bar::PORTS != 0 {
                continue;
            }
            let index = region::BAR0 as usize + number;
            let size = function.regions().get(index).map_or(0, |region| region.size);
            if size == 0 || size > MAX_BAR {
                continue;
            }
            let size = size.next_power_of_two().max(CONFIG_SIZE as u64);
            self.bars.push((number as u8, size));
            self.kinds[number] = kind as u8 & 0xf;
            upper = kind & bar::WIDE != 0;
            let mask = (!(size - 1) & bar::ADDRESS).to_le_bytes();
            // The last register has no upper half.
            let len = if upper && number + 1 < BARS { 8 } else { 4 };
            put(&mut self.writable, at, &mask[..len]);
        }
    }

    fn learn_capabilities(&mut self, bytes: &Space) {
        for (at, header) in slipway_pci_spec::capabilities(|at| dword(bytes, at)) {
            match header as u8 {
                capability::MSIX => self.msix = self.msix.or(Some(at)),
                capability::EXPRESS => self.express = self.express.or(Some(at)),
                capability::VENDOR => self.vendor.extend(changing(bytes, at)),
                _ => {}
            }
        }
        if let Some(at) = self.msix {
            put(&mut self.writable, at + msix::CONTROL, &MSIX_WRITABLE.to_le_bytes());
        }
    }

    /// Returns whether the function has an interrupt pin, INTA#.
    pub fn has_pin(&self) -> bool {
        lock(&self.state).bytes[register::INTERRUPT_PIN] == 1
    }

    /// Sets what the machine keeps itself to its state after a reset.
    fn clear_own(&self, bytes: &mut Space) {
        for (number, kind) in self.kinds.into_iter().enumerate() {
            put(bytes, register::BAR0 + 4 * number, &[kind, 0, 0, 0]);
        }
        put(bytes, register::EXPANSION_ROM, &[0; 4]);
        put(bytes, register::COMMAND, &[0; 2]);
        for (byte, mask) in bytes.iter_mut().zip(&*self.writable) {
            *byte &= !mask;
        }
    }

    /// Reads as the guest sees it.
    pub fn load(&self, function: &RemoteFunction, offset: u16, into: &mut [u8]) {
        let start = usize::from(offset);
        let end = (start + into.len()).min(CONFIG_SIZE);
        let asks = self.vendor.iter().any(|&(first, last)| start < last && first < end)
            || lock(&self.state).bytes[register::INTERRUPT_PIN] != 0
                && start < register::STATUS + 2
                && register::STATUS < end;
        if asks {
            let _ = function.read(region::CONFIG, offset.into(), into);
        }
        let state = lock(&self.state);
        for (at, byte) in (start..end).zip(into.iter_mut()) {
            if !asks || COMMAND.contains(&at) {
                *byte = state.bytes[at];
            }
        }
    }

    /// Writes as the guest asks for. Returns whether that has reset the function.
    pub fn store(&self, function: &RemoteFunction, offset: u16, from: &[u8]) -> bool {
        let start = usize::from(offset);
        let resets = self.express.is_some_and(|at| express::asks_for_reset(at, start, from));
        if self.vendor.iter().any(|&(first, last)| (first..last).contains(&start)) {
            let _ = function.write(region::CONFIG, offset.into(), from);
            return false;
        }
        if start >= register::END && !self.is_msix_control(start) {
            let _ = function.write(region::CONFIG, offset.into(), from);
            if resets {
                self.reset(function);
                return true;
            }
            // Which bits the server has taken, it alone knows.
            let mut now = vec![0; from.len()];
            if function.read(region::CONFIG, offset.into(), &mut now).is_ok() {
                let mut state = lock(&self.state);
                for (at, byte) in (start..CONFIG_SIZE).zip(now) {
                    state.bytes[at] = byte;
                }
            }
            return false;
        }
        let mut state = lock(&self.state);
        self.overlay(&mut state.bytes, (start..CONFIG_SIZE).zip(from.iter().copied()));
        self.pass_on(function, &mut state, start);
        false
    }

    fn is_msix_control(&self, at: usize) -> bool {
        self.msix.is_some_and(|msix| (msix..msix + 4).contains(&at))
    }

    /// Tells the server what it has to know of a write at `start`.
    fn pass_on(&self, function: &RemoteFunction, state: &mut ConfigState, start: usize) {
        let command = word(&state.bytes, register::COMMAND);
        if std::mem::replace(&mut state.command, command) != command {
            let _ = function.write(region::CONFIG, COMMAND_AT, &command.to_le_bytes());
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
            *lock(&self.state) = ConfigState { bytes, command: 0 };
        }
    }

    /// Writes what the guest has set to a server that presents the function anew.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub fn restore(&self, function: &RemoteFunction) -> Outcome<()> {
        let mut state = lock(&self.state);
        state.command = word(&state.bytes, register::COMMAND);
        function.write_connected(region::CONFIG, COMMAND_AT, &state.command.to_le_bytes())?;
        match self.msix {
            Some(msix) => {
                let control = word(&state.bytes, msix + 2).to_le_bytes();
                function.write_connected(region::CONFIG, msix as u64 + 2, &control)
            }
            None => Ok(()),
        }
    }

    /// Writes those bits of the bytes, each at an offset, that are the machine's own and the guest
    /// may change.
    fn overlay(&self, into: &mut Space, bytes: impl Iterator<Item = (usize, u8)>) {
        for (at, byte) in bytes {
            if let (Some(place), Some(mask)) = (into.get_mut(at), self.writable.get(at)) {
                *place = *place & !mask | byte & mask;
            }
        }
    }

    /// Returns the machine's own registers, as saved with the machine, while a function's state has
    /// all others.
    pub fn save(&self) -> OwnRegisters {
        let state = lock(&self.state);
        let all = state.bytes.iter().zip(&*self.writable).enumerate();
        let own = all.filter(|(_, (_, mask))| **mask != 0);
        OwnRegisters(own.map(|(at, (byte, mask))| (at, byte & mask)).collect())
    }

    /// Sets the machine's own registers, as far as the guest can change them. The server is not
    /// told: its function's state has what it needs.
    pub fn restore_own(&self, saved: &OwnRegisters) {
        let mut state = lock(&self.state);
        let ConfigState { bytes, command } = &mut *state;
        self.overlay(bytes, saved.0.iter().copied());
        *command = word(bytes, register::COMMAND);
    }

    /// Reads the server's registers again, after its function took over a state, and keeps the
    /// machine's own.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub fn fetch_again(&self, function: &RemoteFunction) -> Outcome<()> {
        let mut bytes = fetch(function)?;
        self.clear_own(&mut bytes);
        let mut state = lock(&self.state);
        self.overlay(&mut bytes, state.bytes.iter().copied().enumerate());
        state.bytes = bytes;
        Ok(())
    }
}

/// Reads all of configuration space that the server has; what it has not reads as zeros.
fn fetch(function: &RemoteFunction) -> Outcome<Space> {
    let mut bytes = Box::new([0; CONFIG_SIZE]);
    let size = function.regions().get(region::CONFIG as usize).map_or(0, |region| region.size);
    let len = size.min(CONFIG_SIZE as u64) as usize;
    function.read(region::CONFIG, 0, &mut bytes[..len])?;
    Ok(bytes)
}

/// Returns the part of the vendor-specific capability at `at` that changes by itself: nothing of
/// virtio's capabilities but the window to the BARs, behind its type (virtio 1.3, 4.1.4).
fn changing(bytes: &Space, at: usize) -> Option<(usize, usize)> {
    // Behind ID and next comes the length.
    let end = at + usize::from(bytes[at + 2].max(3));
    let [vendor, device] = [register::VENDOR, register::DEVICE].map(|at| word(bytes, at));
    match bytes[at + 3] {
        _ if vendor != virtio::VENDOR || !VIRTIO.contains(&device) => Some((at, end)),
        virtio::config_type::PCI => Some((at + 4, end)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_its_window_changes_in_a_virtio_function() {
        let mut bytes: Space = Box::new([0; CONFIG_SIZE]);
        let [window, common] = [virtio::config_type::PCI, virtio::config_type::COMMON];
        put(&mut bytes, 0x40, &[capability::VENDOR, 0x60, 20, window]);
        put(&mut bytes, 0x60, &[capability::VENDOR, 0, 16, common]);
        let found = |bytes: &Space| [0x40, 0x60].map(|at| changing(bytes, at));
        assert_eq!(found(&bytes), [Some((0x40, 0x54)), Some((0x60, 0x70))], "of another vendor");
        put(&mut bytes, register::VENDOR, &virtio::VENDOR.to_le_bytes());
        put(&mut bytes, register::DEVICE, &(virtio::DEVICE_BASE + 1).to_le_bytes());
        assert_eq!(found(&bytes), [Some((0x44, 0x54)), None]);
    }
}
