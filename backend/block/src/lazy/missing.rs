//! The missing part of an image: the reads that wait for blocks, and the requests to the fetcher.
//!
//! A read of blocks that are not known to be in the file waits ([`Missing::wait`]). Its missing
//! blocks are asked for by *wants*, in the order of the reads ([`Missing::ask`]). Each answer marks
//! blocks as there or fails the reads that lack them; reads that lack none any more are handed back
//! to the disk ([`Missing::release`]). When the connection ends, the wants are forgotten, and after
//! a pause the next connection asks for all again. A read whose blocks do not come within
//! [`PATIENCE`] fails.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use slipway_lazy_spec::{Answer, Extent, MOST, MOST_BYTES, MOST_WANTED, Want};
use slipway_telemetry::Clock;

use super::alarm::Alarm;
use super::blocks::Blocks;
use super::link::{FetcherConnection, ReceiveOutcome};
use crate::check::complete;
use crate::{Completion, DiskError, OpenError, Request};

/// Bytes of a block of an image's file.
pub(super) const BLOCK: u64 = 4096;
/// Most blocks that are wanted by one message.
const MOST_BLOCKS: u64 = MOST_BYTES / BLOCK;
/// Most wants that are unanswered at a time. The fetcher ends a connection with more than twice as
/// many. It may count wants that are forgotten here, since answers to others had their blocks.
const MOST_UNANSWERED: usize = MOST_WANTED / 2;
/// Most messages that one poll takes.
const MOST_MESSAGES: usize = 64;
/// Time from a connection's end, or a failed attempt, to the next attempt.
const RECONNECT_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause after the fetcher has refused the image, which each refusal doubles. A read waits
/// for longer.
const MOST_PAUSE: Duration = Duration::from_secs(10);
/// Longest time that a read waits for its blocks. Must stay below the guest's time for an NVMe
/// command, after which its driver resets the controller: 30 s by Linux's default
/// (`nvme_core.io_timeout`). The fetcher repeats a failed request for some 4 s before it says that
/// it cannot. A driver sends a failed command a few times more.
const PATIENCE: Duration = Duration::from_secs(20);

/// A read that waits for blocks.
struct Waiting {
    request: Request,
    /// The blocks of the file that the read concerns.
    blocks: Range<u64>,
    /// The first block of the read that may be missing: all before it are there.
    missing: u64,
    /// The first block of the read that may have to be asked for: all before it are there, or
    /// wanted.
    asked: u64,
    /// The time at which the read fails.
    due: Duration,
}

/// The state of a disk whose image is not known to be whole.
pub(super) struct Missing {
    there: Blocks,
    /// Bytes of the image's file.
    bytes: u64,
    /// In the order of their submission, and so of the times at which they fail.
    waiting: Vec<Waiting>,
    /// The ranges of blocks that the fetcher was asked for on this connection and has not
    /// answered for. No two overlap.
    wanted: Vec<Range<u64>>,
    link: FetcherConnection,
    /// The earliest time of the next attempt to connect.
    reconnect_at: Duration,
    /// The fetcher's refusals since it had the image.
    refusals: u32,
    alarm: Alarm,
}

impl Missing {
    /// Makes the state of a disk of `bytes` bytes, of which no block is known to be there.
    ///
    /// # Errors
    /// [`OpenError::Wake`] if no descriptors are left.
    pub fn new(
        bytes: u64,
        link: FetcherConnection,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, OpenError> {
        let alarm = Alarm::new(clock).map_err(|errno| OpenError::Wake(errno.into()))?;
        let there = Blocks::new(bytes.div_ceil(BLOCK));
        let (waiting, wanted, reconnect_at) = (Vec::new(), Vec::new(), Duration::ZERO);
        Ok(Self { there, bytes, waiting, wanted, link, reconnect_at, refusals: 0, alarm })
    }

    /// Returns the timer's descriptor, to be watched beside the connection.
    pub fn timer(&self) -> BorrowedFd<'_> {
        self.alarm.as_fd()
    }

    /// Returns whether these blocks are known to be there.
    pub fn has(&self, blocks: &Range<u64>) -> bool {
        self.there.next_missing(blocks.clone()).is_none()
    }

    /// Returns whether all blocks are known to be there.
    pub fn is_whole(&self) -> bool {
        self.there.are_all_there()
    }

    /// Adds a read of these blocks to those that wait. The caller calls [`Missing::pursue`]
    /// afterwards.
    pub fn wait(&mut self, request: Request, blocks: Range<u64>) {
        let (missing, asked, due) = (blocks.start, blocks.start, self.alarm.now() + PATIENCE);
        self.waiting.push(Waiting { request, blocks, missing, asked, due });
    }

    /// Takes the fetcher's messages. Moves reads whose blocks are there to `ready`, and ends those
    /// that fail.
    pub fn poll(
        &mut self,
        wake: &OwnedFd,
        ready: &mut Vec<Request>,
        completions: &mut Vec<Completion>,
    ) {
        let changed = self.take_messages(wake, completions);
        if changed {
            self.release(ready);
        }
        if changed || self.alarm.is_due() {
            self.pursue(wake, completions);
        }
    }

    /// Pursues the reads that wait: ends those that have waited too long, connects if some are left
    /// and there is no connection, asks for what they lack, and sets the alarm for the next time.
    pub fn pursue(&mut self, wake: &OwnedFd, completions: &mut Vec<Completion>) {
        let now = self.alarm.now();
        self.end_late(now, completions);
        if self.link.is_lost() && !self.waiting.is_empty() && self.reconnect_at <= now {
            self.connect(wake);
        }
        if self.ask().is_err() {
            self.lose(wake);
        }
        self.set_alarm();
    }

    /// Ends the reads that have waited too long.
    fn end_late(&mut self, now: Duration, completions: &mut Vec<Completion>) {
        // The first one is due first.
        if self.waiting.first().is_some_and(|read| read.due <= now) {
            let late = |read: &mut Waiting| read.due <= now;
            fail(&mut self.waiting, late, libc::ETIMEDOUT, completions);
        }
    }

    /// Sets the alarm for the next read that is due, or for the next attempt to connect if that
    /// comes first. Without reads there is none.
    fn set_alarm(&mut self) {
        let reconnect = self.link.is_lost().then_some(self.reconnect_at);
        let due = self.waiting.first().map(|read| read.due);
        self.alarm.set(due.map(|due| reconnect.map_or(due, |at| at.min(due))));
    }

    /// Connects to the fetcher. If that cannot be done now, it can be tried again later.
    pub fn connect(&mut self, wake: &OwnedFd) {
        self.link.connect(wake);
        self.reconnect_at = self.alarm.now() + RECONNECT_PAUSE;
    }

    /// Ends the connection. Each read asks anew for what it lacks.
    pub fn lose(&mut self, wake: &OwnedFd) {
        self.link.lose(wake);
        self.reconnect_at = self.alarm.now() + self.pause();
        self.wanted.clear();
        for read in &mut self.waiting {
            read.asked = read.missing;
        }
    }

    /// Returns the pause after a connection. A fetcher that refuses an image usually does so until
    /// somebody has pulled it again, and each attempt has it look for the image.
    fn pause(&self) -> Duration {
        let doublings = self.refusals.saturating_sub(1).min(7);
        (RECONNECT_PAUSE * 2_u32.pow(doublings)).min(MOST_PAUSE)
    }

    /// Ends the read `tag`. Returns `false` if it does not wait here. Wants for its blocks stay.
    pub fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        let Some(at) = self.waiting.iter().position(|read| read.request.tag == tag) else {
            return false;
        };
        let read = self.waiting.remove(at);
        completions.push(complete(read.request, Err(DiskError::Cancelled)));
        true
    }

    /// Takes a bounded number of messages. Returns whether there were any, or the connection has
    /// ended.
    fn take_messages(&mut self, wake: &OwnedFd, completions: &mut Vec<Completion>) -> bool {
        if self.link.is_lost() {
            return false;
        }
        let mut buffer = [0; MOST];
        for number in 0..MOST_MESSAGES {
            let is_valid = match self.link.receive(&mut buffer) {
                ReceiveOutcome::Nothing => return number > 0,
                ReceiveOutcome::Message(bytes) => self.take_message(&buffer[..bytes], completions),
                ReceiveOutcome::End => false,
            };
            if !is_valid {
                self.lose(wake);
                return true;
            }
        }
        true
    }

    /// Takes a message. Returns `false` if the connection must end: the fetcher refuses the image,
    /// or breaks the protocol.
    fn take_message(&mut self, message: &[u8], completions: &mut Vec<Completion>) -> bool {
        let bytes = self.bytes;
        let within = |extent: Extent| extent.end() <= bytes;
        match (Answer::decode(message), self.link.is_open()) {
            (Some(Answer::Whole), _) => self.there.fill(),
            (Some(Answer::Open), false) => {
                self.refusals = 0;
                self.link.open();
            }
            (Some(Answer::Refused(_)), _) => {
                self.refusals = self.refusals.saturating_add(1);
                return false;
            }
            (Some(Answer::Have(extent)), true) if within(extent) => {
                let blocks = self.whole_blocks(extent);
                self.there.mark(blocks);
            }
            (Some(Answer::Failed(extent)), true) if within(extent) => {
                self.fail_wanted(extent, completions);
            }
            _ => return false,
        }
        true
    }

    /// Returns the blocks that lie wholly in `extent`. The file's last block ends with the file.
    fn whole_blocks(&self, extent: Extent) -> Range<u64> {
        let reaches_the_end = extent.end() == self.bytes;
        let end = if reaches_the_end { self.there.count() } else { extent.end() / BLOCK };
        extent.offset.div_ceil(BLOCK)..end
    }

    /// Fails the reads that lack blocks of `extent`, which the fetcher cannot get now. Does nothing
    /// if there is no unanswered want of exactly this extent.
    fn fail_wanted(&mut self, extent: Extent, completions: &mut Vec<Completion>) {
        let bytes = self.bytes;
        let names = |want: &Range<u64>| extent_of(want, bytes) == extent;
        let Some(at) = self.wanted.iter().position(names) else { return };
        let (want, there) = (self.wanted.swap_remove(at), &self.there);
        let lacks = |read: &mut Waiting| {
            let common = read.blocks.start.max(want.start)..read.blocks.end.min(want.end);
            there.next_missing(common).is_some()
        };
        fail(&mut self.waiting, lacks, libc::EIO, completions);
    }

    /// Moves the reads whose blocks are there to `ready`, and forgets wants that were answered.
    fn release(&mut self, ready: &mut Vec<Request>) {
        let there = &self.there;
        self.wanted.retain(|want| there.next_missing(want.clone()).is_some());
        for read in &mut self.waiting {
            let end = read.blocks.end;
            read.missing = there.next_missing(read.missing..end).unwrap_or(end);
        }
        let has_all = |read: &mut Waiting| read.missing == read.blocks.end;
        ready.extend(self.waiting.extract_if(.., has_all).map(|read| read.request));
    }

    /// Asks for missing blocks of reads that are not wanted yet, in the reads' order, as long as
    /// the fetcher may be asked for more.
    ///
    /// # Errors
    /// The connection has ended.
    fn ask(&mut self) -> rustix::io::Result<()> {
        if !self.link.is_open() {
            return Ok(());
        }
        for read in &mut self.waiting {
            let end = read.blocks.end;
            while let Some(want) = next_want(&self.there, &self.wanted, read.asked..end) {
                let message = Want(extent_of(&want, self.bytes));
                if self.wanted.len() == MOST_UNANSWERED || !self.link.send(&message)? {
                    return Ok(());
                }
                read.asked = want.end;
                self.wanted.push(want);
            }
            read.asked = end;
        }
        Ok(())
    }
}

/// Ends those of the `waiting` reads for which `is_one` holds, with an errno.
fn fail(
    waiting: &mut Vec<Waiting>,
    is_one: impl FnMut(&mut Waiting) -> bool,
    errno: i32,
    completions: &mut Vec<Completion>,
) {
    let failed = waiting.extract_if(.., is_one);
    completions.extend(failed.map(|read| complete(read.request, Err(DiskError::Io(errno)))));
}

/// Returns the first blocks of `range` that are missing and not wanted yet, as many as one message
/// may want.
fn next_want(there: &Blocks, wanted: &[Range<u64>], range: Range<u64>) -> Option<Range<u64>> {
    let mut start = there.next_missing(range.clone())?;
    while let Some(other) = wanted.iter().find(|other| other.contains(&start)) {
        start = there.next_missing(other.end..range.end)?;
    }
    let most = start.saturating_add(MOST_BLOCKS).min(range.end);
    let others = wanted.iter().map(|other| other.start).filter(|other| *other > start);
    let end = others.fold(most, u64::min);
    Some(start..there.next_there(start..end).unwrap_or(end))
}

/// Returns the bytes of these blocks of a file of `bytes` bytes.
fn extent_of(blocks: &Range<u64>, bytes: u64) -> Extent {
    let offset = blocks.start * BLOCK;
    Extent { offset, bytes: (blocks.end * BLOCK).min(bytes) - offset }
}
