//! Configuration space of a type 0 function.
//!
//! The space is kept as bytes, with a mask of the bits that software may change. So sizing a BAR
//! (write all ones, read the mask back) needs no code of its own, and no access of a guest,
//! whatever its offset and width, can change a read-only bit.

pub use slipway_pci_spec::CONFIG_SIZE;
use slipway_pci_spec::{PIN_A, bar, command, dword, express, msix, put, register, status, word};

use crate::capability;
use crate::state::{ConfigState, Register, VERSION};
use crate::{Bar, Description, MsixControl, MsixLayout, StateError, VendorCapability};

/// The IDs and class code of a function (PCI Local Bus 3.0, 6.2.1 and 6.2.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Subsystem vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem ID.
    pub subsystem: u16,
    /// Class code: base class, sub-class, programming interface, from the high byte of 24 bits.
    pub class: u32,
    /// Revision ID.
    pub revision: u8,
}

/// The effect of a write to configuration space on the device, beyond the register's new value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a function-level reset must be carried out by the device"]
pub enum ConfigEffect {
    /// Nothing.
    None,
    /// Initiate Function Level Reset was written (PCIe Base 5.0, 7.5.3.4 and 6.6.2): the device
    /// resets itself, this configuration space included.
    FunctionLevelReset,
}

/// The configuration space of one function: type 0 header, BARs, and capabilities for power
/// management, PCI Express (endpoint) and MSI-X.
///
/// BAR addresses are stored and read back; the host decodes them.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    bytes: Box<[u8; CONFIG_SIZE]>,
    /// Bits that software may change.
    writable: Box<[u8; CONFIG_SIZE]>,
    /// The bits after a reset.
    initial: Box<[u8; CONFIG_SIZE]>,
    msix: Option<usize>,
    express: usize,
    /// Offsets of the vendor-specific capabilities, in their order.
    vendor: Vec<usize>,
    /// Status, Interrupt Status. It belongs to the function, not to software, so it is not part of
    /// `bytes`.
    interrupt_status: bool,
    /// The result of [`ConfigSpace::pin_enabled`].
    pin_enabled: bool,
}

impl ConfigSpace {
    /// Makes the space of a function with this identity, these BARs, and MSI-X as in `msix`.
    ///
    /// # Panics
    /// If `description` or `msix` break their own rules (BAR numbers, sizes, a table outside its
    /// BAR). They are constants of a device, so that is a programmer's error.
    pub fn new(identity: &Identity, description: &Description, msix: Option<&MsixLayout>) -> Self {
        Self::with_vendor(identity, description, msix, &[])
    }

    /// Makes a space like [`ConfigSpace::new`], with vendor-specific capabilities after the others.
    ///
    /// # Panics
    /// For the reasons of [`ConfigSpace::new`], and if the capabilities have no room in 192 bytes.
    pub fn with_vendor(
        identity: &Identity,
        description: &Description,
        msix: Option<&MsixLayout>,
        vendor: &[VendorCapability],
    ) -> Self {
        check(description, msix);
        let mut builder = Builder::new();
        builder.header(identity);
        if description.pin {
            builder.bytes[register::INTERRUPT_PIN] = PIN_A;
        }
        for bar in &description.bars {
            builder.bar(bar);
        }
        builder.capability(&capability::power_management());
        let express = builder.capability(&capability::express_endpoint());
        let msix = msix.map(|layout| builder.capability(&capability::msix(layout)));
        let vendor = vendor.iter().map(|one| builder.capability(&capability::vendor(one)));
        let vendor = vendor.collect();
        Self {
            vendor,
            initial: builder.bytes.clone(),
            bytes: builder.bytes,
            writable: builder.writable,
            msix,
            express,
            interrupt_status: false,
            pin_enabled: description.pin,
        }
    }

    /// Returns the offset of vendor-specific capability `number`, counted from 0.
    ///
    /// # Panics
    /// If there is no such capability: a programmer's error.
    pub fn vendor_capability(&self, number: usize) -> u16 {
        self.vendor[number] as u16
    }

    /// Fills `into` from `offset`; bytes past the end read as zeros.
    pub fn read(&self, offset: u16, into: &mut [u8]) {
        let from = self.bytes.get(usize::from(offset)..).unwrap_or_default();
        let there = from.len().min(into.len());
        into[..there].copy_from_slice(&from[..there]);
        into[there..].fill(0);
        let status = register::STATUS.checked_sub(usize::from(offset));
        if let Some(byte) = status.and_then(|at| into.get_mut(at))
            && self.interrupt_status
        {
            *byte |= status::INTERRUPT;
        }
    }

    /// Writes `from` at `offset`: only writable bits change, bytes past the end are dropped.
    pub fn write(&mut self, offset: u16, from: &[u8]) -> ConfigEffect {
        let start = usize::from(offset);
        for (at, &value) in (start..CONFIG_SIZE).zip(from) {
            let mask = self.writable[at];
            self.bytes[at] = self.bytes[at] & !mask | value & mask;
        }
        self.look_at_pin();
        // Initiate Function Level Reset always reads as zero, so it is no writable bit.
        match express::asks_for_reset(self.express, start, from) {
            true => ConfigEffect::FunctionLevelReset,
            false => ConfigEffect::None,
        }
    }

    /// Returns to the state after construction.
    pub fn reset(&mut self) {
        self.bytes.clone_from(&self.initial);
        self.interrupt_status = false;
        self.look_at_pin();
    }

    fn look_at_pin(&mut self) {
        let there = self.bytes[register::INTERRUPT_PIN] != 0;
        let disabled = word(&self.bytes, register::COMMAND) & command::INTERRUPT_DISABLE != 0;
        self.pin_enabled = there && !disabled && !self.msix_control().enabled;
    }

    /// Returns whether the function asserts its interrupt pin while its interrupt status is set: it
    /// has a pin, software has not disabled it (Command, Interrupt Disable), and MSI-X is off (PCI
    /// Local Bus 3.0, 6.2.2 and 6.8.2.3).
    #[inline]
    pub fn pin_enabled(&self) -> bool {
        self.pin_enabled
    }

    /// Sets the value of Status, Interrupt Status: whether an interrupt of the pin is pending, with
    /// the pin disabled or not. It is not part of the saved state.
    #[cfg(any(test, feature = "plane"))]
    pub fn set_interrupt_status(&mut self, pending: bool) {
        self.interrupt_status = pending;
    }

    /// Returns whether memory BARs answer (Command, Memory Space).
    #[cfg(any(test, feature = "fuzz"))]
    pub fn memory_enabled(&self) -> bool {
        word(&self.bytes, register::COMMAND) & command::MEMORY_SPACE != 0
    }

    /// Returns whether the function may reach guest memory and send messages (Command, Bus Master).
    #[cfg(any(test, feature = "plane"))]
    pub fn bus_master(&self) -> bool {
        word(&self.bytes, register::COMMAND) & command::BUS_MASTER != 0
    }

    /// Returns MSI-X Message Control; all off if the function has no MSI-X.
    pub fn msix_control(&self) -> MsixControl {
        let control = self.msix.map_or(0, |at| word(&self.bytes, at + msix::CONTROL));
        MsixControl::of(control)
    }

    /// Returns the address that software gave BAR `index`, or 0 if there is no such BAR. For a
    /// 64-bit BAR, `index` is its lower register.
    #[cfg(any(test, feature = "fuzz"))]
    pub fn bar_address(&self, index: u8) -> u64 {
        if index > 5 {
            return 0;
        }
        let at = register::BAR0 + 4 * usize::from(index);
        bar::address(dword(&self.bytes, at), dword(&self.bytes, at + 4))
    }

    /// Returns the registers that software may have changed, for a successor.
    pub fn save(&self) -> ConfigState {
        let registers = self
            .writable_registers()
            .map(|offset| Register { offset: offset as u16, value: dword(&self.bytes, offset) });
        ConfigState { version: VERSION, registers: registers.collect() }
    }

    /// Takes over a saved state of a space made with the same parameters.
    ///
    /// # Errors
    /// [`StateError`] if the state has another version, other registers than this space, or other
    /// values in read-only bits; the space is then in its state after a reset. Interrupt Pin may
    /// differ, and keeps this space's value: a predecessor may not have had the pin yet.
    pub fn restore(&mut self, state: &ConfigState) -> Result<(), StateError> {
        self.reset();
        if state.version != VERSION {
            return Err(StateError::Unknown(format!("configuration space {}", state.version)));
        }
        let own: Vec<usize> = self.writable_registers().collect();
        if !own.iter().copied().eq(state.registers.iter().map(|saved| usize::from(saved.offset))) {
            return Err(StateError::Inconsistent("other configuration registers".into()));
        }
        for saved in &state.registers {
            let offset = usize::from(saved.offset);
            let own = dword(&self.bytes, offset);
            let writable = dword(&self.writable, offset);
            let pin = if offset == register::INTERRUPT_LINE { 0xff << 8 } else { 0 };
            if (saved.value ^ own) & !(writable | pin) != 0 {
                self.reset();
                let text = format!("read-only bits of configuration register {offset:#x} differ");
                return Err(StateError::Inconsistent(text));
            }
            let value = saved.value & writable | own & !writable;
            put(&mut self.bytes, offset, &value.to_le_bytes());
        }
        self.look_at_pin();
        Ok(())
    }

    /// Returns the offsets of the 32-bit registers in which software can change a bit.
    fn writable_registers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..CONFIG_SIZE).step_by(4).filter(|&offset| dword(&self.writable, offset) != 0)
    }
}

/// Asserts the rules of a [`Description`] and the [`MsixLayout`] that belongs to it.
fn check(description: &Description, msix: Option<&MsixLayout>) {
    let mut free = 0;
    for bar in &description.bars {
        assert!(bar.index >= free, "BARs ascend and a 64-bit BAR takes two");
        free = bar.index + if bar.wide { 2 } else { 1 };
        assert!(free <= 6, "a type 0 header has six BAR registers");
        let sizes = if bar.ports { 4..=256 } else { 4096..=1 << 63 };
        assert!(bar.size.is_power_of_two() && sizes.contains(&bar.size), "a BAR's size");
        assert!(bar.wide || bar.size <= 1 << 31, "a BAR of this size needs 64 bits");
        assert!(!(bar.wide && bar.ports), "ports have 32-bit addresses");
    }
    if let Some(layout) = msix {
        assert!(layout.vectors() == description.vectors, "one table entry per vector");
        let bar = description.bars.iter().find(|bar| bar.index == layout.bar());
        let size = bar.map_or(0, |bar| bar.size);
        assert!(layout.table_range().end <= size, "the MSI-X table lies in its BAR");
        assert!(layout.pba_range().end <= size, "the MSI-X PBA lies in its BAR");
    }
}

/// A configuration space while it is laid out.
struct Builder {
    bytes: Box<[u8; CONFIG_SIZE]>,
    writable: Box<[u8; CONFIG_SIZE]>,
    /// The offset of the next capability.
    next: usize,
    /// The offset of the byte that is to point to the next capability.
    link: usize,
}

impl Builder {
    fn new() -> Self {
        let zeros = || Box::new([0; CONFIG_SIZE]);
        Self {
            bytes: zeros(),
            writable: zeros(),
            next: register::END,
            link: register::CAPABILITIES,
        }
    }

    fn header(&mut self, identity: &Identity) {
        put(&mut self.bytes, register::VENDOR, &identity.vendor.to_le_bytes());
        put(&mut self.bytes, register::DEVICE, &identity.device.to_le_bytes());
        put(&mut self.writable, register::COMMAND, &command::WRITABLE.to_le_bytes());
        put(&mut self.bytes, register::STATUS, &status::CAPABILITIES_LIST.to_le_bytes());
        put(&mut self.bytes, register::REVISION, &[identity.revision]);
        put(&mut self.bytes, register::CLASS, &identity.class.to_le_bytes()[..3]);
        // Cache Line Size and Interrupt Line are scratch for software in PCI Express functions
        // (PCIe Base 5.0, 7.5.1.1.7 and 7.5.1.1.12).
        put(&mut self.writable, register::CACHE_LINE_SIZE, &[0xff]);
        put(&mut self.writable, register::INTERRUPT_LINE, &[0xff]);
        put(&mut self.bytes, register::SUBSYSTEM_VENDOR, &identity.subsystem_vendor.to_le_bytes());
        put(&mut self.bytes, register::SUBSYSTEM, &identity.subsystem.to_le_bytes());
    }

    /// Adds a BAR. Address bits from the BAR's size on are writable, the others read as zero (PCI
    /// Local Bus 3.0, 6.2.5.1).
    fn bar(&mut self, bar: &Bar) {
        let at = register::BAR0 + 4 * usize::from(bar.index);
        let fixed = if bar.ports { bar::PORT_ADDRESS } else { bar::ADDRESS };
        let mask = (!(bar.size - 1) & fixed).to_le_bytes();
        if bar.ports {
            put(&mut self.bytes, at, &bar::PORTS.to_le_bytes());
            put(&mut self.writable, at, &mask[..4]);
            let command = command::WRITABLE | command::IO_SPACE;
            put(&mut self.writable, register::COMMAND, &command.to_le_bytes());
        } else if bar.wide {
            put(&mut self.bytes, at, &bar::WIDE.to_le_bytes());
            put(&mut self.writable, at, &mask);
        } else {
            put(&mut self.writable, at, &mask[..4]);
        }
    }

    /// Chains a capability (PCI Local Bus 3.0, 6.7) and returns its offset.
    fn capability(&mut self, capability: &capability::Capability) -> usize {
        let at = self.next;
        self.bytes[self.link] = at as u8;
        put(&mut self.bytes, at, &capability.bytes);
        put(&mut self.writable, at, &capability.writable);
        self.link = at + 1;
        self.next = (at + capability.bytes.len()).next_multiple_of(4);
        assert!(self.next <= 0x100, "capabilities lie in the first 256 bytes");
        at
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
