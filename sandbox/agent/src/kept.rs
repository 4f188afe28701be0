//! Output of a process that the host has not recorded yet.
//!
//! Every byte of a process's output has a position: the number of bytes before it, of standard
//! output and standard error together, in the order in which the agent read them. The host says up
//! to which position it has recorded the bytes; the bytes after it are kept here. So a new host,
//! after one that died, asks for the rest, and gets every byte exactly once. The store is bounded:
//! when it is full, nothing more is read, and the process waits as for any slow reader.

use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

/// The largest piece in bytes: the capacity of a pipe.
pub const PIECE: usize = 64 << 10;
/// The most bytes that are kept: at least four pieces, so that the host need not report for every
/// piece.
const ROOM: usize = 256 << 10;
/// The most pieces that are kept, since many tiny ones take more memory than their bytes.
const PIECES: usize = 4096;

struct OutputPiece {
    position: u64,
    stderr: bool,
    bytes: Vec<u8>,
}

impl OutputPiece {
    fn end(&self) -> u64 {
        self.position + self.bytes.len() as u64
    }
}

/// The unrecorded end of a process's output.
#[derive(Default)]
pub struct OutputTail {
    pieces: VecDeque<OutputPiece>,
    bytes: usize,
    end: u64,
    /// The waker of the task that waits for room.
    waker: Option<Waker>,
}

impl OutputTail {
    /// Returns the range of positions that are kept; it ends at the position of the next byte to
    /// come.
    pub fn range(&self) -> std::ops::Range<u64> {
        self.pieces.front().map_or(self.end, |piece| piece.position)..self.end
    }

    /// Adds at most [`PIECE`] bytes, for which there must be room.
    pub fn push(&mut self, stderr: bool, bytes: &[u8]) {
        self.bytes += bytes.len();
        match self.pieces.back_mut() {
            Some(last) if last.stderr == stderr && last.bytes.len() + bytes.len() <= PIECE => {
                last.bytes.extend_from_slice(bytes);
            }
            _ => {
                let (position, bytes) = (self.end, bytes.to_vec());
                self.pieces.push_back(OutputPiece { position, stderr, bytes });
            }
        }
        self.end += bytes.len() as u64;
    }

    /// Returns the bytes from `position` to the end of their piece, and whether they are of
    /// standard error. Returns `None` if there are none.
    pub fn after(&self, position: u64) -> Option<(bool, &[u8])> {
        let index = self.pieces.partition_point(|piece| piece.end() <= position);
        let piece = self.pieces.get(index)?;
        let skipped = usize::try_from(position.saturating_sub(piece.position)).ok()?;
        Some((piece.stderr, piece.bytes.get(skipped..)?))
    }

    /// Drops the bytes before `position`.
    pub fn recorded(&mut self, position: u64) {
        while let Some(first) = self.pieces.front_mut() {
            if first.end() <= position {
                self.bytes -= first.bytes.len();
                self.pieces.pop_front();
                continue;
            }
            if let Some(done) = position.checked_sub(first.position) {
                first.bytes.drain(..done as usize);
                first.position = position;
                self.bytes -= done as usize;
            }
            break;
        }
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    /// Counts from 0 on again: for another host, nothing came before. Everything must be recorded.
    pub fn count_anew(&mut self) {
        if self.pieces.is_empty() {
            self.end = 0;
        }
    }

    /// Returns `Ready` when there is room for one more piece.
    pub fn poll_room(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.bytes + PIECE <= ROOM && self.pieces.len() < PIECES {
            return Poll::Ready(());
        }
        self.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns everything from `position` on, as (standard error, text).
    fn rest(kept: &OutputTail, mut position: u64) -> Vec<(bool, String)> {
        let mut all = Vec::new();
        while let Some((stderr, bytes)) = kept.after(position) {
            assert!(!bytes.is_empty());
            position += bytes.len() as u64;
            all.push((stderr, String::from_utf8(bytes.to_vec()).unwrap()));
        }
        assert_eq!(position.max(kept.range().start), kept.range().end);
        all
    }

    fn pieces(of: &[(bool, &str)]) -> Vec<(bool, String)> {
        of.iter().map(|(stderr, text)| (*stderr, (*text).to_owned())).collect()
    }

    #[test]
    fn any_position_splits_what_was_written() {
        let written = [(false, "one"), (true, "two"), (false, "three"), (false, "four")];
        let text: String = written.iter().map(|(_, text)| *text).collect();
        for recorded in 0..=text.len() {
            let mut kept = OutputTail::default();
            written.iter().for_each(|(stderr, text)| kept.push(*stderr, text.as_bytes()));
            kept.recorded(recorded as u64);
            assert_eq!(kept.range(), recorded as u64..text.len() as u64);
            for position in recorded..=text.len() {
                let rest: String = rest(&kept, position as u64).into_iter().map(|p| p.1).collect();
                assert_eq!(rest, text[position..]);
            }
        }
    }

    #[test]
    fn streams_stay_apart_and_in_order() {
        let mut kept = OutputTail::default();
        for (stderr, text) in [(false, "ab"), (false, "cd"), (true, "ef"), (false, "gh")] {
            kept.push(stderr, text.as_bytes());
        }
        assert_eq!(rest(&kept, 0), pieces(&[(false, "abcd"), (true, "ef"), (false, "gh")]));
        kept.recorded(3);
        assert_eq!(rest(&kept, 3), pieces(&[(false, "d"), (true, "ef"), (false, "gh")]));
        // A repeated position, or one beyond the end, does no harm.
        kept.recorded(1);
        kept.recorded(u64::MAX);
        assert_eq!((rest(&kept, 8), kept.range()), (vec![], 8..8));
        kept.push(true, b"ij");
        assert_eq!(rest(&kept, 8), pieces(&[(true, "ij")]));
    }

    #[test]
    fn a_full_store_has_room_again_once_the_host_has_recorded() {
        let mut context = Context::from_waker(Waker::noop());
        let mut kept = OutputTail::default();
        while kept.poll_room(&mut context).is_ready() {
            kept.push(false, &[0; PIECE]);
        }
        assert_eq!(kept.range(), 0..ROOM as u64);
        kept.recorded(PIECE as u64 - 1);
        assert!(kept.poll_room(&mut context).is_pending());
        kept.recorded(PIECE as u64);
        assert!(kept.poll_room(&mut context).is_ready());
        // Tiny pieces fill the store by their number.
        let mut kept = OutputTail::default();
        let mut count = 0;
        while kept.poll_room(&mut context).is_ready() {
            kept.push(count % 2 == 0, b"x");
            count += 1;
        }
        assert_eq!(count, PIECES);
    }
}
