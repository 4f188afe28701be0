//! Records that come in: received, opened in place.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use slipway_sgiov_spec::link::PAYLOAD;
use slipway_warp::record::{HEADER, Header, TAG, open};
use slipway_warp::{Opener, TransformError};

/// Bytes of a record, at most.
const RECORD: usize = HEADER + PAYLOAD + TAG;
/// Bytes of the buffer: more than a record, so that one recv(2) takes several.
const BUFFER: usize = 4 * RECORD;

pub(crate) struct Receiver {
    opener: Opener,
    buffer: Box<[u8]>,
    /// What was received and not opened yet is from here
    at: usize,
    /// to here.
    end: usize,
    /// Bytes taken from the socket.
    pub(crate) bytes: u64,
}

/// What the socket gave.
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
    /// `rest` came with the handshake.
    pub(crate) fn new(opener: Opener, rest: &[u8]) -> Self {
        let mut buffer: Box<[u8]> = vec![0; BUFFER.max(rest.len())].into();
        buffer[..rest.len()].copy_from_slice(rest);
        Self { opener, buffer, at: 0, end: rest.len(), bytes: 0 }
    }

    /// Takes what the socket has, as far as there is room.
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

    /// Has the part of a record that is there begin the buffer when it may have no room for the rest where it is:
    /// seldom, since it is another copy.
    fn make_room(&mut self) {
        if self.at == self.end {
            (self.at, self.end) = (0, 0);
        } else if self.buffer.len() - self.end < RECORD {
            self.buffer.copy_within(self.at..self.end, 0);
            (self.at, self.end) = (0, self.end - self.at);
        }
    }

    /// The payload of the next record. None: it has not all come.
    pub(crate) fn next(&mut self) -> Result<Option<&[u8]>, TransformError> {
        let Some(header) = Header::parse(&self.buffer[self.at..self.end])? else {
            return Ok(None);
        };
        let record = header.record();
        if record > RECORD {
            return Err(TransformError::NoRoom { input: record, room: RECORD });
        }
        if self.end - self.at < record {
            return Ok(None);
        }
        let begin = self.at;
        self.at += record;
        open(&mut self.opener, &mut self.buffer[begin..begin + record]).map(Some)
    }
}
