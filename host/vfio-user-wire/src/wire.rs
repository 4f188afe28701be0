//! Messages on a nonblocking stream socket: framing, descriptors, a bounded output queue.
//!
//! A message is received in two kinds of reads, the header first and then the payload, and no read
//! goes past the message's end. Descriptors come with a byte of the stream, so the descriptors that
//! a read receives belong to the message that it reads.
//!
//! Closing a descriptor that the peer sent, or the connection itself, may take as long as the peer
//! likes: the socket and every descriptor are [`Foreign`].

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use slipway_peer::{Bin, Foreign};
use slipway_vfio_user_spec::{HEADER_LEN, Header};
use zerocopy::{FromBytes, IntoBytes};

/// The largest number of descriptors that are accepted with one message. QEMU refuses servers that
/// announce more than 16.
pub const MAX_MSG_FDS: usize = 16;
/// The largest number of data bytes in one message.
pub const MAX_DATA_XFER_SIZE: usize = 1 << 20;
/// The largest message in bytes: the data and the structures before them.
pub const MAX_MESSAGE: usize = MAX_DATA_XFER_SIZE + 4096;
/// The number of bytes by which the payload's buffer may exceed what has arrived.
const READ_AHEAD: usize = 64 << 10;
/// The reason for which a connection ends.
#[derive(Debug, thiserror::Error)]
pub enum End {
    /// The peer closed its end.
    #[error("the peer hung up")]
    Closed,
    /// The peer closed its end before the end of a message.
    #[error("the peer hung up within a message")]
    Cut,
    /// The peer violated the protocol or a limit.
    #[error("{0}")]
    Broken(&'static str),
    /// A system call on the socket failed.
    #[error("the socket failed: {0}")]
    Socket(#[from] Errno),
}

/// A complete message.
#[derive(Debug)]
pub struct Message {
    /// The header; its size is that of the message.
    pub header: Header,
    /// The bytes after the header, at most [`MAX_MESSAGE`] with it.
    pub payload: Vec<u8>,
    /// The descriptors, at most [`MAX_MSG_FDS`].
    pub files: Vec<Foreign>,
    /// More descriptors came than are accepted; the excess is closed elsewhere.
    pub excess: bool,
}

/// A message that waits to be sent.
struct Out {
    bytes: Vec<u8>,
    sent: usize,
    /// The descriptors that go with the first byte.
    files: Vec<OwnedFd>,
}

/// One end of a connection.
pub struct Wire {
    /// Closing the connection also closes descriptors that were sent over it and not received.
    socket: Foreign,
    /// The bin that closes the peer's descriptors.
    bin: Bin,
    /// The number of bytes of `header` that have arrived.
    got: usize,
    header: [u8; HEADER_LEN],
    /// The part of the payload that has arrived, once the header has.
    payload: Vec<u8>,
    files: Vec<Foreign>,
    excess: bool,
    out: VecDeque<Out>,
    out_bytes: usize,
    max_out_bytes: usize,
}

impl Wire {
    /// Wraps a connected socket. Calls never block, whatever the socket's own mode is. `bin` is the
    /// peer's.
    pub fn new(socket: Foreign, bin: &Bin, max_out_bytes: usize) -> Self {
        Self {
            socket,
            bin: bin.clone(),
            got: 0,
            header: [0; HEADER_LEN],
            payload: Vec::new(),
            files: Vec::new(),
            excess: false,
            out: VecDeque::new(),
            out_bytes: 0,
            max_out_bytes,
        }
    }

    /// Returns the socket.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns the bin that closes the peer's descriptors.
    pub fn bin(&self) -> &Bin {
        &self.bin
    }

    /// Returns whether the peer has closed its end. Messages that it sent before may be unread.
    pub fn is_hung_up(&self) -> bool {
        slipway_peer::ready(&self.socket, PollFlags::empty()).contains(PollFlags::HUP)
    }

    /// Returns whether output waits to be sent.
    pub fn has_output(&self) -> bool {
        !self.out.is_empty()
    }

    /// Returns the next message, or `None` if a part of it has not arrived yet.
    pub fn receive(&mut self) -> Result<Option<Message>, End> {
        while self.got < HEADER_LEN {
            let Some(count) = self.read_header()? else { return Ok(None) };
            self.got += count;
        }
        let want = payload_len(&self.header())?;
        while self.payload.len() < want {
            if !self.read_payload(want)? {
                return Ok(None);
            }
        }
        self.got = 0;
        Ok(Some(Message {
            header: self.header(),
            payload: std::mem::take(&mut self.payload),
            files: std::mem::take(&mut self.files),
            excess: std::mem::take(&mut self.excess),
        }))
    }

    /// Returns the header, whose bytes have arrived.
    fn header(&self) -> Header {
        Header::read_from_bytes(&self.header).unwrap_or_default()
    }

    fn read_header(&mut self) -> Result<Option<usize>, End> {
        let into = &mut self.header[self.got..];
        let how = (self.got == 0, RecvFlags::empty());
        let from = (self.socket.as_fd(), &self.bin);
        read(from, into, &mut self.files, &mut self.excess, how)
    }

    /// Reads more of the payload. Returns false if nothing has arrived.
    fn read_payload(&mut self, want: usize) -> Result<bool, End> {
        let start = self.payload.len();
        self.payload.resize(want.min(start + READ_AHEAD), 0);
        let into = &mut self.payload[start..];
        let how = (false, RecvFlags::empty());
        let from = (self.socket.as_fd(), &self.bin);
        let outcome = read(from, into, &mut self.files, &mut self.excess, how);
        let count = outcome.as_ref().ok().copied().flatten();
        self.payload.truncate(start + count.unwrap_or(0));
        Ok(outcome?.is_some())
    }

    /// Sends a message, or queues the part of it that the socket does not accept.
    ///
    /// # Errors
    /// [`End`], also if more would be queued than is allowed.
    pub fn send(
        &mut self,
        header: &Header,
        payload: &[u8],
        mut files: Vec<OwnedFd>,
    ) -> Result<(), End> {
        let mut sent = 0;
        if self.out.is_empty() {
            let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            sent = self.send_now(header, payload, &borrowed)?;
            if sent > 0 {
                files.clear();
            }
        }
        self.queue(header, payload, sent, files)
    }

    /// Sends a message with any number of descriptors. Descriptors cannot be queued: returns
    /// `false`, and sends nothing, if the socket does not accept the beginning of the message.
    ///
    /// # Errors
    /// [`End`].
    pub fn send_with(
        &mut self,
        header: &Header,
        payload: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> Result<bool, End> {
        let sent = if self.out.is_empty() { self.send_now(header, payload, files)? } else { 0 };
        if sent == 0 {
            return Ok(false);
        }
        self.queue(header, payload, sent, Vec::new())?;
        Ok(true)
    }

    fn send_now(
        &self,
        header: &Header,
        payload: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> Result<usize, End> {
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(payload)];
        write(self.socket.as_fd(), &parts, files)
    }

    /// Queues the rest of a message after its first `sent` bytes.
    fn queue(
        &mut self,
        header: &Header,
        payload: &[u8],
        sent: usize,
        files: Vec<OwnedFd>,
    ) -> Result<(), End> {
        let left = HEADER_LEN + payload.len() - sent;
        if left == 0 {
            return Ok(());
        }
        if self.out_bytes.saturating_add(left) > self.max_out_bytes {
            return Err(End::Broken("the peer does not read what is sent"));
        }
        self.out_bytes += left;
        let mut bytes = Vec::with_capacity(left);
        let split = sent.min(HEADER_LEN);
        bytes.extend_from_slice(&header.as_bytes()[split..]);
        bytes.extend_from_slice(&payload[sent - split..]);
        self.out.push_back(Out { bytes, sent: 0, files });
        Ok(())
    }

    /// Sends as much of the queue as the socket accepts. Returns whether the queue is empty.
    pub fn flush(&mut self) -> Result<bool, End> {
        while let Some(next) = self.out.front_mut() {
            let parts = [IoSlice::new(&next.bytes[next.sent..])];
            let files: Vec<_> = next.files.iter().map(AsFd::as_fd).collect();
            let count = write(self.socket.as_fd(), &parts, &files)?;
            if count == 0 {
                return Ok(false);
            }
            next.files.clear();
            next.sent += count;
            self.out_bytes -= count;
            if next.sent == next.bytes.len() {
                self.out.pop_front();
            }
        }
        Ok(true)
    }
}

/// Returns the number of bytes after a header.
///
/// # Errors
/// [`End`]: after an impossible size, the stream has no next message.
pub fn payload_len(header: &Header) -> Result<usize, End> {
    let size = header.size.get() as usize;
    if size > MAX_MESSAGE {
        return Err(End::Broken("a message larger than the limit"));
    }
    size.checked_sub(HEADER_LEN).ok_or(End::Broken("a message shorter than its header"))
}

/// Reads from a socket once, and adds at most [`MAX_MSG_FDS`] descriptors to `files`; `excess` is
/// set if there were more. Returns `None` if nothing has arrived. With `boundary`, the stream may
/// end here.
///
/// # Errors
/// [`End`].
pub fn read(
    (socket, bin): (BorrowedFd<'_>, &Bin),
    into: &mut [u8],
    files: &mut Vec<Foreign>,
    excess: &mut bool,
    (boundary, flags): (bool, RecvFlags),
) -> Result<Option<usize>, End> {
    let parts = &mut [IoSliceMut::new(into)];
    let received = loop {
        match slipway_peer::receive(socket, parts, bin, flags | RecvFlags::DONTWAIT) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::CONNRESET) => return Err(End::Closed),
            Err(error) => return Err(error.into()),
            Ok(received) => break received,
        }
    };
    let room = MAX_MSG_FDS - files.len();
    *excess |= received.flags.contains(ReturnFlags::CTRUNC) || received.files.len() > room;
    files.extend(received.files.into_iter().take(room));
    match received.bytes {
        0 if boundary => Err(End::Closed),
        0 => Err(End::Cut),
        count => Ok(Some(count)),
    }
}

/// Writes once. Returns zero if the socket accepts nothing at present.
fn write(
    socket: BorrowedFd<'_>,
    parts: &[IoSlice<'_>],
    files: &[BorrowedFd<'_>],
) -> Result<usize, End> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MSG_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(End::Broken("more descriptors than a message takes"));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        match rustix::net::sendmsg(socket, parts, &mut control, flags) {
            Ok(count) => return Ok(count),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(0),
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(End::Closed),
            Err(error) => return Err(error.into()),
        }
    }
}
