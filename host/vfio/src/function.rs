//! A hardware device as a PCI function ([`Function`]): accesses to configuration space and BARs go
//! to the device, but for MSI-X, which [`Msix`] keeps, and MSI, which is hidden.

use std::sync::Arc;

use slipway_pci::{Access, Bar, Description, Function, Progress, StateError};
use slipway_pci_spec::{BARS, bar, register};

use crate::device::CONFIG;
use crate::msix::{Msix, around, past_msi};
use crate::{Device, Error};

/// A hardware function. Its calls may block, so its host must have a thread for it alone.
pub struct HardwareFunction {
    device: Arc<Device>,
    description: Description,
    msix: Option<Msix>,
    /// The offset and the value of the byte of configuration space by which the list of
    /// capabilities skips MSI. `None` if the device has no MSI.
    hidden: Option<(usize, u8)>,
}

impl HardwareFunction {
    /// Makes the function of a device that has been reset.
    ///
    /// # Errors
    /// The device does not answer, or has a BAR whose size is no power of two.
    pub fn new(device: Arc<Device>) -> Result<Self, Error> {
        let address = device.address();
        let mut config = [0; 0x100];
        device.read(CONFIG, 0, &mut config).map_err(|errno| {
            let step = "read the configuration space";
            Error::Refused { address, step, source: errno.into() }
        })?;
        let word = |at: usize| {
            let bytes = config.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
            bytes.map_or(0, u32::from_le_bytes)
        };
        let bars = bars(&device, word);
        if !bars.iter().all(|bar| bar.size.is_power_of_two()) {
            return Err(Error::Unfit { address, why: "has a BAR whose size is no power of two" });
        }
        let msix = Msix::find(word);
        let vectors = msix.as_ref().map_or(0, Msix::vectors).min(device.vectors());
        let description = Description { bars, vectors, pin: device.has_pin() };
        let hidden = past_msi(word);
        Ok(Self { device, description, msix, hidden })
    }

    /// Returns whether the device is off the bus, since its reset has failed.
    fn is_off(&self) -> bool {
        self.device.has_failed()
    }
}

/// Returns the BARs that a device has. `word` returns the 32-bit word at an offset of configuration
/// space.
fn bars(device: &Device, word: impl Fn(usize) -> u32) -> Vec<Bar> {
    let (mut bars, mut is_upper) = (Vec::new(), false);
    for number in 0..BARS {
        let (size, kind) = (device.size(number), word(register::BAR0 + 4 * number));
        if std::mem::take(&mut is_upper) || size == 0 {
            continue;
        }
        let ports = kind & bar::PORTS != 0;
        let wide = !ports && kind & bar::WIDE != 0;
        is_upper = wide;
        let index = number as u8;
        bars.push(Bar { index, size, wide, ports, doorbells: None, notifications: None });
    }
    bars
}

impl Function for HardwareFunction {
    fn description(&self) -> &Description {
        &self.description
    }

    fn config_read(&mut self, offset: u16, into: &mut [u8]) {
        into.fill(0);
        let start = usize::from(offset);
        let there = self.device.size(CONFIG).saturating_sub(offset.into());
        let len = usize::try_from(there).unwrap_or(usize::MAX).min(into.len());
        let into = &mut into[..len];
        if self.is_off() || self.device.read(CONFIG, offset.into(), into).is_err() {
            return into.fill(0xff);
        }
        if let Some(msix) = &self.msix {
            msix.show(start, into);
        }
        if let Some((at, value)) = self.hidden
            && let Some(byte) = at.checked_sub(start).and_then(|at| into.get_mut(at))
        {
            *byte = value;
        }
    }

    fn config_write(&mut self, offset: u16, from: &[u8]) {
        if self.is_off() {
            return;
        }
        let start = usize::from(offset);
        let hole = self.msix.as_ref().map_or(0..0, Msix::capability);
        if let Some(msix) = &mut self.msix {
            msix.take(start, from);
        }
        for part in around(start, from.len(), hole) {
            if !part.is_empty() {
                // A write fails if no device answers there. A bus drops such a write.
                let _ = self.device.write(CONFIG, (start + part.start) as u64, &from[part]);
            }
        }
    }

    /// Reads from a BAR. A device that does not answer (it sleeps, or is off) reads as ones, as on
    /// a bus.
    fn read(&mut self, bar: u8, offset: u64, into: &mut [u8]) -> Access {
        match &self.msix {
            Some(msix) if msix.holds(bar, offset, into.len()) => msix.read(bar, offset, into),
            _ if self.is_off() => into.fill(0xff),
            _ => {
                if self.device.read(bar.into(), offset, into).is_err() {
                    into.fill(0xff);
                }
            }
        }
        Access::Done
    }

    fn write(&mut self, bar: u8, offset: u64, from: &[u8]) -> Access {
        let is_off = self.is_off();
        match &mut self.msix {
            Some(msix) if msix.holds(bar, offset, from.len()) => msix.write(bar, offset, from),
            _ if is_off => {}
            _ => {
                // A write that fails is dropped, as on a bus.
                let _ = self.device.write(bar.into(), offset, from);
            }
        }
        Access::Done
    }

    fn poll(&mut self) -> Progress {
        Progress::Idle(None)
    }

    /// Resets the device; blocks for 100 ms and more. A device whose reset fails is off the bus:
    /// its registers read as ones.
    fn reset(&mut self) {
        if let Some(msix) = &mut self.msix {
            msix.reset();
        }
        if let Err(error) = self.device.reset() {
            tracing::error!(%error, "a hardware function is off the bus");
        }
    }

    /// Returns `true`. The device need not become quiet: the IOMMU ends its accesses to a range
    /// when the range is unmapped.
    fn quiesce(&mut self) -> bool {
        true
    }

    fn save(&self) -> Vec<u8> {
        Vec::new()
    }

    fn take_over(&mut self, _: &[u8]) -> Result<(), StateError> {
        Err(StateError::Unknown("a hardware function has no state that is saved".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::tests::{BAR, fake};
    use crate::msix::tests::config;

    fn function() -> (HardwareFunction, Arc<Device>) {
        let device = Arc::new(fake(&config()));
        (HardwareFunction::new(device.clone()).unwrap(), device)
    }

    #[test]
    fn the_shape_is_the_device_s() {
        let (function, _) = function();
        let bar = Bar {
            index: 0,
            size: BAR,
            wide: true,
            ports: false,
            doorbells: None,
            notifications: None,
        };
        let shape = Description { bars: vec![bar], vectors: 3, pin: false };
        assert_eq!(*function.description(), shape);
    }

    #[test]
    fn configuration_space_is_the_device_s_but_for_msi_and_msix() {
        let (mut function, device) = function();
        let mut bytes = [0xee; 0x110];
        function.config_read(0, &mut bytes);
        assert_eq!(bytes[..4], [0x86, 0x80, 0x20, 0x15]);
        assert_eq!((bytes[0x34], bytes[0x53]), (0x50, 0), "MSI and the device's own bit show");
        assert_eq!(bytes[0x100..], [0; 0x10]);
        // Message Control goes no further, the byte behind the capability does.
        function.config_write(0x50, &[0, 0, 0xff, 0xff, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let mut after = [0; 0x10];
        device.read(CONFIG, 0x50, &mut after).unwrap();
        assert_eq!(after[..12], config()[0x50..0x5c]);
        assert_eq!(after[12], 9);
        let mut control = [0; 1];
        function.config_read(0x53, &mut control);
        assert_eq!(control, [0xc0]);
    }

    #[test]
    fn registers_are_the_device_s_but_for_the_table() {
        let (mut function, device) = function();
        assert_eq!(function.write(0, 0x10, &[1, 2, 3, 4]), Access::Done);
        assert_eq!(function.write(0, 0x2000, &[1, 2, 3, 4]), Access::Done);
        let mut bytes = [0; 4];
        device.read(0, 0x10, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 3, 4]);
        device.read(0, 0x2000, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 4], "the table of the device was written");
        assert_eq!(function.read(0, 0x2000, &mut bytes), Access::Done);
        assert_eq!(bytes, [1, 2, 3, 4]);
    }

    #[test]
    fn a_device_whose_reset_failed_is_off_the_bus() {
        let (mut function, device) = function();
        function.write(0, 0x10, &[1, 2, 3, 4]);
        function.reset();
        let mut bytes = [0; 4];
        function.read(0, 0x10, &mut bytes);
        assert_eq!(bytes, [0xff; 4]);
        function.config_read(0, &mut bytes);
        assert_eq!(bytes, [0xff; 4]);
        function.config_write(register::COMMAND as u16, &[7, 0]);
        let mut command = [0xff; 2];
        device.read(CONFIG, register::COMMAND as u64, &mut command).unwrap();
        assert_eq!(command, [0; 2], "it was given the bus");
    }
}
