//! The position in a container's output, as the next serving process finds it.
//!
//! Before a piece of output is written, a record says which one it is. Whether a process that was
//! killed has still written it, its destination tells:
//! - A FIFO's time of change is set to a mark of the piece ([`mark`]), and each write sets it to
//!   the present time. A piece of at most [`PIECE`] bytes is written as a whole or not at all
//!   (`PIPE_BUF` in pipe(7)).
//! - A file has grown.
//!
//! The mark is set before the record is written, and no two pieces in a row have the same one. So a
//! record without its mark is one of a piece that was written, wherever the process was killed.
//!
//! # Cost
//!
//! A piece for a FIFO takes two system calls beside its own write: the mark (`utimensat`) and the
//! record (`pwrite`). Neither can stand for both:
//! - Without the mark, the time of change tells nothing: it advances once in a tick of the
//!   kernel's, and the reader takes the bytes themselves.
//! - Without the record, the position is lost with the mark: the piece's own write replaces one
//!   time, and the reader's `read` the other (`relatime`).
//!
//! A mapped record would take no call. It is not mapped, since a write of a few bytes within a page
//! is whole or not there when the process is killed, and a failure of it is an error. Stores to a
//! mapping could be cut between two words, and a page that cannot be had would be `SIGBUS`.
//! A larger piece would share the calls, and could be written in part.
//!
//! The file has its size and its page from the beginning, so a record does not fail where the file
//! system is full. Output whose record fails all the same waits, and is not written.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Timespec, Timestamps};

/// The largest piece of output for a FIFO, bytes: `PIPE_BUF`.
pub const PIECE: usize = 4096;
/// The number of marks. As seconds since the epoch they are before 2005.
const MARKS: u64 = 1 << 30;
/// The size of a record, bytes: position, length, stream (0: output, 1: error output), and the
/// size of the file before.
pub const RECORD: usize = 32;

/// An output of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out = 0,
    /// Standard error.
    Err = 1,
}

/// The position in the output of a process, of both streams together.
#[derive(Default)]
pub struct Cursor {
    /// Bytes that were carried, or that nobody was there to take.
    carried: AtomicU64,
    record: OnceLock<File>,
}

impl Cursor {
    /// Returns the bytes that were carried.
    pub fn carried(&self) -> u64 {
        self.carried.load(Ordering::Relaxed)
    }

    /// Notes that all bytes before `position` were carried.
    pub fn reach(&self, position: u64) {
        self.carried.store(position, Ordering::Relaxed);
    }

    /// Has pieces be recorded in a file from here on.
    pub fn keep(&self, record: File) {
        // Set once: when the process is made.
        let _ = self.record.set(record);
    }

    /// Returns whether pieces are recorded.
    pub fn is_kept(&self) -> bool {
        self.record.get().is_some()
    }

    /// Records that the next `length` bytes are about to be written to a FIFO.
    ///
    /// # Errors
    /// There is no record: the bytes must not be written.
    pub fn begin_fifo(
        &self,
        fifo: BorrowedFd<'_>,
        stream: Stream,
        length: usize,
    ) -> io::Result<()> {
        if !self.is_kept() {
            return Ok(());
        }
        let time = Timespec { tv_sec: mark(self.carried()), tv_nsec: 0 };
        let times = Timestamps { last_access: time, last_modification: time };
        // Without the mark the piece counts as written: nothing is doubled.
        let _ = rustix::fs::futimens(fifo, &times);
        self.record(stream, length, 0)
    }

    /// Records that the next `length` bytes are about to be written to the end of a file, which has
    /// `size` bytes.
    ///
    /// # Errors
    /// There is no record: the bytes must not be written.
    pub fn begin_file(&self, stream: Stream, length: usize, size: u64) -> io::Result<()> {
        self.record(stream, length, size)
    }

    /// Records that all bytes before the present position were carried, or have nowhere to go.
    pub fn pass(&self, stream: Stream) {
        // Fails without memory: then the next process asks for bytes that go nowhere.
        let _ = self.record(stream, 0, 0);
    }

    fn record(&self, stream: Stream, length: usize, size: u64) -> io::Result<()> {
        let Some(file) = self.record.get() else { return Ok(()) };
        let mut record = [0; RECORD];
        for (at, word) in [self.carried(), length as u64, stream as u64, size].iter().enumerate() {
            record[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        file.write_all_at(&record, 0)
    }

    /// Sets the position by the record of an earlier process. `look` returns what there is of the
    /// destination of a stream.
    pub fn resume(&self, record: &[u8], look: impl FnOnce(Stream) -> Option<Metadata>) {
        // Without a record nothing was written.
        if record.len() < RECORD {
            return;
        }
        let mut words = [0; RECORD / 8];
        for (word, bytes) in words.iter_mut().zip(record.chunks_exact(8)) {
            *word = u64::from_le_bytes(std::array::from_fn(|at| bytes[at]));
        }
        let [position, length, stream, size] = words;
        let stream = if stream == 0 { Stream::Out } else { Stream::Err };
        let written = match look(stream) {
            Some(fifo) if fifo.file_type().is_fifo() => {
                if fifo.mtime() == mark(position) {
                    0
                } else {
                    length
                }
            }
            Some(file) => file.len().saturating_sub(size).min(length),
            None => length,
        };
        self.reach(position.saturating_add(written));
    }
}

/// Returns the mark of the piece that begins at `position`, in seconds since the epoch.
fn mark(position: u64) -> i64 {
    (position % MARKS).cast_signed()
}

#[cfg(test)]
#[path = "tests/cursor.rs"]
mod tests;
