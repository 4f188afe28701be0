//! Entry points of the fuzz targets, and inputs for their unit tests.

pub use crate::late_model::late_memory;
use crate::{Access, DmaMap, Fault, Region, Removed, Span};

/// Bytes of address space that the model covers at the bottom, and as many at the top.
const WINDOW: u64 = 1 << 14;

/// A mapped byte of the model: its value and the address of its region.
#[derive(Clone, Copy)]
struct Cell {
    value: u8,
    region: u64,
}

/// The map under test and its expected contents.
struct Model {
    map: DmaMap,
    cells: Vec<Option<Cell>>,
    spans: Vec<Span>,
    removed: Vec<Removed>,
}

/// Runs the operations that `data` encodes, six bytes each, on a map and on a model of it.
///
/// # Panics
/// If map and model differ: the fuzzer's finding.
pub fn dma_map(data: &[u8]) {
    let cells = vec![None; 2 * WINDOW as usize];
    let mut model = Model { map: DmaMap::new(), cells, spans: Vec::new(), removed: Vec::new() };
    for step in data.chunks_exact(6) {
        model.step(
            step[0],
            address(step[1], step[2]),
            u16::from_le_bytes([step[3], step[4]]),
            step[5],
        );
    }
    model.spans.clear();
    assert!(model.removed.iter().all(Removed::is_idle), "nothing refers to removed memory");
}

/// Returns an address among the lowest or the highest [`WINDOW`] bytes of the address space.
fn address(low: u8, high: u8) -> u64 {
    let offset = u64::from(u16::from_le_bytes([low, high]) & 0x7fff);
    if offset < WINDOW { offset } else { (offset - WINDOW).wrapping_sub(WINDOW) }
}

/// Returns the model's index of an address, or `None` if the model does not cover it.
fn index(iova: u64) -> Option<usize> {
    match iova {
        low if low < WINDOW => Some(low as usize),
        high if high >= WINDOW.wrapping_neg() => {
            Some((WINDOW + (high - WINDOW.wrapping_neg())) as usize)
        }
        _ => None,
    }
}

impl Model {
    fn step(&mut self, kind: u8, iova: u64, len: u16, value: u8) {
        let len = usize::from(len % 6000);
        match kind % 8 {
            0 | 1 => self.add(iova, len),
            2 => self.remove(iova, len as u64),
            3 => self.read(iova, len),
            4 => self.write(iova, len, value),
            5 => self.pin(iova, len),
            6 => self.words(iova, u32::from(value) * 0x0101_0101),
            _ => self.spans.clear(),
        }
    }

    /// Returns the indices of a range's cells, or `None` if any byte is not mapped.
    fn range(&self, iova: u64, len: usize) -> Option<Vec<usize>> {
        (0..len as u64)
            .map(|offset| {
                let at = index(iova.checked_add(offset)?)?;
                self.cells[at].map(|_| at)
            })
            .collect()
    }

    fn add(&mut self, iova: u64, len: usize) {
        let places: Option<Vec<usize>> =
            (0..len as u64).map(|offset| index(iova.checked_add(offset)?)).collect();
        let covered = places.filter(|places| !places.is_empty());
        // The model could not see all of a region that leaves the bottom window.
        if covered.is_none() && len > 0 && iova < WINDOW {
            return;
        }
        let free = covered.filter(|places| places.iter().all(|&at| self.cells[at].is_none()));
        let added = self.map.add(iova, Region::heap(len));
        assert_eq!(added.is_ok(), free.is_some(), "add {iova:#x}+{len:#x}: {added:?}");
        for at in free.unwrap_or_default() {
            self.cells[at] = Some(Cell { value: 0, region: iova });
        }
    }

    fn remove(&mut self, iova: u64, len: u64) {
        let own = |cell: &Option<Cell>| cell.is_some_and(|cell| cell.region == iova);
        let held = self.cells.iter().filter(|cell| own(cell)).count() as u64;
        let removed = self.map.remove(iova, len);
        assert_eq!(removed.is_ok(), held > 0 && held == len);
        if let Ok(removed) = removed {
            self.removed.push(removed);
            self.cells.iter_mut().filter(|cell| own(cell)).for_each(|cell| *cell = None);
        }
    }

    fn read(&mut self, iova: u64, len: usize) {
        let mut bytes = vec![0xee; len];
        let read = self.map.memory().read(iova, &mut bytes);
        let Some(places) = self.range(iova, len) else {
            assert!(matches!(read, Err(Fault::Unmapped { .. })));
            return;
        };
        assert_eq!(read, Ok(()));
        let held = places.iter().map(|&at| self.cells[at].map_or(0, |cell| cell.value));
        assert!(bytes.iter().copied().eq(held), "read {iova:#x}+{len:#x}");
    }

    /// Writes up to the first byte that is not mapped, as a device's write does.
    fn write(&mut self, iova: u64, len: usize, value: u8) {
        let written = self.map.memory().write(iova, &vec![value; len]);
        assert_eq!(written.is_ok(), self.range(iova, len).is_some());
        for offset in 0..len as u64 {
            let at = iova.checked_add(offset).and_then(index);
            match at.and_then(|at| self.cells[at].as_mut()) {
                Some(cell) => cell.value = value,
                None => break,
            }
        }
    }

    fn pin(&mut self, iova: u64, len: usize) {
        let mut spans = Vec::new();
        let pinned = self.map.memory().pin(iova, len, Access::Write, &mut spans);
        let Some(places) = self.range(iova, len) else {
            assert!(pinned.is_err());
            return;
        };
        assert_eq!(spans.iter().map(Span::len).sum::<usize>(), len);
        let mut places = places.iter();
        for span in &spans {
            let mut bytes = vec![0; span.len()];
            assert_eq!(span.read(0, &mut bytes), Ok(()));
            let held = places.by_ref().take(bytes.len());
            let held = held.map(|&at| self.cells[at].map_or(0, |cell| cell.value));
            assert!(bytes.iter().copied().eq(held), "span {span:?}");
        }
        self.spans.append(&mut spans);
    }

    fn words(&mut self, iova: u64, value: u32) {
        let memory = self.map.memory();
        let stored = memory.store_u32(iova, value);
        let mut bytes = [0; 4];
        assert_eq!(stored.is_ok(), memory.read(iova, &mut bytes).is_ok());
        if stored.is_ok() {
            assert_eq!((u32::from_le_bytes(bytes), memory.load_u32(iova)), (value, Ok(value)));
        }
        self.write(iova, 4, value as u8);
    }
}

/// Returns pseudo-random inputs of `len` bytes for unit tests of fuzz targets, without end. The
/// same `seed` gives the same inputs.
pub fn inputs(mut seed: u64, len: usize) -> impl Iterator<Item = Vec<u8>> {
    let mut byte = move || {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (seed >> 56) as u8
    };
    std::iter::repeat_with(move || (0..len).map(|_| byte()).collect())
}

#[cfg(test)]
mod tests {
    #[test]
    fn dma_map_equals_its_model() {
        for data in super::inputs(7, 6000).take(100) {
            super::dma_map(&data);
        }
    }
}
