//! Messages: packets on a `SOCK_SEQPACKET` socket, in the byte order of the machine.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use slipway_peer::{Bin, Foreign};

/// First word of a request: the protocol and its version.
const ASK: u64 = u64::from_be_bytes(*b"slippool") ^ 1;
/// First bytes of the pool's messages.
const GIVEN: u8 = 1;
const REFUSED: u8 = 2;
const TOKEN: u8 = 3;
const SERVED: u8 = 4;
/// First word of the VMM's message.
const FAULTS: u64 = 5;

/// Most bytes of a message: a refusal's text.
const MOST: usize = 512;
/// Most ranges of a VMM.
const RANGES: usize = 8;

/// A failure of the protocol.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The pool does not give memory; the text says why.
    #[error("{0}")]
    Refused(String),
    /// The other side ended the connection.
    #[error("the connection to the pool of memory has ended")]
    Ended,
    /// The other side sent something else than the protocol has at this point.
    #[error("the pool of memory has another version")]
    Malformed,
    /// A call failed.
    #[error("{what}: {source}")]
    Io {
        /// The call.
        what: &'static str,
        /// Its error.
        source: std::io::Error,
    },
}

/// Returns a converter of errors for `map_err`.
pub(crate) fn failed<E: Into<std::io::Error>>(what: &'static str) -> impl Fn(E) -> WireError {
    move |error| WireError::Io { what, source: error.into() }
}

/// The size of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Page {
    /// Pages of the machine's base size.
    Base,
    /// Huge pages of 2 MiB (hugetlbfs).
    Huge,
}

/// A request for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The size in bytes.
    pub bytes: u64,
    /// The size of its pages.
    pub page: Page,
}

/// A part of the memory in the address space of the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The address of the first byte.
    pub address: u64,
    /// The number of bytes.
    pub len: u64,
    /// The offset of the first byte in the file.
    pub offset: u64,
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], files: &[BorrowedFd<'_>]) -> Result<(), WireError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(WireError::Malformed);
    }
    let part = [IoSlice::new(bytes)];
    match rustix::net::sendmsg(socket, &part, &mut control, SendFlags::NOSIGNAL) {
        Ok(_) => Ok(()),
        Err(Errno::PIPE | Errno::CONNRESET) => Err(WireError::Ended),
        Err(errno) => Err(failed("sending to the pool of memory")(errno)),
    }
}

fn receive(socket: BorrowedFd<'_>, bin: &Bin) -> Result<(Vec<u8>, Vec<Foreign>), WireError> {
    let mut bytes = vec![0; MOST];
    let mut part = [IoSliceMut::new(&mut bytes)];
    let received = loop {
        match slipway_peer::receive_reply(socket, &mut part, bin, RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Err(WireError::Ended),
            other => break other.map_err(failed("receiving from the pool of memory"))?,
        }
    };
    if received.bytes == 0 {
        return Err(WireError::Ended);
    }
    bytes.truncate(received.bytes);
    Ok((bytes, received.files))
}

/// Returns the words of a message, or `None` if it is not one of words.
fn words(bytes: &[u8]) -> Option<Vec<u64>> {
    let (words, rest) = bytes.as_chunks::<8>();
    rest.is_empty().then(|| words.iter().map(|word| u64::from_ne_bytes(*word)).collect())
}

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Sends a request for memory.
pub(crate) fn ask(socket: BorrowedFd<'_>, request: Request) -> Result<(), WireError> {
    let huge = u64::from(request.page == Page::Huge);
    send(socket, &bytes(&[ASK, request.bytes, huge]), &[])
}

/// Receives a request for memory.
///
/// # Errors
/// [`WireError`].
pub fn accept(socket: BorrowedFd<'_>, bin: &Bin) -> Result<Request, WireError> {
    let (message, _) = receive(socket, bin)?;
    match words(&message).as_deref() {
        Some(&[ASK, bytes, huge @ (0 | 1)]) => {
            Ok(Request { bytes, page: if huge == 1 { Page::Huge } else { Page::Base } })
        }
        _ => Err(WireError::Malformed),
    }
}

/// Answers a request: sends the file, or the reason for which there is none.
///
/// # Errors
/// [`WireError`].
pub fn answer(socket: BorrowedFd<'_>, file: Result<BorrowedFd<'_>, &str>) -> Result<(), WireError> {
    match file {
        Ok(file) => send(socket, &[GIVEN], &[file]),
        Err(text) => {
            let text = &text.as_bytes()[..text.len().min(MOST - 1)];
            send(socket, &[&[REFUSED], text].concat(), &[])
        }
    }
}

/// Receives the answer to a request.
pub(crate) fn given(socket: BorrowedFd<'_>, bin: &Bin) -> Result<OwnedFd, WireError> {
    let (message, mut files) = receive(socket, bin)?;
    match (message.split_first(), files.pop()) {
        (Some((&GIVEN, [])), Some(file)) if files.is_empty() => Ok(file.into_owned()),
        (Some((&REFUSED, text)), None) => {
            Err(WireError::Refused(String::from_utf8_lossy(text).into_owned()))
        }
        _ => Err(WireError::Malformed),
    }
}

/// Sends the VMM its token of the file, and the device that makes userfaultfds.
///
/// # Errors
/// [`WireError`].
pub fn send_token(
    socket: BorrowedFd<'_>,
    token: BorrowedFd<'_>,
    device: BorrowedFd<'_>,
) -> Result<(), WireError> {
    send(socket, &[TOKEN], &[token, device])
}

/// Receives token and device.
pub(crate) fn token(socket: BorrowedFd<'_>, bin: &Bin) -> Result<[OwnedFd; 2], WireError> {
    let (message, files) = receive(socket, bin)?;
    let files: Vec<OwnedFd> = files.into_iter().map(Foreign::into_owned).collect();
    match (&message[..], files.try_into()) {
        ([TOKEN], Ok(files)) => Ok(files),
        _ => Err(WireError::Malformed),
    }
}

/// Hands a userfaultfd over.
pub(crate) fn send_faults(
    socket: BorrowedFd<'_>,
    faults: BorrowedFd<'_>,
    ranges: &[Range],
) -> Result<(), WireError> {
    let parts = ranges.iter().flat_map(|range| [range.address, range.len, range.offset]);
    send(socket, &bytes(&[FAULTS].into_iter().chain(parts).collect::<Vec<_>>()), &[faults])
}

/// Receives a userfaultfd and the ranges that are registered with it: 1 to 8, none of which
/// overflows.
///
/// # Errors
/// [`WireError`].
pub fn receive_faults(
    socket: BorrowedFd<'_>,
    bin: &Bin,
) -> Result<(Foreign, Vec<Range>), WireError> {
    let (message, mut files) = receive(socket, bin)?;
    let words = words(&message).unwrap_or_default();
    let (Some((&FAULTS, parts)), Some(file), true) =
        (words.split_first(), files.pop(), files.is_empty())
    else {
        return Err(WireError::Malformed);
    };
    let (parts, rest) = parts.as_chunks::<3>();
    let ranges = parts.iter().map(|&[address, len, offset]| Range { address, len, offset });
    let ranges: Vec<Range> = ranges.collect();
    let sound = |range: &Range| {
        let end = |start: u64| start.checked_add(range.len).is_some();
        range.len > 0 && end(range.address) && end(range.offset)
    };
    if !rest.is_empty() || !(1..=RANGES).contains(&ranges.len()) || !ranges.iter().all(sound) {
        return Err(WireError::Malformed);
    }
    Ok((file, ranges))
}

/// Tells the VMM that its faults are served.
///
/// # Errors
/// [`WireError`].
pub fn confirm(socket: BorrowedFd<'_>) -> Result<(), WireError> {
    send(socket, &[SERVED], &[])
}

/// Waits until faults are served.
pub(crate) fn served(socket: BorrowedFd<'_>, bin: &Bin) -> Result<(), WireError> {
    let (message, _) = receive(socket.as_fd(), bin)?;
    (message == [SERVED]).then_some(()).ok_or(WireError::Malformed)
}
