//! Messages: packets on a `SOCK_SEQPACKET` socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Keep the descriptor that comes along in the slot; one that is there goes.
pub(crate) const PUT: u32 = 1;
/// Close what is in the slot.
pub(crate) const CLEAR: u32 = 2;
/// Send copies of everything: packets of slot numbers with as many descriptors, then an empty list.
pub(crate) const TAKE: u32 = 3;

/// Descriptors in one packet; the kernel takes 253.
pub(crate) const BATCH: usize = 128;

/// A request: operation and slot.
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

/// Receives a packet and calls `each` with its descriptors in order. Gives its length; zero: the
/// peer has gone.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    mut each: impl FnMut(OwnedFd),
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut part = [IoSliceMut::new(&mut *into)];
        match rustix::net::recvmsg(socket, &mut part, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            files.for_each(&mut each);
        }
    }
    Ok(received.bytes)
}
