//! The functions of the VM: connections to vfio-user servers that have the guest's memory.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use slipway_ram::{DmaMap, Permissions, Region};
use slipway_vfio_user_client::{Client, Registers};
use slipway_vfio_user_spec::region;
use slipway_vmm::layout;

use crate::disks::Disks;
use crate::nic::Nic;
use crate::place::DriverMemory;

/// The longest wait for a server: hundreds of starts may be ahead of this one.
const PATIENCE: Duration = Duration::from_secs(60);
/// The first and the longest time between two looks of a driver at its function. A driver in a
/// guest would sleep until an interrupt; a start counts the rest of a pause as its own time.
const PAUSES: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(4));
/// The functions' place on the bus of the machine that there would be: PCI device 4 is the first.
const FIRST_SLOT: usize = 4;
/// The part of the guest's memory that each function's driver has, and where the first begins.
const ARENA: u64 = 4 << 20;
const ARENAS: u64 = 16 << 20;
/// The most functions: their arenas lie within the smallest memory of a sandbox.
const MOST: usize = 16;

/// Registers of the type 0 header (PCI Local Bus 3.0, 6.2.1).
const VENDOR: usize = 0;
const COMMAND: u64 = 4;
const BASE_CLASS: usize = 11;
/// Bytes of the header.
const HEADER: usize = 64;
/// Command: Memory Space, Bus Master, Interrupt Disable.
const DRIVEN: u16 = 1 << 1 | 1 << 2 | 1 << 10;
/// Base class codes (PCI Code and ID Assignment 1.11).
const MASS_STORAGE: u8 = 1;
const NETWORK: u8 = 2;
/// The vendor of virtio devices (virtio 1.2, section 4.1.2).
const VIRTIO: u16 = 0x1af4;

/// The functions, of which no driver is in place yet.
pub struct Functions {
    /// The NVMe controllers, by their number among the functions.
    pub disks: BTreeMap<usize, Disks>,
    /// The network interface.
    pub nic: Option<Nic>,
    /// The drivers' view of the memory, which they have as long as this lives.
    pub map: DmaMap,
}

impl Functions {
    /// Negotiates on each connection, and hands the function all of the guest's memory, where a
    /// `slipway-vmm` would have it.
    ///
    /// # Errors
    /// A server does not answer or refuses, or a function is of a kind without a driver here.
    pub fn connect(connections: Vec<OwnedFd>, memory: &OwnedFd) -> Result<Self> {
        ensure!(connections.len() <= MOST, "{} functions: at most {MOST}", connections.len());
        let bytes = rustix::fs::fstat(memory).context("the memory")?.st_size as u64;
        let needed = ARENAS + ARENA * connections.len() as u64;
        ensure!(bytes >= needed, "{bytes} bytes of memory: at least {needed}");
        let mut map = DmaMap::new();
        let whole = Region::mapped(memory.as_fd(), 0, needed, Permissions::READ_WRITE)?;
        map.add(0, whole).context("mapping the memory")?;
        let mut functions = Self { disks: BTreeMap::new(), nic: None, map };
        for (number, connection) in connections.into_iter().enumerate() {
            let base = ARENAS + ARENA * number as u64;
            let place = DriverMemory { memory: functions.map.memory(), base, len: ARENA };
            let added = functions.add(number, connection, (memory, bytes), place);
            added.with_context(|| format!("function {number}"))?;
        }
        Ok(functions)
    }

    fn add(
        &mut self,
        number: usize,
        connection: OwnedFd,
        (memory, bytes): (&OwnedFd, u64),
        place: DriverMemory,
    ) -> Result<()> {
        let mut client = Client::negotiate_as_vmm(connection, PATIENCE)?;
        client.device_info()?;
        for (range, offset) in layout::ram(bytes) {
            client.map(range.start, range.end - range.start, memory.as_fd(), offset, true)?;
        }
        let mut header = [0; HEADER];
        client.read(region::CONFIG, 0, &mut header)?;
        let class = header[BASE_CLASS];
        let vendor = u16::from_le_bytes([header[VENDOR], header[VENDOR + 1]]);
        client.write(region::CONFIG, COMMAND, &DRIVEN.to_le_bytes())?;
        let registers = Registers::new(client, PATIENCE).with_pauses(PAUSES.0, PAUSES.1);
        match (class, vendor) {
            (MASS_STORAGE, _) => drop(self.disks.insert(number, Disks::new(registers, place))),
            (NETWORK, VIRTIO) if self.nic.is_none() => {
                self.nic = Some(Nic::new(registers, place));
            }
            (NETWORK, VIRTIO) => bail!("a second network interface"),
            (class, vendor) => bail!("no driver for class {class:#x} of vendor {vendor:#x}"),
        }
        Ok(())
    }
}

/// Returns the number of the function at the PCI address `text`, such as 0000:00:04.0. The empty
/// text stands for the first function.
///
/// # Errors
/// There is no such address on the machine's bus.
pub fn number_of(text: &str) -> Result<usize> {
    if text.is_empty() {
        return Ok(0);
    }
    let slot = text.strip_prefix("0000:00:").and_then(|text| text.strip_suffix(".0"));
    let slot = slot.and_then(|slot| usize::from_str_radix(slot, 16).ok());
    let number = slot.and_then(|slot| slot.checked_sub(FIRST_SLOT));
    number.with_context(|| format!("{text:?} is no address of a function"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_the_machine() {
        assert_eq!(number_of("").unwrap(), 0);
        assert_eq!(number_of("0000:00:04.0").unwrap(), 0);
        assert_eq!(number_of("0000:00:0b.0").unwrap(), 7);
        for bad in ["0000:00:03.0", "0000:01:04.0", "0000:00:04.1", "0000:00:.0", "4"] {
            assert!(number_of(bad).is_err(), "{bad}");
        }
    }
}
