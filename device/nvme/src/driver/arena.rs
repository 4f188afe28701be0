//! Memory for DMA.

use std::collections::BTreeMap;
use std::ops::Range;

use slipway_ram::Memory;

use super::DriverError;

/// Bytes of a memory page, as the driver sets CC.MPS.
const PAGE: u64 = 4096;

/// Hands out page-aligned pieces of ranges that driver and controller both reach.
pub struct Arena {
    memory: Memory,
    /// The part of each range that was never handed out.
    fresh: Vec<Range<u64>>,
    /// Released pieces, by size.
    released: BTreeMap<u64, Vec<u64>>,
}

impl Arena {
    /// Makes an arena of the `len` bytes of `memory` at page-aligned address `base`.
    pub fn new(memory: Memory, base: u64, len: u64) -> Self {
        let mut arena = Self { memory, fresh: Vec::new(), released: BTreeMap::new() };
        arena.add(base, len);
        arena
    }

    /// Adds the `len` bytes at page-aligned address `base`. No piece lies in two ranges.
    pub fn add(&mut self, base: u64, len: u64) {
        self.fresh.push(base..base + len);
    }

    /// Returns the arena's memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Returns the page-aligned address of `len` zeroed bytes.
    ///
    /// # Errors
    /// [`DriverError::Memory`] when nothing is left.
    pub fn allocate(&mut self, len: usize) -> Result<u64, DriverError> {
        let size = (len as u64).next_multiple_of(PAGE);
        let again = self.released.get_mut(&size).and_then(Vec::pop);
        let at = match again {
            Some(at) => at,
            None => self.carve(size)?,
        };
        self.memory.write(at, &vec![0; size as usize])?;
        Ok(at)
    }

    fn carve(&mut self, size: u64) -> Result<u64, DriverError> {
        let fits = |range: &&mut Range<u64>| range.end - range.start >= size;
        let range = self.fresh.iter_mut().find(fits).ok_or(DriverError::Memory)?;
        range.start += size;
        Ok(range.start - size)
    }

    /// Takes back the `len` bytes that [`Arena::allocate`] returned.
    pub fn release(&mut self, at: u64, len: usize) {
        let size = (len as u64).next_multiple_of(PAGE);
        self.released.entry(size).or_default().push(at);
    }

    /// Returns PRP1 and PRP2 (section 4.3) for `len` contiguous bytes at `address`. Writes a list,
    /// or a chain of lists, if two entries do not suffice.
    ///
    /// # Errors
    /// [`DriverError::Memory`] when nothing is left for a list.
    pub fn point(&mut self, address: u64, len: usize) -> Result<(u64, u64), DriverError> {
        let first = PAGE - address % PAGE;
        let left = (len as u64).saturating_sub(first);
        let pages: Vec<u64> =
            (0..left.div_ceil(PAGE)).map(|page| address + first + page * PAGE).collect();
        match pages.as_slice() {
            [] => Ok((address, 0)),
            [second] => Ok((address, *second)),
            more => Ok((address, self.list(more)?)),
        }
    }

    /// Writes PRP lists that name `pages`. Returns the address of the first list.
    fn list(&mut self, pages: &[u64]) -> Result<u64, DriverError> {
        const ENTRIES: usize = PAGE as usize / 8;
        let list = self.allocate(PAGE as usize)?;
        let (here, rest) =
            if pages.len() > ENTRIES { pages.split_at(ENTRIES - 1) } else { (pages, &[][..]) };
        let mut bytes: Vec<u8> = here.iter().flat_map(|page| page.to_le_bytes()).collect();
        if !rest.is_empty() {
            bytes.extend_from_slice(&self.list(rest)?.to_le_bytes());
        }
        self.memory.write(list, &bytes)?;
        Ok(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_lies_in_one_range() {
        let mut arena = Arena::new(Memory::heap(6 * PAGE as usize), 0, PAGE);
        arena.add(2 * PAGE, 3 * PAGE);
        assert_eq!(arena.allocate(2 * PAGE as usize).unwrap(), 2 * PAGE);
        assert_eq!(arena.allocate(1).unwrap(), 0);
        assert!(matches!(arena.allocate(2 * PAGE as usize), Err(DriverError::Memory)));
        assert_eq!(arena.allocate(1).unwrap(), 4 * PAGE);
        arena.release(2 * PAGE, 2 * PAGE as usize);
        assert_eq!(arena.allocate(2 * PAGE as usize).unwrap(), 2 * PAGE);
    }
}
