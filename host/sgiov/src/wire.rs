//! Messages over the control socket. Nothing here ever waits for a peer, whatever flags it gave the socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use slipway_sgiov_spec::control::{DESCRIPTORS, REPLY, REQUEST, Reply, Request};

/// What a look at a client's socket gives.
pub enum Received {
    /// A request, and the descriptors that came with it.
    Request(Request, Vec<OwnedFd>),
    /// Something that is none.
    Malformed,
    /// Nothing yet.
    Nothing,
    /// The client has gone.
    Gone,
}

/// Takes the next message.
pub fn receive(socket: BorrowedFd<'_>) -> Received {
    // One byte more, by which a longer message shows.
    let mut bytes = [0; REQUEST + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let message = match rustix::net::recvmsg(socket, &mut parts, &mut control, flags) {
        Ok(message) => message,
        Err(Errno::AGAIN | Errno::INTR) => return Received::Nothing,
        Err(_) => return Received::Gone,
    };
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            files.extend(more);
        }
    }
    if message.bytes == 0 {
        return Received::Gone;
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Received::Malformed;
    }
    let request = bytes.get(..message.bytes).and_then(Request::decode);
    request.map_or(Received::Malformed, |request| Received::Request(request, files))
}

/// Sends a reply with its descriptors. False: there was no room for it, or nobody is there. Who asks and does
/// not listen has asked for more than a socket buffer holds.
pub fn send(socket: BorrowedFd<'_>, reply: &Reply, files: &[Arc<OwnedFd>]) -> bool {
    let bytes: [u8; REPLY] = reply.encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&files)) {
        return false;
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags).is_ok()
}
