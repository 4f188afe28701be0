//! A line: frames that wait for their time, in order, in memory of this process.

use std::collections::VecDeque;
use std::time::Duration;

use slipway_ram::Span;

use crate::{Burst, MAX_FRAME, Offload, Pick};

/// Bytes of memory for each frame of the limit: of longer frames fewer fit.
const SHARE: usize = 2048;

struct QueuedFrame {
    at: usize,
    len: usize,
    due: Duration,
    offload: Offload,
}

/// A queue of frames, first in, first out. Bounded in number and in bytes.
pub struct Line {
    memory: Span,
    entries: VecDeque<QueuedFrame>,
    /// The offset at which the next frame may begin.
    head: usize,
    /// The number of frames at the front that were given and not released yet.
    given: usize,
    limit: usize,
}

impl Line {
    /// Creates a line for `limit` frames, at least 1, of 2,048 bytes on average. A frame of any
    /// size fits an empty line.
    pub fn new(limit: usize) -> Self {
        let memory = Span::heap((limit * SHARE).max(MAX_FRAME + 4));
        Self { memory, entries: VecDeque::with_capacity(limit), head: 0, given: 0, limit }
    }

    /// Returns an offset with room for `len` bytes, or `None` if the line is full.
    fn place(&self, len: usize) -> Option<usize> {
        let Some(first) = self.entries.front() else {
            return (len <= self.memory.len()).then_some(0);
        };
        if self.entries.len() == self.limit {
            return None;
        }
        let (head, tail) = (self.head, first.at);
        if head <= tail {
            return (tail - head >= len).then_some(head);
        }
        if self.memory.len() - head >= len {
            return Some(head);
        }
        (tail >= len).then_some(0)
    }

    /// Appends a copy of a frame, which is due at the time that `due` returns for its length, but
    /// not before the frame ahead of it. Returns `false` if there is no room, or if the frame
    /// cannot be read, which counts as lost.
    pub fn push(&mut self, burst: &Burst, pick: Pick, due: impl FnOnce(usize) -> Duration) -> bool {
        let len = burst.len_of(pick);
        let Some(at) = self.place(len) else { return false };
        if burst.copy(pick, &self.memory, at).is_err() {
            return false;
        }
        let ahead = self.entries.back().map_or(Duration::ZERO, |last| last.due);
        let (due, offload) = (due(len).max(ahead), burst.offload_of(pick));
        self.entries.push_back(QueuedFrame { at, len, due, offload });
        self.head = at + len;
        true
    }

    /// Adds the frames that are due at `now` to `burst`, at most `limit`, and returns their number.
    /// They stay in the line's memory until they are [released](Line::release).
    pub fn give(&mut self, burst: &mut Burst, now: Duration, limit: usize) -> usize {
        let limit = limit.min(burst.room());
        let waiting = self.entries.iter().skip(self.given);
        let mut count = 0;
        for entry in waiting.take_while(|entry| entry.due <= now).take(limit) {
            // Reading memory of this process cannot fail.
            let _ = burst.push(&self.memory, entry.at, entry.len, entry.offload);
            count += 1;
        }
        self.given += count;
        count
    }

    /// Frees the memory of the frames that were given.
    pub fn release(&mut self) {
        self.entries.drain(..std::mem::take(&mut self.given));
    }

    /// Returns the number of frames that were not given.
    pub fn waiting(&self) -> usize {
        self.entries.len() - self.given
    }

    /// Returns the time when the first frame that was not given is due, or `None` if there is none.
    pub fn due(&self) -> Option<Duration> {
        self.entries.get(self.given).map(|entry| entry.due)
    }

    /// Drops all frames. Returns their number and their bytes.
    pub fn clear(&mut self) -> (u64, u64) {
        self.release();
        let bytes = self.entries.iter().map(|entry| entry.len as u64).sum();
        let frames = self.entries.len() as u64;
        self.entries.clear();
        (frames, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn burst(lens: &[usize]) -> Burst {
        let memory = Span::heap(MAX_FRAME);
        let mut burst = Burst::new();
        for (number, len) in lens.iter().enumerate() {
            memory.write(0, &[number as u8; 14]).unwrap();
            burst.push(&memory, 0, *len, Offload::NONE).unwrap();
        }
        burst
    }

    fn pick(frame: u16) -> Pick {
        Pick { frame, tci: 0 }
    }

    #[test]
    fn frames_of_any_size_keep_their_order_and_their_bounds() {
        let mut line = Line::new(64);
        let lens: Vec<usize> = (0..200).map(|at| 60 + at * 7919 % 9000).collect();
        let frames = burst(&lens);
        let (mut next, mut expected) = (0, 0);
        let mut out = Burst::new();
        while expected < lens.len() {
            while next < lens.len() && line.push(&frames, pick(next as u16), |_| Duration::ZERO) {
                next += 1;
            }
            out.clear();
            assert!(line.give(&mut out, Duration::ZERO, 5) > 0, "it is full or has all of them");
            for number in 0..out.len() {
                assert_eq!(out.frames()[number].len as usize, lens[expected]);
                assert_eq!(out.head(number)[0], expected as u8);
                expected += 1;
            }
            line.release();
        }
        assert_eq!(line.due(), None);
    }

    #[test]
    fn a_full_line_takes_nothing_and_the_longest_frame_fits() {
        let mut line = Line::new(2);
        let frames = burst(&[100, 100, 100, MAX_FRAME]);
        assert!(line.push(&frames, pick(0), |_| Duration::ZERO));
        assert!(line.push(&frames, pick(1), |_| Duration::ZERO));
        assert!(!line.push(&frames, pick(2), |_| Duration::ZERO), "two frames");
        assert_eq!(line.clear(), (2, 200));
        assert!(line.push(&frames, pick(3), |_| Duration::ZERO));
        assert!(!line.push(&frames, pick(0), |_| Duration::ZERO), "no memory left");
    }

    #[test]
    fn nothing_leaves_before_its_time_or_before_what_is_ahead() {
        let mut line = Line::new(8);
        let frames = burst(&[60, 61]);
        let ms = Duration::from_millis;
        line.push(&frames, pick(0), |_| ms(10));
        line.push(&frames, pick(1), |_| ms(5));
        let mut out = Burst::new();
        assert_eq!((line.due(), line.waiting()), (Some(ms(10)), 2));
        assert_eq!(line.give(&mut out, ms(9), 8), 0);
        assert_eq!(line.give(&mut out, ms(10), 8), 2, "the second waited for the first");
        assert_eq!((line.due(), line.waiting()), (None, 0));
    }
}
