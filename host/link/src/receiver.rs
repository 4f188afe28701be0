//! Incoming records: received, and opened in place.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use slipway_sgiov_spec::link::PAYLOAD;
use slipway_warp::record::{HEADER, Header, TAG, open};
use slipway_warp::{Opener, RecordError};

/// The most bytes of a record.
const RECORD: usize = HEADER + PAYLOAD + TAG;
/// Bytes of the buffer: more than a record, so that one recv(2) takes several.
const BUFFER: usize = 4 * RECORD;

pub(crate) struct Receiver {
    opener: Opener,
    buffer: Box<[u8]>,
    /// Start of the bytes that were received and not opened yet.
    at: usize,
    /// End of the bytes that were received.
    end: usize,
    /// Bytes taken from the socket.
    pub(crate) bytes: u64,
}

/// The result of reading the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// Bytes.
    Some,
    /// Nothing now.
    Nothing,
    /// Nothing any more.
    End,
}

impl Receiver {
    /// Makes a receiver whose buffer begins with `rest`, which came with the handshake.
    pub(crate) fn new(opener: Opener, rest: &[u8]) -> Self {
        let mut buffer: Box<[u8]> = vec![0; BUFFER.max(rest.len())].into();
        buffer[..rest.len()].copy_from_slice(rest);
        Self { opener, buffer, at: 0, end: rest.len(), bytes: 0 }
    }

    /// Reads from the socket, as far as there is room.
    pub(crate) fn receive(&mut self, socket: BorrowedFd<'_>) -> Result<Received, Errno> {
        self.make_room();
        match rustix::io::read(socket, &mut self.buffer[self.end..]) {
            Ok(0) => Ok(Received::End),
            Ok(count) => {
                self.end += count;
                self.bytes += count as u64;
                Ok(Received::Some)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(Received::Nothing),
            Err(error) => Err(error),
        }
    }

    /// Moves an incomplete record to the beginning of the buffer if the rest may not fit where it
    /// is: seldom, since it is another copy.
    fn make_room(&mut self) {
        if self.at == self.end {
            (self.at, self.end) = (0, 0);
        } else if self.buffer.len() - self.end < RECORD {
            self.buffer.copy_within(self.at..self.end, 0);
            (self.at, self.end) = (0, self.end - self.at);
        }
    }

    /// Returns the payload of the next record, or `None` if the record is incomplete.
    pub(crate) fn next(&mut self) -> Result<Option<&[u8]>, RecordError> {
        let Some(header) = Header::parse(&self.buffer[self.at..self.end])? else {
            return Ok(None);
        };
        let record = header.record();
        if record > RECORD {
            return Err(RecordError::NoRoom { input: record, room: RECORD });
        }
        if self.end - self.at < record {
            return Ok(None);
        }
        let begin = self.at;
        self.at += record;
        open(&mut self.opener, &mut self.buffer[begin..begin + record]).map(Some)
    }
}
