//! Writes the memory of a guest as the stream of [`slipway_machine::pages`].
//!
//! Pages are copied in user mode through this process's own mapping: a pool serves the faults of
//! that mapping, so that the stream has the bytes that the guest would see. Holes of the file are
//! passed over. The memory of a fork has holes where a page of its template was never touched: its
//! launcher has the pool copy these before ([`slipway_pool_wire::complete`]).

use std::io::{self, Write};

use slipway_machine::pages::{BATCH, PAGE, RECORD};

use crate::memory::GuestRam;
use crate::part::Part;

static ZEROS: [u8; PAGE] = [0; PAGE];

/// Writes the pages of the RAM and of the hot-plug memory that the file has, and then `end`:
/// `ROUND` of a guest that runs, `END` if nobody changes the memory meanwhile. A reader that may
/// have any older bytes of a page needs pages of zeros as well.
///
/// # Errors
/// The error of writing, or of lseek(2).
pub(crate) fn write(
    ram: &GuestRam,
    zeros: Zeros,
    to: &mut impl Write,
    end: &[u8; 8],
) -> io::Result<()> {
    let mut records = Records::new(to, zeros);
    records.add_all(ram)?;
    records.end(end)
}

/// Writes the pages of the RAM whose bits are set, those of each part in words of their own, and
/// then `end`: `ROUND` or `END` of [`slipway_machine::pages`].
///
/// # Errors
/// As for [`write`].
pub(crate) fn write_some(
    ram: &GuestRam,
    written: &[Vec<u64>],
    to: &mut impl Write,
    end: &[u8; 8],
) -> io::Result<()> {
    let mut records = Records::new(to, Zeros::Write);
    for (part, words) in ram.parts().iter().zip(written) {
        for page in slipway_ram::bits(words) {
            let offset = page * PAGE;
            if (offset as u64) < part.len {
                records.add(part, part.offset as usize + offset)?;
            }
        }
    }
    records.end(end)
}

/// The treatment of pages of zeros.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Zeros {
    /// The reader has them without a record.
    Skip,
    /// They are written like others.
    Write,
}

/// Records that wait until there are enough of them for a write.
struct Records<'a, W> {
    to: &'a mut W,
    zeros: Zeros,
    batch: Vec<u8>,
    /// The bytes of `batch` that are records.
    filled: usize,
}

impl<'a, W: Write> Records<'a, W> {
    fn new(to: &'a mut W, zeros: Zeros) -> Self {
        Self { to, zeros, batch: vec![0; BATCH * RECORD], filled: 0 }
    }

    /// Adds the pages that the file of the memory has.
    fn add_all(&mut self, ram: &GuestRam) -> io::Result<()> {
        let hot = ram.hot_memory().iter().map(|hot| &hot.devices);
        for part in ram.parts().iter().chain(hot) {
            let (mut at, end) = (part.offset as usize, (part.offset + part.len) as usize);
            while let Some(mut data) = slipway_ram::next_data(ram.file(), at, end)? {
                at = data.end;
                data.start -= data.start % PAGE;
                data.step_by(PAGE).try_for_each(|offset| self.add(part, offset))?;
            }
        }
        Ok(())
    }

    /// Writes what waits, and then `end`.
    fn end(&mut self, end: &[u8; 8]) -> io::Result<()> {
        self.flush()?;
        self.to.write_all(end)
    }

    /// Adds the page of `part` at `offset` in the file, unless it is zeros that are not written.
    fn add(&mut self, part: &Part, offset: usize) -> io::Result<()> {
        let (head, page) = self.batch[self.filled..][..RECORD].split_at_mut(RECORD - PAGE);
        let read = part.span.read(offset - part.offset as usize, page);
        read.map_err(io::Error::other)?;
        if self.zeros == Zeros::Write || *page != ZEROS {
            head.copy_from_slice(&(offset as u64).to_le_bytes());
            self.filled += RECORD;
        }
        if self.filled == self.batch.len() { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.write_all(&self.batch[..self.filled])?;
        self.filled = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use slipway_machine::HotRegion;
    use slipway_machine::pages::{END, ROUND};

    use super::*;
    use crate::layout::MIB;
    use crate::memory::tests::sealed;

    const HOT: u64 = 128 * MIB;

    fn ram() -> GuestRam {
        let region = HotRegion { bytes: HOT, node: 1 };
        GuestRam::with_hot_memory(sealed(64 * MIB + HOT), &[region]).unwrap()
    }

    /// Returns the pages of a stream, by their offsets.
    fn parsed(stream: &[u8]) -> Vec<(u64, &[u8])> {
        let (records, end) = stream.split_at(stream.len() - END.len());
        assert_eq!(end, END);
        let pairs = records.chunks(RECORD).map(|record| record.split_first_chunk::<8>().unwrap());
        pairs.map(|(offset, page)| (u64::from_le_bytes(*offset), page)).collect()
    }

    #[test]
    fn pages_with_other_bytes_than_zeros_come_at_their_offsets() {
        let ram = ram();
        let (memory, page) = (ram.memory(), PAGE as u64);
        let mut expected = Vec::new();
        // More than a batch, the first and the last page of the RAM, a part of a page.
        for number in (0..100).map(|number| number * 3).chain([64 * MIB / page - 1]) {
            memory.write(number * page + 4090, &number.to_be_bytes()[2..]).unwrap();
            memory.write(number * page, b"x").unwrap();
            expected.push((number * page, number.to_be_bytes()[2..].to_vec()));
        }
        // Touched, and zeros.
        memory.write(4 * page, &[0; 2 * PAGE]).unwrap();
        let hot = ram.hot_memory()[0].devices.start;
        memory.write(hot + 5 * page + 4090, b"region").unwrap();
        memory.write(hot + 5 * page, b"x").unwrap();
        expected.push((64 * MIB + 5 * page, b"region".to_vec()));
        let mut stream = Vec::new();
        write(&ram, Zeros::Skip, &mut stream, &END).unwrap();
        let pages = parsed(&stream);
        assert!(pages.iter().all(|(_, page)| page[0] == b'x' && page[1..4090] == ZEROS[1..4090]));
        let found: Vec<_> =
            pages.iter().map(|(offset, page)| (*offset, page[4090..].to_vec())).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn memory_that_nobody_touched_is_an_end_alone() {
        let mut stream = Vec::new();
        write(&ram(), Zeros::Skip, &mut stream, &END).unwrap();
        assert_eq!(stream, END);
    }

    #[test]
    fn pages_whose_bits_are_set_come_also_if_they_are_zeros() {
        let ram = ram();
        let memory = ram.memory();
        for page in [1, 63, 64, 200] {
            memory.write(page * PAGE as u64, &[page as u8]).unwrap();
        }
        memory.write(63 * PAGE as u64, &[0]).unwrap();
        let mut words = vec![0; (64 * MIB) as usize / PAGE / 64];
        (words[0], words[1]) = (1 << 63 | 1 << 5, 1);
        let mut stream = Vec::new();
        write_some(&ram, &[words], &mut stream, &END).unwrap();
        let firsts: Vec<_> = parsed(&stream).iter().map(|(at, page)| (*at, page[0])).collect();
        let page = PAGE as u64;
        assert_eq!(firsts, [(5 * page, 0), (63 * page, 0), (64 * page, 64)]);
        // All that the file has, zeros among them.
        let mut stream = Vec::new();
        write(&ram, Zeros::Write, &mut stream, &END).unwrap();
        let firsts: Vec<_> = parsed(&stream).iter().map(|(at, page)| (*at, page[0])).collect();
        let all = [(page, 1), (63 * page, 0), (64 * page, 64), (200 * page, 200)];
        assert!(all.iter().all(|one| firsts.contains(one)), "{firsts:?}");
        let mut stream = Vec::new();
        write(&ram, Zeros::Skip, &mut stream, &ROUND).unwrap();
        assert_eq!(stream.split_off(stream.len() - 8), ROUND);
        assert_eq!(stream.len(), 3 * RECORD);
    }

    #[test]
    fn a_failure_of_the_writer_ends_the_stream() {
        let ram = ram();
        for number in 0..2 * BATCH as u64 {
            ram.memory().write(number * PAGE as u64, b"x").unwrap();
        }
        let mut room = vec![0; BATCH * RECORD + 1];
        let error = write(&ram, Zeros::Skip, &mut room.as_mut_slice(), &END).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WriteZero);
    }
}
