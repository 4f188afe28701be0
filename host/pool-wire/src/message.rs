//! Messages: packets on a `SOCK_SEQPACKET` socket, in the byte order of the machine.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use slipway_numa::NumaNode;
use slipway_peer::{Bin, Foreign};

use crate::template::{TemplateName, WORDS};

/// First word of a request: the protocol and its version.
const ASK: u64 = u64::from_be_bytes(*b"slippool") ^ 3;
/// First bytes of the pool's messages.
const GIVEN: u8 = 1;
const REFUSED: u8 = 2;
const TOKEN: u8 = 3;
const SERVED: u8 = 4;
/// First word of the VMM's message.
const FAULTS: u64 = 5;
/// The number in a message that stands for no NUMA node.
const NOWHERE: u16 = u16::MAX;

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
    /// The NUMA node that the memory should be on; `None` leaves the choice to the pool. The pool
    /// gives memory of another one where this one has none, or where the pool does not know it.
    pub near: Option<NumaNode>,
    /// The template with whose bytes the memory begins, of the same size; `None` for zeros. Such
    /// memory has pages of the base size.
    pub template: Option<TemplateName>,
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

/// Returns the number that stands for a NUMA node, or for none.
fn number(node: Option<NumaNode>) -> u16 {
    node.map_or(NOWHERE, NumaNode::number)
}

/// Returns the NUMA node, or none, that a number stands for.
///
/// # Errors
/// [`WireError::Malformed`] if Linux has no node with this number.
fn node(number: u64) -> Result<Option<NumaNode>, WireError> {
    match NumaNode::new(number) {
        None if number == u64::from(NOWHERE) => Ok(None),
        None => Err(WireError::Malformed),
        node => Ok(node),
    }
}

/// Returns the bytes of a message of the pool about memory.
fn about<F>(kind: u8, memory: &Given<F>) -> [u8; 4] {
    let [low, high] = number(memory.home).to_le_bytes();
    [kind, low, high, u8::from(memory.fork)]
}

/// Returns the memory, with this file, that a message of the pool is about, which must be of this
/// kind.
fn memory(message: &[u8], kind: u8, file: OwnedFd) -> Result<Given<OwnedFd>, WireError> {
    match *message {
        [first, low, high, fork @ (0 | 1)] if first == kind => {
            let home = node(u16::from_le_bytes([low, high]).into())?;
            Ok(Given { file, home, fork: fork == 1 })
        }
        _ => Err(WireError::Malformed),
    }
}

/// Sends a request for memory.
pub(crate) fn ask(socket: BorrowedFd<'_>, request: Request) -> Result<(), WireError> {
    let huge = u64::from(request.page == Page::Huge);
    let words = [ASK, request.bytes, huge, number(request.near).into()];
    send(socket, &bytes(&[&words[..], &TemplateName::words(request.template)].concat()), &[])
}

/// Receives a request for memory.
///
/// # Errors
/// [`WireError`].
pub fn accept(socket: BorrowedFd<'_>, bin: &Bin) -> Result<Request, WireError> {
    let (message, _) = receive(socket, bin)?;
    let words = words(&message).unwrap_or_default();
    let Some((&[ASK, bytes, huge @ (0 | 1), near], name)) = words.split_first_chunk() else {
        return Err(WireError::Malformed);
    };
    let name: &[u64; WORDS] = name.try_into().map_err(|_| WireError::Malformed)?;
    let template = TemplateName::of_words(name).ok_or(WireError::Malformed)?;
    let page = if huge == 1 { Page::Huge } else { Page::Base };
    Ok(Request { bytes, page, near: node(near)?, template })
}

/// Memory that the pool gives.
#[derive(Clone, Copy, Debug)]
pub struct Given<F> {
    /// Its file.
    pub file: F,
    /// The NUMA node on which the kernel makes its pages; `None` if it is that of the thread that
    /// touches a page first, as on a host with one node.
    pub home: Option<NumaNode>,
    /// Set if it begins as a template. Then a page that its file lacks is not zeros, and the faults
    /// of missing pages are handed over, too.
    pub fork: bool,
}

/// Answers a request: sends the memory, or the reason for which there is none.
///
/// # Errors
/// [`WireError`].
pub fn answer(
    socket: BorrowedFd<'_>,
    given: Result<Given<BorrowedFd<'_>>, &str>,
) -> Result<(), WireError> {
    match given {
        Ok(given) => send(socket, &about(GIVEN, &given), &[given.file]),
        Err(text) => {
            let text = &text.as_bytes()[..text.len().min(MOST - 1)];
            send(socket, &[&[REFUSED], text].concat(), &[])
        }
    }
}

/// Receives the answer to a request.
pub(crate) fn given(socket: BorrowedFd<'_>, bin: &Bin) -> Result<Given<OwnedFd>, WireError> {
    let (message, mut files) = receive(socket, bin)?;
    match (message.split_first(), files.pop()) {
        (Some((&GIVEN, _)), Some(file)) if files.is_empty() => {
            memory(&message, GIVEN, file.into_owned())
        }
        (Some((&REFUSED, text)), None) => {
            Err(WireError::Refused(String::from_utf8_lossy(text).into_owned()))
        }
        _ => Err(WireError::Malformed),
    }
}

/// Sends the VMM its token of the file, what else it must know of the memory, and the device that
/// makes userfaultfds.
///
/// # Errors
/// [`WireError`].
pub fn send_token(
    socket: BorrowedFd<'_>,
    token: Given<BorrowedFd<'_>>,
    device: BorrowedFd<'_>,
) -> Result<(), WireError> {
    send(socket, &about(TOKEN, &token), &[token.file, device])
}

/// Receives the token with what else there is to know of the memory, and the device.
pub(crate) fn token(
    socket: BorrowedFd<'_>,
    bin: &Bin,
) -> Result<(Given<OwnedFd>, OwnedFd), WireError> {
    let (message, files) = receive(socket, bin)?;
    let files: Vec<OwnedFd> = files.into_iter().map(Foreign::into_owned).collect();
    let [file, device] = files.try_into().map_err(|_| WireError::Malformed)?;
    Ok((memory(&message, TOKEN, file)?, device))
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

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        socketpair(AddressFamily::UNIX, kind, flags, None).unwrap()
    }

    fn nodes() -> [Option<NumaNode>; 4] {
        [None, NumaNode::new(0), NumaNode::new(255), NumaNode::new(1023)]
    }

    #[test]
    fn requests_and_answers_name_any_node_or_none() {
        let (here, there) = pair();
        let (bin, file) = (Bin::new(), pair().0);
        for (node, fork) in nodes().into_iter().zip([false, true].into_iter().cycle()) {
            let template = TemplateName::new("web").filter(|_| fork);
            let request = Request { bytes: 1 << 20, page: Page::Huge, near: node, template };
            ask(here.as_fd(), request).unwrap();
            assert_eq!(accept(there.as_fd(), &bin).unwrap(), request);
            let memory = Given { file: file.as_fd(), home: node, fork };
            answer(there.as_fd(), Ok(memory)).unwrap();
            let received = given(here.as_fd(), &bin).unwrap();
            assert_eq!((received.home, received.fork), (node, fork));
            send_token(there.as_fd(), memory, file.as_fd()).unwrap();
            let received = token(here.as_fd(), &bin).unwrap().0;
            assert_eq!((received.home, received.fork), (node, fork));
        }
    }

    #[test]
    fn requests_of_another_form_or_version_are_refused() {
        let (here, there) = pair();
        let nowhere = u64::from(NOWHERE);
        let none = [0; WORDS];
        let with = |first: &[u64], name: &[u64]| [first, name].concat();
        for words in &[
            // Version 1 named no node, and version 2 no template.
            vec![ASK ^ 2, 1 << 20, 0],
            vec![ASK ^ 1, 1 << 20, 0, 0],
            vec![ASK, 1 << 20, 0, 0],
            with(&[ASK ^ 1, 1 << 20, 0, 0], &none),
            with(&[ASK, 1 << 20, 0], &none),
            with(&[ASK, 1 << 20, 2, 0], &none),
            with(&[ASK, 1 << 20, 0, 1024], &none),
            with(&[ASK, 1 << 20, 0, nowhere - 1], &none),
            with(&[ASK, 1 << 20, 0, nowhere + 1], &none),
            with(&[ASK, 1 << 20, 0, u64::MAX], &none),
            with(&[ASK, 1 << 20, 0, 0, 0], &none),
            with(&[ASK, 1 << 20, 0, 0], &[u64::MAX; WORDS]),
            with(&[ASK, 1 << 20, 0, 0], &[0, 0x61, 0, 0, 0, 0, 0, 0]),
        ] {
            send(here.as_fd(), &bytes(words), &[]).unwrap();
            let refused = accept(there.as_fd(), &Bin::new());
            assert!(matches!(refused, Err(WireError::Malformed)), "{words:x?}: {refused:?}");
        }
    }

    #[test]
    fn messages_of_a_pool_of_another_form_are_refused() {
        let (here, there) = pair();
        let (bin, file) = (Bin::new(), pair().0);
        let file = file.as_fd();
        for bytes in [
            &[GIVEN][..],
            &[GIVEN, 0],
            &[GIVEN, 0, 0],
            &[GIVEN, 0, 4, 0],
            &[GIVEN, 0, 0, 2],
            &[GIVEN, 0, 0, 0, 0],
            &[TOKEN, 0, 0, 0],
        ] {
            send(there.as_fd(), bytes, &[file]).unwrap();
            let refused = given(here.as_fd(), &bin);
            assert!(matches!(refused, Err(WireError::Malformed)), "{bytes:?}: {refused:?}");
        }
        for (bytes, files) in [
            (&[TOKEN][..], &[file, file][..]),
            (&[TOKEN, 0, 0], &[file, file]),
            (&[TOKEN, 0, 4, 0], &[file, file]),
            (&[TOKEN, 0, 0, 2], &[file, file]),
            (&[GIVEN, 0, 0, 0], &[file, file]),
            (&[TOKEN, 0, 0, 0], &[file]),
        ] {
            send(there.as_fd(), bytes, files).unwrap();
            let refused = token(here.as_fd(), &bin);
            assert!(matches!(refused, Err(WireError::Malformed)), "{bytes:?}: {refused:?}");
        }
    }
}
