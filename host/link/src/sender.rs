//! Outgoing records: filled with frames, sealed in place, sent.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::SendFlags;
use slipway_sgiov_spec::link::{FRAME, Frame, Kind};
use slipway_warp::record::{self, HEADER, TAG};
use slipway_warp::{RecordError, Sealer};

use crate::frames::Frames;

/// Records that the buffer has room for: as many as one send(2) takes.
const RECORDS: usize = 4;
/// The smallest room in a record that is used for a stream's bytes.
const LEAST: usize = 256;

/// ```text
///          sent         sealed            end
///   ┌────────┬─────────────┬───────────────┬──────────┐
///   │  gone  │ sealed, due │ being filled  │   free   │
///   └────────┴─────────────┴───────────────┴──────────┘
/// ```
/// A record is being filled if `end` is beyond `sealed`: behind its header, which is not written
/// yet.
pub(crate) struct Sender {
    sealer: Sealer,
    buffer: Box<[u8]>,
    sent: usize,
    sealed: usize,
    end: usize,
    /// The most bytes of a record's payload.
    record: usize,
    /// The most bytes under one key, and the bytes under the present one.
    rekey: u64,
    under_key: u64,
    /// The socket's send buffer is full.
    pub(crate) blocked: bool,
    /// Bytes given to the socket.
    pub(crate) bytes: u64,
}

impl Sender {
    pub(crate) fn new(sealer: Sealer, record: usize, rekey: u64) -> Self {
        let buffer = vec![0; (HEADER + record + TAG) * RECORDS].into();
        let (sent, sealed, end, under_key, bytes) = Default::default();
        Self { sealer, buffer, sent, sealed, end, record, rekey, under_key, blocked: false, bytes }
    }

    /// Returns the generation of the key in use.
    pub(crate) fn generation(&self) -> u32 {
        self.sealer.generation()
    }

    /// Returns the bytes of payload that fit into the record that is being filled, or into a new
    /// one.
    fn room(&self) -> usize {
        if self.end > self.sealed {
            self.sealed + HEADER + self.record - self.end
        } else if self.buffer.len() - self.sealed >= HEADER + self.record + TAG {
            self.record
        } else {
            0
        }
    }

    /// Returns the space for the next `count` bytes of payload, which must fit.
    fn grow(&mut self, count: usize) -> &mut [u8] {
        if self.end == self.sealed {
            self.end += HEADER;
        }
        let begin = self.end;
        self.end += count;
        &mut self.buffer[begin..self.end]
    }

    /// Seals the record if it has no room for `least` bytes. Returns whether there is room then.
    fn make_room(&mut self, least: usize) -> Result<bool, RecordError> {
        if self.room() < least {
            self.seal()?;
        }
        Ok(self.room() >= least)
    }

    /// Puts frames into records. Returns whether all of them fitted.
    pub(crate) fn put(&mut self, frames: &mut Frames) -> Result<bool, RecordError> {
        while let Some(length) = frames.next() {
            if !self.make_room(length)? {
                return Ok(false);
            }
            frames.take(self.grow(length));
        }
        Ok(true)
    }

    /// Lets `fill` write up to `most` bytes of `stream` into the record and return their number.
    /// Returns `None` if there is no room now.
    pub(crate) fn data<E>(
        &mut self,
        stream: u32,
        most: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> Result<Option<Result<usize, E>>, RecordError> {
        if !self.make_room(FRAME + LEAST)? {
            return Ok(None);
        }
        let length = most.min(self.room() - FRAME);
        let before = self.end;
        let space = self.grow(FRAME + length);
        let filled = fill(&mut space[FRAME..]);
        let count = *filled.as_ref().unwrap_or(&0);
        if count == 0 {
            self.end = before;
        } else {
            let frame = Frame { kind: Kind::Data, stream, value: count as u64 };
            space[..FRAME].copy_from_slice(&frame.encode());
            self.end -= length - count;
        }
        Ok(Some(filled))
    }

    /// Seals the record that is being filled.
    pub(crate) fn seal(&mut self) -> Result<(), RecordError> {
        if self.end == self.sealed {
            return Ok(());
        }
        let payload = (self.end - self.sealed - HEADER) as u64;
        if self.under_key + payload > self.rekey {
            self.sealer.rekey()?;
            self.under_key = 0;
        }
        self.under_key += payload;
        self.end += TAG;
        record::seal(&mut self.sealer, &mut self.buffer[self.sealed..self.end])?;
        self.sealed = self.end;
        Ok(())
    }

    /// Gives sealed bytes to the socket. Returns how many it took.
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Errno> {
        let before = self.bytes;
        self.blocked = false;
        while self.sent < self.sealed {
            let due = &self.buffer[self.sent..self.sealed];
            match rustix::net::send(socket, due, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(count) => {
                    self.sent += count;
                    self.bytes += count as u64;
                }
                Err(Errno::AGAIN) => {
                    self.blocked = true;
                    break;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        if self.sent == self.end {
            (self.sent, self.sealed, self.end) = (0, 0, 0);
        }
        Ok((self.bytes - before) as usize)
    }

    /// Returns whether bytes are sealed and not sent.
    pub(crate) fn is_due(&self) -> bool {
        self.sent < self.sealed
    }
}
