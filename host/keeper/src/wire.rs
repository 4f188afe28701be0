//! Messages of the keeper: packets on a `SOCK_SEQPACKET` socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use slipway_peer::{Bin, Foreign};

/// Puts the descriptor of the message into the slot; a former one is closed.
pub(crate) const PUT: u32 = 1;
/// Closes the descriptor in the slot.
pub(crate) const CLEAR: u32 = 2;
/// Asks for copies of all descriptors: packets of slot numbers with as many descriptors, then a
/// packet without any.
pub(crate) const TAKE: u32 = 3;

/// Descriptors in one packet; the kernel takes 253.
pub(crate) const BATCH: usize = 128;

/// Encodes a request: operation and slot.
pub(crate) fn request(operation: u32, slot: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&operation.to_ne_bytes());
    bytes[4..].copy_from_slice(&slot.to_ne_bytes());
    bytes
}

/// Sends a packet; waits for room.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    files: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::TOOBIG);
    }
    loop {
        let part = [IoSlice::new(bytes)];
        match rustix::net::sendmsg(socket, &part, &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            other => return other.map(drop),
        }
    }
}

/// Receives a packet: returns its length and its descriptors in order. A length of zero means that
/// the peer has gone.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    bin: &Bin,
) -> Result<(usize, Vec<Foreign>), Errno> {
    loop {
        let mut part = [IoSliceMut::new(&mut *into)];
        match slipway_peer::receive(socket, &mut part, bin, RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            other => return other.map(|received| (received.bytes, received.files)),
        }
    }
}
