//! MSI-X: the table and the pending bit array, as memory of a BAR (PCI Local Bus 3.0, 6.8.2).
//!
//! A client that emulates MSI-X itself, as QEMU does for vfio-user devices, traps the guest's
//! accesses to the table and masks on its side. The host of such a client signals every interrupt
//! and never calls this module for it. A host that is the interrupt controller itself calls
//! [`Msix::route`] or [`Msix::raise`].

use std::ops::Range;

use slipway_pci_spec::msix::{ENABLE, ENTRY, FUNCTION_MASK, MASKED, MAX_VECTORS, VECTOR_CONTROL};

use crate::state::{MsixState, VERSION, VectorState};
use crate::{Access, StateError};

/// The places of table and pending bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MsixLayout {
    bar: u8,
    vectors: u16,
    table: u64,
    pba: u64,
}

impl MsixLayout {
    /// Returns the layout of `vectors` vectors, with the table at byte `table` and the pending bits
    /// at byte `pba` of BAR `bar`.
    ///
    /// # Panics
    /// If `vectors` is not within 1 to 2048, `bar` is above 5, an offset is no multiple of 8 below
    /// 4 GiB, or the ranges overlap. These are constants of a device, so a mistake is a
    /// programmer's error.
    pub fn new(bar: u8, vectors: u16, table: u64, pba: u64) -> Self {
        assert!((1..=MAX_VECTORS).contains(&vectors), "1 to 2048 vectors");
        assert!(bar <= 5, "a type 0 header has six BAR registers");
        let place = |offset: u64| offset.is_multiple_of(8) && offset < 1 << 32;
        assert!(place(table) && place(pba), "table and PBA are 8-byte aligned");
        let layout = Self { bar, vectors, table, pba };
        let (table, pba) = (layout.table_range(), layout.pba_range());
        assert!(table.end <= pba.start || pba.end <= table.start, "table and PBA overlap");
        layout
    }

    /// Returns the number of the BAR that holds both.
    pub fn bar(&self) -> u8 {
        self.bar
    }

    /// Returns the number of vectors.
    pub fn vectors(&self) -> u16 {
        self.vectors
    }

    /// Returns the bytes of the BAR that hold the table: 16 per vector.
    pub fn table_range(&self) -> Range<u64> {
        self.table..self.table + ENTRY as u64 * u64::from(self.vectors)
    }

    /// Returns the bytes of the BAR that hold the pending bits: a bit per vector, in whole 64-bit
    /// words (6.8.2.10).
    pub fn pba_range(&self) -> Range<u64> {
        self.pba..self.pba + 8 * u64::from(self.vectors.div_ceil(64))
    }

    /// Returns whether byte `offset` of BAR `bar` belongs to the table or the pending bits.
    pub fn holds(&self, bar: u8, offset: u64) -> bool {
        let within = self.table_range().contains(&offset) || self.pba_range().contains(&offset);
        bar == self.bar && within
    }
}

/// MSI-X Message Control, as configuration space holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsixControl {
    /// MSI-X Enable.
    pub enabled: bool,
    /// Function Mask: every vector counts as masked.
    pub masked: bool,
}

impl MsixControl {
    /// Returns what the value of the register says.
    pub fn of(control: u16) -> Self {
        Self { enabled: control & ENABLE != 0, masked: control & FUNCTION_MASK != 0 }
    }
}

/// An interrupt message: a memory write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The address of the write, 4-byte aligned.
    pub address: u64,
    /// The value of the write.
    pub data: u32,
}

/// The treatment of an interrupt, as the table and Message Control have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// MSI-X is off, or there is no such vector: the interrupt is dropped.
    Off,
    /// The vector is masked: the interrupt waits in the pending bits.
    Masked,
    /// The interrupt is sent as this message.
    Deliver(Message),
}

/// Table and pending bits of a function.
#[derive(Clone, Debug)]
pub struct Msix {
    layout: MsixLayout,
    table: Vec<u8>,
    pending: Vec<u64>,
}

impl Msix {
    /// Makes a table in its state after a reset: every vector masked, nothing pending (6.8.2.9).
    pub fn new(layout: MsixLayout) -> Self {
        let table = vec![0; ENTRY * usize::from(layout.vectors)];
        let pending = vec![0; usize::from(layout.vectors.div_ceil(64))];
        let mut msix = Self { layout, table, pending };
        msix.reset();
        msix
    }

    /// Returns the places of table and pending bits.
    pub fn layout(&self) -> &MsixLayout {
        &self.layout
    }

    /// Returns to the state after construction.
    pub fn reset(&mut self) {
        self.table.fill(0);
        for entry in self.table.chunks_exact_mut(ENTRY) {
            entry[VECTOR_CONTROL] = MASKED as u8;
        }
        self.pending.fill(0);
    }

    /// Reads from BAR `bar`, in any width. Refuses unless the first byte belongs to the table or
    /// the pending bits; later bytes that belong to neither read as zeros.
    pub fn read(&self, bar: u8, offset: u64, into: &mut [u8]) -> Access {
        if !self.layout.holds(bar, offset) {
            return Access::Refused;
        }
        for (at, byte) in (offset..).zip(into) {
            *byte = self.byte(at);
        }
        Access::Done
    }

    /// Writes to BAR `bar`, in any width; the specification asks software for 4 or 8 bytes (6.8.2).
    /// Refuses unless the first byte belongs to the table or the pending bits. Pending bits,
    /// reserved bits and the low two address bits keep their value.
    pub fn write(&mut self, bar: u8, offset: u64, from: &[u8]) -> Access {
        if !self.layout.holds(bar, offset) {
            return Access::Refused;
        }
        for (at, &value) in (offset..).zip(from) {
            let index = at.wrapping_sub(self.layout.table) as usize;
            if self.layout.table_range().contains(&at) {
                let mask = writable(index % ENTRY);
                self.table[index] = self.table[index] & !mask | value & mask;
            }
        }
        Access::Done
    }

    /// Returns how an interrupt of `vector` would be treated now.
    pub fn route(&self, vector: u16, control: MsixControl) -> Route {
        if !control.enabled || vector >= self.layout.vectors {
            return Route::Off;
        }
        if control.masked || self.word(vector, VECTOR_CONTROL) & MASKED != 0 {
            return Route::Masked;
        }
        Route::Deliver(self.message(vector))
    }

    /// Routes an interrupt of `vector`, and sets its pending bit if the vector is masked.
    pub fn raise(&mut self, vector: u16, control: MsixControl) -> Route {
        let route = self.route(vector, control);
        if route == Route::Masked {
            self.pending[usize::from(vector / 64)] |= 1 << (vector % 64);
        }
        route
    }

    /// Takes one pending interrupt whose vector is no longer masked. To be called until it returns
    /// `None` after each write to the table or to Message Control (6.8.3.4).
    pub fn take_unmasked(&mut self, control: MsixControl) -> Option<(u16, Message)> {
        for index in 0..self.pending.len() {
            let mut bits = self.pending[index];
            while bits != 0 {
                let bit = bits.trailing_zeros();
                bits &= bits - 1;
                let vector = index as u16 * 64 + bit as u16;
                if let Route::Deliver(message) = self.route(vector, control) {
                    self.pending[index] &= !(1 << bit);
                    return Some((vector, message));
                }
            }
        }
        None
    }

    /// Returns whether the vector's pending bit is set.
    pub fn is_pending(&self, vector: u16) -> bool {
        let word = self.pending.get(usize::from(vector / 64));
        word.is_some_and(|word| word >> (vector % 64) & 1 != 0)
    }

    /// Returns table and pending bits, for a successor.
    pub fn save(&self) -> MsixState {
        let vectors = (0..self.layout.vectors).map(|vector| {
            let Message { address, data } = self.message(vector);
            let masked = self.word(vector, VECTOR_CONTROL) & MASKED != 0;
            VectorState { address, data, masked, pending: self.is_pending(vector) }
        });
        MsixState { version: VERSION, vectors: vectors.collect() }
    }

    /// Takes over a saved state.
    ///
    /// # Errors
    /// [`StateError`] for another version, another number of vectors, or a message address that
    /// no write could have left; the table is then as after a reset.
    pub fn restore(&mut self, state: &MsixState) -> Result<(), StateError> {
        self.reset();
        if state.version != VERSION {
            return Err(StateError::Unknown(format!("MSI-X {}", state.version)));
        }
        if state.vectors.len() != usize::from(self.layout.vectors) {
            return Err(StateError::Inconsistent("another number of MSI-X vectors".into()));
        }
        if state.vectors.iter().any(|vector| vector.address % 4 != 0) {
            return Err(StateError::Inconsistent("an unaligned MSI-X message address".into()));
        }
        let entries = self.table.chunks_exact_mut(ENTRY);
        for ((index, saved), entry) in state.vectors.iter().enumerate().zip(entries) {
            entry[..8].copy_from_slice(&saved.address.to_le_bytes());
            entry[8..12].copy_from_slice(&saved.data.to_le_bytes());
            entry[VECTOR_CONTROL] = u8::from(saved.masked);
            self.pending[index / 64] |= u64::from(saved.pending) << (index % 64);
        }
        Ok(())
    }

    fn byte(&self, at: u64) -> u8 {
        if self.layout.table_range().contains(&at) {
            self.table[(at - self.layout.table) as usize]
        } else if self.layout.pba_range().contains(&at) {
            let index = (at - self.layout.pba) as usize;
            self.pending[index / 8].to_le_bytes()[index % 8]
        } else {
            0
        }
    }

    fn word(&self, vector: u16, field: usize) -> u32 {
        let at = usize::from(vector) * ENTRY + field;
        let mut word = [0; 4];
        word.copy_from_slice(&self.table[at..at + 4]);
        u32::from_le_bytes(word)
    }

    fn message(&self, vector: u16) -> Message {
        let address = u64::from(self.word(vector, 4)) << 32 | u64::from(self.word(vector, 0));
        Message { address, data: self.word(vector, 8) }
    }
}

/// Returns the bits of byte `index` of a table entry that software may change (6.8.2.6 to 6.8.2.9).
fn writable(index: usize) -> u8 {
    match index {
        0 => !0b11,
        1..=11 => 0xff,
        VECTOR_CONTROL => MASKED as u8,
        _ => 0,
    }
}

#[cfg(test)]
#[path = "msix_tests.rs"]
mod tests;
