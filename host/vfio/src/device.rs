//! An open device: its regions, interrupts and reset.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use slipway_pci_spec::{BARS, register};

use crate::ioctl::{self, DeviceInfo, IrqInfo, RegionInfo, SetIrqs, call};
use crate::space::Space;
use crate::{Error, PciAddress};

/// The index of configuration space among the regions. The BARs come first.
pub(crate) const CONFIG: usize = 7;
/// The number of regions: BARs, expansion ROM, configuration space.
const REGIONS: usize = 8;
/// Types of interrupts.
pub(crate) mod irq {
    pub const INTX: u32 = 0;
    pub const MSIX: u32 = 2;
}
/// `VFIO_DEVICE_FLAGS_RESET`.
const CAN_RESET: u32 = 1 << 0;
/// `VFIO_DEVICE_FLAGS_PCI`.
const IS_PCI: u32 = 1 << 1;
/// The time for which a reset is tried while something else of the kernel's has the device.
const PATIENCE: Duration = Duration::from_secs(2);
/// The pause between two tries.
const RETRY: Duration = Duration::from_millis(10);

/// A region of the device, which is a part of its file.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Region {
    pub size: u64,
    pub offset: u64,
}

/// A hardware function that this process has open. Dropping it closes the function, which the
/// kernel resets then.
pub struct Device {
    address: PciAddress,
    // Closed in this order: a group cannot leave its container while a device is open.
    file: OwnedFd,
    _group: Option<OwnedFd>,
    space: Space,
    regions: [Region; REGIONS],
    vectors: u16,
    has_pin: bool,
    /// The last reset failed: the function is off the bus.
    failed: AtomicBool,
}

impl Device {
    /// Learns the shape of a device that was just opened.
    pub(crate) fn new(
        address: PciAddress,
        (file, group): (OwnedFd, Option<OwnedFd>),
        space: Space,
    ) -> Result<Self, Error> {
        let refused = |errno: Errno| {
            let step = "learn the shape";
            Error::Refused { address, step, source: errno.into() }
        };
        let mut info = DeviceInfo::default();
        call(&file, &mut info).map_err(refused)?;
        if info.flags & IS_PCI == 0 || info.flags & CAN_RESET == 0 {
            let why = "cannot be reset alone, so that its owners could not follow each other";
            return Err(Error::Unfit { address, why });
        }
        let mut regions = [Region::default(); REGIONS];
        for (index, region) in (0..).zip(&mut regions) {
            let mut info = RegionInfo { index, ..Default::default() };
            call(&file, &mut info).map_err(refused)?;
            *region = Region { size: info.size, offset: info.offset };
        }
        let count = |index| {
            let mut info = IrqInfo { index, ..Default::default() };
            call(&file, &mut info).map(|()| info.count).map_err(refused)
        };
        let vectors = u16::try_from(count(irq::MSIX)?).unwrap_or(u16::MAX);
        let has_pin = count(irq::INTX)? > 0;
        let failed = AtomicBool::new(false);
        Ok(Self { address, file, _group: group, space, regions, vectors, has_pin, failed })
    }

    /// Returns the function's address.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// Returns the memory that the device reaches.
    pub(crate) fn space(&self) -> &Space {
        &self.space
    }

    /// Returns the number of MSI-X vectors.
    pub(crate) fn vectors(&self) -> u16 {
        self.vectors
    }

    /// Returns whether the function has an interrupt pin.
    pub(crate) fn has_pin(&self) -> bool {
        self.has_pin
    }

    /// Returns the bytes of a region; 0 if there is none.
    pub(crate) fn size(&self, region: usize) -> u64 {
        self.regions.get(region).map_or(0, |region| region.size)
    }

    /// Reads from a region.
    ///
    /// # Errors
    /// The range leaves the region; the device does not answer now.
    pub(crate) fn read(&self, region: usize, offset: u64, into: &mut [u8]) -> Result<(), Errno> {
        let at = self.place(region, offset, into.len())?;
        let len = into.len();
        let read = rustix::io::pread(&self.file, into, at)?;
        if read == len { Ok(()) } else { Err(Errno::IO) }
    }

    /// Writes to a region.
    ///
    /// # Errors
    /// As for [`Device::read`].
    pub(crate) fn write(&self, region: usize, offset: u64, from: &[u8]) -> Result<(), Errno> {
        let at = self.place(region, offset, from.len())?;
        let written = rustix::io::pwrite(&self.file, from, at)?;
        if written == from.len() { Ok(()) } else { Err(Errno::IO) }
    }

    /// Returns the offset of a range of a region in the device's file.
    fn place(&self, region: usize, offset: u64, len: usize) -> Result<u64, Errno> {
        let region = self.regions.get(region).ok_or(Errno::INVAL)?;
        let end = offset.checked_add(len as u64).filter(|end| *end <= region.size);
        end.and(region.offset.checked_add(offset)).ok_or(Errno::INVAL)
    }

    /// Sets interrupts.
    pub(crate) fn set_irqs(&self, request: &SetIrqs) -> Result<(), Errno> {
        request.call(&self.file)
    }

    /// Keeps the device from the bus: it masters none, its registers have no address.
    pub(crate) fn stop(&self) -> Result<(), Errno> {
        self.write(CONFIG, register::COMMAND as u64, &[0; 2])?;
        self.write(CONFIG, register::BAR0 as u64, &[0; 4 * BARS])?;
        self.write(CONFIG, register::INTERRUPT_LINE as u64, &[0])
    }

    /// Resets the function alone: on return it is as after power-on, and does no DMA. Takes 100 ms
    /// and more. A function whose reset fails is off the bus until one succeeds.
    ///
    /// # Errors
    /// The function is not fit for another owner.
    pub fn reset(&self) -> Result<(), Error> {
        let outcome = self.try_reset();
        self.failed.store(outcome.is_err(), Ordering::Release);
        let (address, step) = (self.address, "reset the registers");
        outcome.map_err(|errno| Error::Refused { address, step, source: errno.into() })
    }

    fn try_reset(&self) -> Result<(), Errno> {
        // The kernel restores the registers that it saves before the reset.
        self.stop()?;
        let until = Instant::now() + PATIENCE;
        loop {
            match ioctl::reset(&self.file) {
                Err(Errno::AGAIN) if Instant::now() < until => std::thread::sleep(RETRY),
                outcome => return outcome.and_then(|()| self.stop()),
            }
        }
    }

    /// Takes all memory from the device, which has no client. Nothing is left to take, unless the
    /// driver of the last client could not.
    ///
    /// # Errors
    /// The device may still reach memory of the last client.
    pub fn unmap_all(&self) -> Result<(), Error> {
        let (address, step) = (self.address, "unmap the memory");
        let unmapped = self.space.clear();
        unmapped.map_err(|errno| Error::Refused { address, step, source: errno.into() })
    }

    /// Returns whether the last reset failed.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    /// Bytes of BAR 0 of [`fake`].
    pub(crate) const BAR: u64 = 0x4000;

    /// Returns a device whose registers are memory: configuration space at the start of a file, BAR
    /// 0 behind it. The file knows no request, so interrupts and resets fail.
    pub(crate) fn fake(config: &[u8]) -> Device {
        let file = memfd_create("device", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 0x1000 + BAR).unwrap();
        assert_eq!(rustix::io::pwrite(&file, config, 0).unwrap(), config.len());
        let mut regions = [Region::default(); REGIONS];
        regions[0] = Region { size: BAR, offset: 0x1000 };
        regions[CONFIG] = Region { size: 0x100, offset: 0 };
        let space = Space::Container(memfd_create("space", MemfdFlags::CLOEXEC).unwrap());
        let (address, failed) = ("0000:01:10.0".parse().unwrap(), AtomicBool::new(false));
        let (vectors, has_pin) = (3, false);
        Device { address, file, _group: None, space, regions, vectors, has_pin, failed }
    }

    #[test]
    fn accesses_stay_within_their_region() {
        let device = fake(&[]);
        device.write(0, BAR - 4, &[1, 2, 3, 4]).unwrap();
        let mut bytes = [0; 4];
        device.read(0, BAR - 4, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 3, 4]);
        for (region, offset) in [(0, BAR - 3), (0, u64::MAX), (1, 0), (CONFIG, 0xfd), (9, 0)] {
            assert_eq!(device.write(region, offset, &bytes), Err(Errno::INVAL), "{region}");
            assert_eq!(device.read(region, offset, &mut bytes), Err(Errno::INVAL), "{region}");
        }
    }

    #[test]
    fn a_device_whose_reset_fails_is_known_as_such() {
        let device = fake(&[]);
        device.write(CONFIG, register::COMMAND as u64, &[7, 0]).unwrap();
        let refused = device.reset().unwrap_err().to_string();
        assert!(refused.contains("reset the registers of PCI function 0000:01:10.0"), "{refused}");
        assert!(device.has_failed());
        let mut command = [1; 2];
        device.read(CONFIG, register::COMMAND as u64, &mut command).unwrap();
        assert_eq!(command, [0; 2], "it masters no bus whatever the reset does");
    }
}
