//! MSI-X of a device, as its client sees it.
//!
//! The kernel programs the device's own table, by the eventfds that interrupts are routed to. The
//! client's VMM has a table of its own for the guest. So the capability's control bits and the
//! table are kept here for whoever reads them, and no access to either reaches the device.

use std::ops::Range;

use slipway_pci_spec::msix::{
    CONTROL, ENABLE, ENTRY, FUNCTION_MASK, LEN, MASKED, VECTOR_CONTROL, VectorLayout,
};
use slipway_pci_spec::{capabilities, capability, register};

/// The ID of MSI (PCI Local Bus 3.0, 6.8.1), which the server has not.
const MSI: u8 = 0x05;

/// The capability, table and pending bits of a device.
pub(crate) struct Msix {
    /// The offset of the capability in configuration space.
    at: usize,
    /// The bits that the client has set.
    control: u16,
    places: VectorLayout,
    table: Vec<u8>,
}

impl Msix {
    /// Finds the capability, if the device has one. `read` returns the 32-bit word at an offset of
    /// configuration space.
    pub fn find(read: impl Fn(usize) -> u32) -> Option<Self> {
        let found = capabilities(&read).find(|(_, header)| *header as u8 == capability::MSIX);
        let (at, _) = found?;
        let places = VectorLayout::read(at, read);
        let table = vec![0; ENTRY * usize::from(places.vectors)];
        let mut msix = Self { at, control: 0, places, table };
        msix.reset();
        Some(msix)
    }

    /// Returns the number of vectors.
    pub fn vectors(&self) -> u16 {
        self.places.vectors
    }

    /// Returns to the state after a reset: off, every vector masked.
    pub fn reset(&mut self) {
        self.control = 0;
        self.table.fill(0);
        for entry in self.table.chunks_exact_mut(ENTRY) {
            entry[VECTOR_CONTROL] = MASKED as u8;
        }
    }

    /// Returns the bytes of configuration space that the capability takes.
    pub fn capability(&self) -> Range<usize> {
        self.at..self.at + LEN
    }

    /// Puts the client's control bits into what was read of configuration space at `offset`.
    pub fn show(&self, offset: usize, bytes: &mut [u8]) {
        // Both bits are in the upper byte.
        let at = (self.at + CONTROL + 1).checked_sub(offset);
        if let Some(byte) = at.and_then(|at| bytes.get_mut(at)) {
            let mask = ((ENABLE | FUNCTION_MASK) >> 8) as u8;
            *byte = *byte & !mask | (self.control >> 8) as u8;
        }
    }

    /// Takes the client's control bits from a write of configuration space at `offset`.
    pub fn take(&mut self, offset: usize, bytes: &[u8]) {
        let at = (self.at + CONTROL + 1).checked_sub(offset);
        if let Some(byte) = at.and_then(|at| bytes.get(at)) {
            self.control = u16::from(*byte) << 8 & (ENABLE | FUNCTION_MASK);
        }
    }

    /// Returns whether any byte of an access to a BAR belongs to the table or the pending bits.
    pub fn holds(&self, bar: u8, offset: u64, len: usize) -> bool {
        let VectorLayout { vectors, table, pba } = self.places;
        let pending = 8 * u64::from(vectors.div_ceil(64));
        let overlaps = |(number, start): (u8, u64), size: u64| {
            number == bar && offset < start + size && offset.saturating_add(len as u64) > start
        };
        overlaps(table, self.table.len() as u64) || overlaps(pba, pending)
    }

    /// Reads what [`Msix::holds`]. Nothing is ever pending; bytes beside the table are zeros.
    pub fn read(&self, bar: u8, offset: u64, into: &mut [u8]) {
        for (at, byte) in (offset..).zip(into) {
            *byte = self.place(bar, at).and_then(|at| self.table.get(at)).copied().unwrap_or(0);
        }
    }

    /// Writes what [`Msix::holds`]. Bytes beside the table are dropped.
    pub fn write(&mut self, bar: u8, offset: u64, from: &[u8]) {
        for (at, byte) in (offset..).zip(from) {
            let place = self.place(bar, at);
            if let Some(place) = place.and_then(|at| self.table.get_mut(at)) {
                *place = *byte;
            }
        }
    }

    /// Returns the index of a byte of a BAR in the table, if it comes after the table's start.
    fn place(&self, bar: u8, offset: u64) -> Option<usize> {
        let (number, start) = self.places.table;
        let at = offset.checked_sub(start).filter(|_| number == bar)?;
        usize::try_from(at).ok()
    }
}

/// Returns the byte of configuration space that leads to MSI, and the value by which it leads past
/// it. Returns `None` if the device has no MSI.
pub(crate) fn past_msi(read: impl Fn(usize) -> u32) -> Option<(usize, u8)> {
    let mut pointer = register::CAPABILITIES;
    for (at, header) in capabilities(read) {
        if header as u8 == MSI {
            return Some((pointer, (header >> 8) as u8));
        }
        pointer = at + 1;
    }
    None
}

/// Returns the parts of `offset..offset + len` before and behind `hole`, counted from `offset`.
pub(crate) fn around(offset: usize, len: usize, hole: Range<usize>) -> [Range<usize>; 2] {
    let start = hole.start.saturating_sub(offset).min(len);
    let end = hole.end.saturating_sub(offset).min(len);
    [0..start, end..len]
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a configuration space with MSI at 0x40, MSI-X with three vectors at 0x50, whose
    /// table is at 0x2000 of BAR 0 and the pending bits at 0x3000, and power management at 0x60.
    pub(crate) fn config() -> [u8; 0x100] {
        let mut config = [0; 0x100];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0x00, &[0x86, 0x80, 0x20, 0x15]);
        put(0x06, &[0x10, 0]);
        put(0x10, &[0x04]);
        put(0x34, &[0x40]);
        put(0x40, &[MSI, 0x50]);
        put(0x50, &[0x11, 0x60, 2, 0x80, 0, 0x20, 0, 0, 0, 0x30, 0, 0]);
        put(0x60, &[0x01, 0]);
        config
    }

    pub(crate) fn word(config: &[u8], at: usize) -> u32 {
        let bytes = config.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u32::from_le_bytes)
    }

    fn msix() -> Msix {
        let config = config();
        Msix::find(|at| word(&config, at)).unwrap()
    }

    #[test]
    fn control_bits_are_those_of_the_client() {
        let (mut msix, config) = (msix(), config());
        assert_eq!((msix.vectors(), msix.capability()), (3, 0x50..0x5c));
        let shown = |msix: &Msix, offset: usize, len: usize| {
            let mut bytes = config[offset..offset + len].to_vec();
            msix.show(offset, &mut bytes);
            bytes
        };
        assert_eq!(shown(&msix, 0x50, 4), [0x11, 0x60, 2, 0], "the device's own bit is hidden");
        msix.take(0x52, &[0xff, 0xff]);
        assert_eq!(shown(&msix, 0x50, 4), [0x11, 0x60, 2, 0xc0]);
        assert_eq!(shown(&msix, 0x53, 1), [0xc0]);
        assert_eq!(shown(&msix, 0x54, 4), config[0x54..0x58]);
        msix.take(0x50, &[0, 0]);
        assert_eq!(shown(&msix, 0x53, 1), [0xc0], "the write did not reach the bits");
        msix.reset();
        assert_eq!(shown(&msix, 0x53, 1), [0]);
    }

    #[test]
    fn the_table_is_kept_from_the_device() {
        let mut msix = msix();
        let held = [(0, 0x2000, 4), (0, 0x202c, 4), (0, 0x1ffc, 8), (0, 0x3004, 4)];
        let free = [(0, 0x1ffc, 4), (0, 0x2030, 4), (0, 0x3008, 8), (1, 0x2000, 4), (0, 0, 1)];
        assert!(held.iter().all(|(bar, offset, len)| msix.holds(*bar, *offset, *len)));
        assert!(!free.iter().any(|(bar, offset, len)| msix.holds(*bar, *offset, *len)));
        let mut bytes = [0xff; 4];
        msix.read(0, 0x202c, &mut bytes);
        assert_eq!(bytes, [1, 0, 0, 0], "the last vector is masked");
        msix.write(0, 0x1ffc, &[9; 8]);
        let mut bytes = [0xff; 8];
        msix.read(0, 0x1ffc, &mut bytes);
        assert_eq!(bytes, [0, 0, 0, 0, 9, 9, 9, 9]);
        msix.write(0, 0x3000, &[9; 8]);
        msix.read(0, 0x3000, &mut bytes);
        assert_eq!(bytes, [0; 8], "nothing is pending");
    }

    #[test]
    fn msi_is_passed_over() {
        let config = config();
        assert_eq!(past_msi(|at| word(&config, at)), Some((0x34, 0x50)));
        let mut later = config;
        (later[0x34], later[0x51], later[0x41]) = (0x50, 0x40, 0x60);
        assert_eq!(past_msi(|at| word(&later, at)), Some((0x51, 0x60)));
        later[0x51] = 0x60;
        assert_eq!(past_msi(|at| word(&later, at)), None);
    }

    #[test]
    fn a_write_is_cut_around_the_capability() {
        assert_eq!(around(0x4c, 8, 0x50..0x5c), [0..4, 8..8]);
        assert_eq!(around(0x58, 8, 0x50..0x5c), [0..0, 4..8]);
        assert_eq!(around(0x48, 0x20, 0x50..0x5c), [0..8, 20..32]);
        assert_eq!(around(0x10, 4, 0x50..0x5c), [0..4, 4..4]);
        assert_eq!(around(0x60, 4, 0x50..0x5c), [0..0, 0..4]);
    }
}
