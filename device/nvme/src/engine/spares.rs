//! Work areas for commands of several steps. They are reused, so that no command allocates in the
//! steady state.

#![allow(clippy::vec_box)] // what is boxed stays in its box when a command takes it

use slipway_ram::Span;

use super::inflight::{NextStep, WorkArea};

/// The size of the smallest buffer; the others are twice, four times, … as large.
const SMALLEST: usize = 4096;
/// The number of buffer sizes, up to the size of the largest transfer, 16 MiB.
const SIZES: usize = 13;
/// Most bytes that are kept for reuse. More are in use at once only while enough commands are in
/// flight.
const MOST_BYTES: usize = 2 << 20;

/// Unused work areas, by the size of their buffers.
#[derive(Default)]
pub(crate) struct Spares {
    kept: [Vec<Box<WorkArea>>; SIZES],
    bytes: usize,
}

impl Spares {
    /// Takes a work area with a buffer of at least `bytes` bytes, and without runs and ranges.
    pub fn take(&mut self, step: NextStep, bytes: usize) -> Box<WorkArea> {
        let len = bytes.max(SMALLEST).next_power_of_two();
        let Some(mut work) = self.place(len).and_then(Vec::pop) else {
            let buffer = Span::heap(len);
            let (runs, ranges) = (Vec::new(), Vec::new());
            return Box::new(WorkArea { step, buffer, runs, ranges, write: None });
        };
        self.bytes -= len;
        work.step = step;
        work.runs.clear();
        work.ranges.clear();
        work
    }

    /// Keeps a work area for reuse, unless too much is kept already.
    pub fn put(&mut self, work: Box<WorkArea>) {
        let len = work.buffer.len();
        if self.bytes + len <= MOST_BYTES
            && let Some(place) = self.place(len)
        {
            place.push(work);
            self.bytes += len;
        }
    }

    fn place(&mut self, len: usize) -> Option<&mut Vec<Box<WorkArea>>> {
        self.kept.get_mut((len / SMALLEST).trailing_zeros() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_is_taken_again_by_its_size_and_not_too_much_is_kept() {
        let mut spares = Spares::default();
        for (bytes, len) in
            [(0, 4096), (1, 4096), (4097, 8192), (1 << 20, 1 << 20), (3 << 20, 4 << 20)]
        {
            let work = spares.take(NextStep::Compare, bytes);
            assert_eq!(work.buffer.len(), len);
            spares.put(work);
        }
        // 4 MiB are more than is kept.
        assert_eq!(spares.bytes, 4096 + 8192 + (1 << 20));
        let works: Vec<_> = (0..200).map(|_| spares.take(NextStep::Compare, 16 << 10)).collect();
        works.into_iter().for_each(|work| spares.put(work));
        assert!(spares.bytes <= MOST_BYTES, "{}", spares.bytes);
        let mut work = spares.take(NextStep::Compare, 8192);
        work.ranges.push((1, 1));
        spares.put(work);
        assert!(spares.take(NextStep::Compare, 5000).ranges.is_empty());
    }
}
