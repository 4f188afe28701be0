//! The memory of a machine that is saved, or copied ahead, as its VMM sends it: the stream of
//! [`slipway_machine::pages`].
//!
//! The VMM may be taken over by its guest. Offsets must ascend within the memory in each of few
//! rounds, so that a round has at most as many pages as the memory, and all of the stream must be
//! read by a deadline.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use slipway_machine::pages::{BATCH, END, PAGE, RECORD, ROUND, ROUNDS};

use crate::qmp::{COPY_AHEAD, SAVE};
use crate::{Error, PageSink, Result};

/// The bytes that the pipe holds if the kernel allows it.
const PIPE_BYTES: usize = 1 << 20;

/// The reader of a machine's memory.
pub(crate) struct PageStream {
    pipe: OwnedFd,
    /// Bytes of the memory.
    bytes: u64,
    /// The lowest offset that the next page can have.
    next: u64,
    /// The number of rounds that may still end.
    rounds: usize,
    is_ahead: bool,
}

impl PageStream {
    /// Makes the reader of a memory of `bytes` bytes that is sent once. Returns it, and the VMM's
    /// end of its pipe.
    pub(crate) fn new(bytes: u64) -> Result<(Self, OwnedFd)> {
        let failed = |errno| Error::system("making a pipe for a machine's memory", errno);
        let (pipe, theirs) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
        rustix::io::ioctl_fionbio(&pipe, true).map_err(failed)?;
        // A smaller pipe has the same bytes in more turns.
        let _ = rustix::pipe::fcntl_setpipe_size(&pipe, PIPE_BYTES);
        Ok((Self { pipe, bytes, next: 0, rounds: 0, is_ahead: false }, theirs))
    }

    /// Makes the reader of a memory of `bytes` bytes that is sent while its guest runs, as
    /// [`PageStream::new`] does.
    pub(crate) fn ahead(bytes: u64) -> Result<(Self, OwnedFd)> {
        let (once, theirs) = Self::new(bytes)?;
        Ok((Self { rounds: ROUNDS, is_ahead: true, ..once }, theirs))
    }

    /// Calls `page` for each page, on the calling thread, which waits for the VMM for `limit` at
    /// most. Returns whether the stream has come to its end; the VMM closed its pipe before
    /// otherwise.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::Control`] if the stream is none of such a memory;
    /// [`Error::System`] with an error of `page`.
    pub(crate) fn read(mut self, mut page: PageSink, limit: Duration) -> Result<bool> {
        let deadline = Instant::now() + limit;
        let mut buffer = vec![0; BATCH * RECORD];
        let mut filled = 0;
        loop {
            if !self.has_more(deadline)? {
                let command = if self.is_ahead { COPY_AHEAD } else { SAVE }.to_owned();
                return Err(Error::Timeout { command, timeout: limit });
            }
            // Less than a record is left of what came before, so there is room.
            match rustix::io::read(&self.pipe, &mut buffer[filled..]) {
                Ok(0) => return Ok(false),
                Ok(read) => filled += read,
                Err(Errno::AGAIN | Errno::INTR) => continue,
                Err(errno) => return Err(Error::system("reading a machine's memory", errno)),
            }
            let (taken, ended) = self.take(&buffer[..filled], &mut page)?;
            if ended {
                return Ok(true);
            }
            buffer.copy_within(taken..filled, 0);
            filled -= taken;
        }
    }

    /// Waits until the VMM has written something or closed its end. Returns `false` at the
    /// deadline.
    fn has_more(&self, deadline: Instant) -> Result<bool> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let left = Timespec {
                tv_sec: left.as_secs().cast_signed(),
                tv_nsec: left.subsec_nanos().into(),
            };
            match poll(&mut [PollFd::new(&self.pipe, PollFlags::IN)], Some(&left)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(true),
                Err(errno) => return Err(Error::system("waiting for a machine's memory", errno)),
            }
        }
    }

    /// Takes the whole records at the beginning of `sent`. Returns the number of their bytes, and
    /// whether the last one is the stream's end.
    fn take(&mut self, sent: &[u8], page: &mut PageSink) -> Result<(usize, bool)> {
        let mut rest = sent;
        while let Some((head, behind)) = rest.split_first_chunk::<8>() {
            if *head == END {
                let more = || Error::Control("a machine's memory goes on behind its end".into());
                return if behind.is_empty() { Ok((sent.len(), true)) } else { Err(more()) };
            }
            if *head == ROUND && self.rounds > 0 {
                (self.rounds, self.next, rest) = (self.rounds - 1, 0, behind);
                continue;
            }
            let offset = self.checked(u64::from_le_bytes(*head))?;
            let Some((bytes, behind)) = behind.split_at_checked(PAGE) else { break };
            let kept = page(offset, bytes);
            kept.map_err(|source| Error::system("keeping a machine's memory", source))?;
            self.next = offset + PAGE as u64;
            rest = behind;
        }
        Ok((sent.len() - rest.len(), false))
    }

    /// Checks the offset of the next page.
    fn checked(&self, offset: u64) -> Result<u64> {
        let page = PAGE as u64;
        let end = offset.checked_add(page).filter(|end| *end <= self.bytes);
        if offset.is_multiple_of(page) && offset >= self.next && end.is_some() {
            return Ok(offset);
        }
        let (next, bytes) = (self.next, self.bytes);
        let text = format!(
            "a machine's memory of {bytes} bytes with a page at {offset}, where one is due from \
             {next} on"
        );
        Err(Error::Control(text))
    }
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
