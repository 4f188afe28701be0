//! Messages over the control socket. Nothing here ever waits for a peer, whatever flags the peer
//! gave the socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{
    RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sockopt,
};
use slipway_peer::{Bin, Foreign};
use slipway_sgiov_spec::control::{DESCRIPTORS, REPLY, REQUEST, Reply, Request};

/// Bytes of replies, with what the kernel adds to each, that a client may leave unread. A client
/// takes its reply before it asks again; the descriptors in replies that wait count against the
/// engine's own user (unix(7)).
const UNREAD: usize = 8 << 10;

/// The result of looking for a message on a client's socket.
pub enum Received {
    /// A request, and the descriptors that came with it.
    Request(Request, Vec<Foreign>),
    /// A message that is no request.
    Malformed,
    /// No message yet.
    Nothing,
    /// The client has disconnected.
    Gone,
}

/// Bounds the replies that wait for a client.
pub fn bound_replies(socket: BorrowedFd<'_>) {
    // Errors are ignored: the kernel knows the option, and the size that it makes of the number is
    // enough for some replies.
    let _ = sockopt::set_socket_send_buffer_size(socket, UNREAD);
}

/// Receives the next message. Its descriptors are closed through `bin`.
pub fn receive(socket: BorrowedFd<'_>, bin: &Bin) -> Received {
    // One more byte shows that a message is too long.
    let mut bytes = [0; REQUEST + 1];
    let parts = &mut [IoSliceMut::new(&mut bytes)];
    let message = match slipway_peer::receive(socket, parts, bin, RecvFlags::DONTWAIT) {
        Ok(message) => message,
        Err(Errno::AGAIN | Errno::INTR) => return Received::Nothing,
        Err(_) => return Received::Gone,
    };
    if message.bytes == 0 {
        return Received::Gone;
    }
    if message.flags.contains(ReturnFlags::CTRUNC) || message.files.len() > DESCRIPTORS {
        return Received::Malformed;
    }
    let request = bytes.get(..message.bytes).and_then(Request::decode);
    request.map_or(Received::Malformed, |request| Received::Request(request, message.files))
}

/// Sends a reply with its descriptors. Returns `false` if there is no room for it, or if the client
/// has gone. No room means that the client has asked for more than a socket buffer holds without
/// taking its replies.
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
