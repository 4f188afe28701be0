//! Messages on a nonblocking stream socket: framing, descriptors, a bounded output queue.
//!
//! A message is received in two kinds of reads, the header first and then the payload, never past
//! the message's end: descriptors come with a byte of the stream, and so the ones that come with a
//! read belong to the message that the read is for.
//!
//! Closing what the other side sent, or the connection itself, may take as long as that side likes: the
//! socket and every descriptor are [`Foreign`].

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use slipway_peer::{Bin, Foreign};
use slipway_vfio_user_spec::{Command, HEADER_LEN, Header};
use zerocopy::{FromBytes, IntoBytes};

/// Most descriptors that are taken with one message. QEMU refuses servers that say more than 16.
pub(crate) const MAX_MSG_FDS: usize = 16;
/// Largest count of data in one message.
pub(crate) const MAX_DATA_XFER_SIZE: usize = 1 << 20;
/// Largest message: the data and the structures before them.
pub(crate) const MAX_MESSAGE: usize = MAX_DATA_XFER_SIZE + 4096;
/// The payload's buffer grows with what arrives, by at most this much ahead of it.
const READ_AHEAD: usize = 64 << 10;
/// As much is looked at before a message's length is known: more than nearly all have.
const PEEK_AHEAD: usize = 1 << 10;

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub(crate) enum End {
    #[error("the client hung up")]
    Closed,
    #[error("{0}")]
    Broken(&'static str),
    #[error("the socket failed: {0}")]
    Socket(#[from] Errno),
}

/// A whole message.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
    /// At most [`MAX_MSG_FDS`].
    pub(crate) files: Vec<Foreign>,
    /// More descriptors came than are taken; they are closed elsewhere.
    pub(crate) excess: bool,
}

/// What is at the socket's front.
pub(crate) enum Peeked {
    Nothing,
    /// The beginning of a message; its length, if that is known and the message brings no descriptors.
    Partial(Option<usize>),
    /// A message, and its length.
    Whole(Message, usize),
}

/// A message on its way out.
struct Out {
    bytes: Vec<u8>,
    sent: usize,
    file: Option<OwnedFd>,
}

/// One end of a connection.
pub(crate) struct Wire {
    /// A connection holds descriptors that were sent and not received.
    socket: Foreign,
    /// Where the other side's descriptors are closed.
    bin: Bin,
    /// Bytes of `header` that are here.
    got: usize,
    header: [u8; HEADER_LEN],
    /// Payload as far as it is here, once the header is.
    payload: Vec<u8>,
    files: Vec<Foreign>,
    excess: bool,
    out: VecDeque<Out>,
    out_bytes: usize,
    max_out_bytes: usize,
}

impl Wire {
    /// On a connected socket; calls never block, whatever the socket's own mode is. `bin` is the other
    /// side's.
    pub(crate) fn new(socket: Foreign, bin: &Bin, max_out_bytes: usize) -> Self {
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

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns whether the client has closed its end. Messages that it sent before may be unread.
    pub(crate) fn is_hung_up(&self) -> bool {
        let mut asked = [PollFd::new(&self.socket, PollFlags::empty())];
        poll(&mut asked, Some(&Timespec::default())).is_ok()
            && asked[0].revents().contains(PollFlags::HUP)
    }

    /// Whether something waits to be sent.
    pub(crate) fn has_output(&self) -> bool {
        !self.out.is_empty()
    }

    /// The next message, or None when it is not all here yet.
    pub(crate) fn receive(&mut self) -> Result<Option<Message>, End> {
        while self.got < HEADER_LEN {
            let Some(count) = self.read_header()? else { return Ok(None) };
            self.got += count;
        }
        let want = self.payload_len()?;
        while self.payload.len() < want {
            if !self.read_payload(want)? {
                return Ok(None);
            }
        }
        self.got = 0;
        Ok(Some(Message {
            header: Header::read_from_bytes(&self.header).unwrap_or_default(),
            payload: std::mem::take(&mut self.payload),
            files: std::mem::take(&mut self.files),
            excess: std::mem::take(&mut self.excess),
        }))
    }

    /// Looks at the next message and leaves it where it is. Descriptors are duplicates; only those of
    /// a request that may have some are looked at.
    pub(crate) fn peek(&mut self) -> Result<Peeked, End> {
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        self.payload.resize(self.payload.len().max(PEEK_AHEAD), 0);
        #[allow(
            clippy::disallowed_methods,
            reason = "what is only looked at stays in the socket, so no descriptor is closed here"
        )]
        let looked = rustix::net::recv(&self.socket, &mut self.payload[..], flags);
        let count = match looked {
            Ok((0, _)) | Err(Errno::CONNRESET) => return Err(End::Closed),
            Ok((count, _)) => count,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Peeked::Nothing),
            Err(error) => return Err(error.into()),
        };
        if count < HEADER_LEN {
            return Ok(Peeked::Partial(None));
        }
        self.header.copy_from_slice(&self.payload[..HEADER_LEN]);
        let size = HEADER_LEN + self.payload_len()?;
        let header = Header::read_from_bytes(&self.header).unwrap_or_default();
        let command = Command::from_code(header.command.get());
        let brings_files =
            matches!(command, Some(Command::DmaMap | Command::DmaUnmap | Command::DeviceSetIrqs));
        let (mut files, mut excess) = (Vec::new(), false);
        if brings_files || count < size {
            // Exactly the message: descriptors come with a byte of the stream.
            self.payload.resize(size, 0);
            let into = &mut self.payload[..size];
            let peek = RecvFlags::PEEK;
            let from = (self.socket.as_fd(), &self.bin);
            let count = read(from, into, &mut files, &mut excess, (true, peek))?;
            if count.is_none_or(|count| count < size) {
                return Ok(Peeked::Partial((!brings_files).then_some(size)));
            }
        }
        let payload = self.payload[HEADER_LEN..size].to_vec();
        Ok(Peeked::Whole(Message { header, payload, files, excess }, size))
    }

    /// Bytes after the header. A size that cannot be leaves the stream without a next message.
    fn payload_len(&self) -> Result<usize, End> {
        let header = Header::read_from_bytes(&self.header).unwrap_or_default();
        let size = header.size.get() as usize;
        if size > MAX_MESSAGE {
            return Err(End::Broken("a message larger than the limit"));
        }
        size.checked_sub(HEADER_LEN).ok_or(End::Broken("a message shorter than its header"))
    }

    fn read_header(&mut self) -> Result<Option<usize>, End> {
        let into = &mut self.header[self.got..];
        let whole = self.got == 0;
        let how = (whole, RecvFlags::empty());
        let from = (self.socket.as_fd(), &self.bin);
        read(from, into, &mut self.files, &mut self.excess, how)
    }

    /// False: nothing more is here.
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

    /// Sends a message, or queues what the socket does not take.
    ///
    /// # Errors
    /// [`End`], also when more would be queued than is allowed.
    pub(crate) fn send(
        &mut self,
        header: &Header,
        payload: &[u8],
        file: Option<OwnedFd>,
    ) -> Result<(), End> {
        let mut sent = 0;
        let mut file = file;
        if self.out.is_empty() {
            let files = file.as_ref().map(AsFd::as_fd);
            sent = self.send_now(header, payload, files.as_slice())?;
            if sent > 0 {
                file = None;
            }
        }
        self.queue(header, payload, sent, file)
    }

    /// As [`Wire::send`], with any number of descriptors, which cannot be queued: the socket must
    /// take the beginning of the message at once.
    ///
    /// # Errors
    /// [`End`].
    pub(crate) fn send_with(
        &mut self,
        header: &Header,
        payload: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> Result<(), End> {
        if files.is_empty() {
            return self.send(header, payload, None);
        }
        let sent = if self.out.is_empty() { self.send_now(header, payload, files)? } else { 0 };
        if sent == 0 {
            return Err(End::Broken("the socket is full"));
        }
        self.queue(header, payload, sent, None)
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

    /// Queues what comes after the first `sent` bytes of a message.
    fn queue(
        &mut self,
        header: &Header,
        payload: &[u8],
        sent: usize,
        file: Option<OwnedFd>,
    ) -> Result<(), End> {
        let left = HEADER_LEN + payload.len() - sent;
        if left == 0 {
            return Ok(());
        }
        if self.out_bytes.saturating_add(left) > self.max_out_bytes {
            return Err(End::Broken("the client does not read its replies"));
        }
        self.out_bytes += left;
        let mut bytes = Vec::with_capacity(left);
        let split = sent.min(HEADER_LEN);
        bytes.extend_from_slice(&header.as_bytes()[split..]);
        bytes.extend_from_slice(&payload[sent - split..]);
        self.out.push_back(Out { bytes, sent: 0, file });
        Ok(())
    }

    /// Sends what is queued as far as the socket takes it. Whether nothing is left.
    pub(crate) fn flush(&mut self) -> Result<bool, End> {
        while let Some(next) = self.out.front_mut() {
            let parts = [IoSlice::new(&next.bytes[next.sent..])];
            let files = next.file.as_ref().map(AsFd::as_fd);
            let count = write(self.socket.as_fd(), &parts, files.as_slice())?;
            if count == 0 {
                return Ok(false);
            }
            next.file = None;
            next.sent += count;
            self.out_bytes -= count;
            if next.sent == next.bytes.len() {
                self.out.pop_front();
            }
        }
        Ok(true)
    }
}

/// Reads once. None: nothing is here. `boundary`: an end of the stream is a proper one.
fn read(
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
        0 => Err(End::Broken("the client hung up within a message")),
        count => Ok(Some(count)),
    }
}

/// Writes once. Zero: the socket takes nothing now.
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
