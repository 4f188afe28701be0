//! A buffered writer at positions of a file that grow, which leaves whole blocks that are skipped
//! as holes, and a part of the disk free.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use slipway_space::Allowance;

use super::format::BLOCK;

/// Bytes that are read and written at once.
const CHUNK: usize = 1 << 20;

pub(super) struct Output<'a> {
    file: &'a File,
    /// The position of the buffer's first byte.
    at: u64,
    buffer: Vec<u8>,
    /// Set from the first write on.
    space: Option<Allowance>,
}

impl<'a> Output<'a> {
    /// Makes a writer that begins at the position `at` of `file`.
    pub(super) fn new(file: &'a File, at: u64) -> Self {
        Self { file, at, buffer: Vec::with_capacity(CHUNK), space: None }
    }

    fn position(&self) -> u64 {
        self.at + self.buffer.len() as u64
    }

    pub(super) fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.buffer.extend_from_slice(bytes);
        self.flush_full()
    }

    /// Fills the file with zeros up to the position `at`. A gap of a block or more is skipped.
    pub(super) fn skip_to(&mut self, at: u64) -> io::Result<()> {
        let gap = at.checked_sub(self.position());
        let gap = gap.ok_or_else(|| io::Error::other("a file that is placed over another one"))?;
        if gap < BLOCK {
            self.buffer.resize(self.buffer.len() + gap as usize, 0);
            return self.flush_full();
        }
        self.flush()?;
        self.at = at;
        Ok(())
    }

    /// Fills the block with zeros.
    pub(super) fn fill_block(&mut self) -> io::Result<()> {
        self.skip_to(self.position().next_multiple_of(BLOCK))
    }

    /// Copies `len` bytes of `file`, beginning at `from`. `progress` is called with the bytes
    /// copied so far.
    pub(super) fn copy(
        &mut self,
        file: &File,
        from: u64,
        len: u64,
        mut progress: impl FnMut(u64),
    ) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            let room = CHUNK - self.buffer.len();
            let bytes = usize::try_from(len - done).unwrap_or(room).min(room);
            let start = self.buffer.len();
            self.buffer.resize(start + bytes, 0);
            let read = file.read_exact_at(&mut self.buffer[start..], from.saturating_add(done));
            read.map_err(|e| io::Error::new(e.kind(), format!("a layer cannot be read: {e}")))?;
            done += bytes as u64;
            self.flush_full()?;
            progress(done);
        }
        Ok(())
    }

    /// Writes what is buffered.
    pub(super) fn finish(mut self) -> io::Result<()> {
        self.flush()
    }

    /// Writes the buffer if it is full, so that it has room afterwards.
    fn flush_full(&mut self) -> io::Result<()> {
        if self.buffer.len() >= CHUNK { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        let space = match &mut self.space {
            Some(space) => space,
            none => none.insert(Allowance::of(self.file)?),
        };
        space.take(self.file, self.buffer.len() as u64)?;
        self.file.write_all_at(&self.buffer, self.at)?;
        self.at = self.position();
        self.buffer.clear();
        Ok(())
    }
}
