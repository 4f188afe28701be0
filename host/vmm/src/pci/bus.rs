//! Bus 0: which device an access belongs to.

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, RwLock};

use kvm_ioctls::VmFd;

use crate::layout::{DEVICE_SHIFT, FUNCTION_SHIFT, PCI_WINDOW};
use crate::lock::lock;
use crate::{Error, Result};

use super::shadow::Shadow;
use super::{Slot, SlotState};

/// Devices of a bus.
pub const DEVICES: usize = 32;

/// A BAR at its address.
struct Placed {
    range: Range<u64>,
    slot: Arc<Slot>,
    bar: u8,
}

/// Bus 0.
#[derive(Default)]
pub struct Bus {
    slots: RwLock<[Option<Arc<Slot>>; DEVICES]>,
    /// The BARs that answer, in the order in which they were placed. If two overlap, the first
    /// answers.
    placed: RwLock<Vec<Placed>>,
    /// The bytes of the window, from its start, of which BARs have been given addresses.
    given: Mutex<u64>,
    shadow: OnceLock<Shadow>,
}

impl Bus {
    /// Adds a device and gives its BARs addresses, as firmware would.
    ///
    /// # Errors
    /// [`Error::Config`] if the slot's number is taken or no bus has it, or the window is full.
    pub fn add(&self, slot: Arc<Slot>) -> Result<()> {
        self.plug(Arc::clone(&slot))?;
        for &(bar, size) in &slot.bars {
            let address = self.allocate(size)?;
            slot.place(bar, address, &mut |bar, range| self.move_bar(&slot, bar, range));
        }
        Ok(())
    }

    /// Adds a device whose BARs have no address: the guest gives them some. Linux does so for every
    /// device that it finds later than at its start, whatever the BARs hold, and it alone knows
    /// which addresses it has left free.
    ///
    /// # Errors
    /// [`Error::Config`] if the slot's number is taken or no bus has it.
    pub fn plug(&self, slot: Arc<Slot>) -> Result<()> {
        let number = usize::from(slot.number());
        let mut slots = self.slots.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        let place = slots.get_mut(number).filter(|place| place.is_none());
        let place = place.ok_or_else(|| {
            Error::Config(format!("PCI device {number} cannot be added: no such free slot"))
        })?;
        *place = Some(slot);
        Ok(())
    }

    /// Lets a device of the bus go on as a predecessor's did. The function's configuration space
    /// has its saved values already.
    ///
    /// # Errors
    /// [`Error::State`].
    pub fn restore(&self, slot: &Arc<Slot>, saved: &SlotState) -> Result<()> {
        slot.restore(saved, &mut |bar, range| self.move_bar(slot, bar, range))
    }

    /// Returns whether the guest reads configuration space without leaving it.
    pub fn is_shown(&self) -> bool {
        self.shadow.get().is_some_and(Shadow::is_active)
    }

    /// Takes device `number` off the bus: no access that begins later reaches it. What KVM does for
    /// it goes on until [`Bus::close`]. Waits for nobody.
    pub fn eject(&self, number: u8) {
        let slot = {
            let mut slots = self.slots.write().unwrap_or_else(|poisoned| poisoned.into_inner());
            slots.get_mut(usize::from(number)).and_then(Option::take)
        };
        if let Some(slot) = slot {
            self.remove_bars(&slot);
        }
    }

    /// Ends what is left of a device that was ejected. Waits for accesses that began before, and so
    /// for the function's server: call it on a thread of its own.
    pub fn close(&self, slot: &Arc<Slot>) {
        slot.close();
        // An access that began before may have moved a BAR after the ejection.
        self.remove_bars(slot);
    }

    fn remove_bars(&self, slot: &Arc<Slot>) {
        let mut placed = self.placed.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        placed.retain(|placed| !Arc::ptr_eq(&placed.slot, slot));
    }

    fn allocate(&self, size: u64) -> Result<u64> {
        let mut given = lock(&self.given);
        let start = (PCI_WINDOW.start + *given).checked_next_multiple_of(size);
        let end = start.and_then(|start| start.checked_add(size));
        match (start, end) {
            (Some(start), Some(end)) if end <= PCI_WINDOW.end => {
                *given = end - PCI_WINDOW.start;
                Ok(start)
            }
            _ => Err(Error::Config("the BARs of all functions need more than 512 MiB".into())),
        }
    }

    fn slot(&self, number: usize) -> Option<Arc<Slot>> {
        let slots = self.slots.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        slots.get(number)?.clone()
    }

    /// Returns the device and the register of an offset in ECAM. Returns `None` if no function is
    /// there.
    fn register(&self, offset: u64) -> Option<(Arc<Slot>, u16)> {
        let function = offset >> FUNCTION_SHIFT & 7;
        let slot = self.slot((offset >> DEVICE_SHIFT) as usize)?;
        (function == 0).then_some((slot, offset as u16 & 0xfff))
    }

    /// Reads configuration space; `into` keeps its bytes if no function is there.
    pub fn config_read(&self, offset: u64, into: &mut [u8]) {
        if let Some((slot, register)) = self.register(offset) {
            slot.config_read(register, into);
        }
    }

    /// Writes configuration space.
    pub fn config_write(&self, offset: u64, from: &[u8]) {
        if let Some((slot, register)) = self.register(offset) {
            slot.config_write(register, from, &mut |bar, range| {
                self.move_bar(&slot, bar, range);
            });
            if let Some(shadow) = self.shadow.get() {
                shadow.written(&slot, register);
            }
        }
    }

    /// Lets the guest read the configuration space of `devices` without leaving it, if KVM can. The
    /// registers of those devices change by the guest's writes alone. Works once.
    ///
    /// # Errors
    /// [`Error::System`], [`Error::Kvm`].
    pub fn show(&self, vm: &Arc<VmFd>, devices: Range<u8>) -> Result<()> {
        let slots = self.slots.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let shown = slots[usize::from(devices.start)..usize::from(devices.end)].iter().flatten();
        if let Some(shadow) = Shadow::new(vm, devices, shown)? {
            let _ = self.shadow.set(shadow);
        }
        Ok(())
    }

    fn find(&self, address: u64) -> Option<(Arc<Slot>, u8, u64)> {
        let placed = self.placed.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let found = placed.iter().find(|placed| placed.range.contains(&address))?;
        Some((Arc::clone(&found.slot), found.bar, address - found.range.start))
    }

    /// Reads from the BAR at `address`; `into` keeps its bytes if there is none.
    pub fn read(&self, address: u64, into: &mut [u8]) {
        if let Some((slot, bar, offset)) = self.find(address) {
            slot.read(bar, offset, into);
        }
    }

    /// Writes to the BAR at `address`.
    pub fn write(&self, address: u64, from: &[u8]) {
        if let Some((slot, bar, offset)) = self.find(address) {
            slot.write(bar, offset, from);
        }
    }

    /// Lets BAR `bar` of `slot` answer at `range`, or nowhere.
    fn move_bar(&self, slot: &Arc<Slot>, bar: u8, range: Option<Range<u64>>) {
        let mut placed = self.placed.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        placed.retain(|placed| !(placed.bar == bar && Arc::ptr_eq(&placed.slot, slot)));
        if let Some(range) = range {
            placed.push(Placed { range, slot: Arc::clone(slot), bar });
        }
    }

    /// Tells the devices in `devices`, a bit each, that the guest has ended the interrupt of their
    /// pin.
    pub fn end_of_interrupt(&self, devices: u32) {
        for number in 0..DEVICES {
            if devices >> number & 1 != 0
                && let Some(slot) = self.slot(number)
            {
                slot.end_of_interrupt();
            }
        }
    }
}
