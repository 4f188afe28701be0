//! Receiving from a peer that may send descriptors.

#![allow(unsafe_code)] // the one setsockopt(2)

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};

use crate::{Bin, Foreign};

/// Most descriptors that the kernel takes in one message: `SCM_MAX_FD` of the kernel's
/// include/net/scm.h.
pub const MAX_FILES: usize = 253;

/// The result of one [`receive`]: bytes and descriptors.
#[derive(Debug)]
pub struct Received {
    /// Number of bytes stored; 0 at the end of a stream.
    pub bytes: usize,
    /// All descriptors that came with the bytes.
    pub files: Vec<Foreign>,
    /// The kernel's flags of the message: `TRUNC` if a datagram was longer than the buffers.
    pub flags: ReturnFlags,
}

/// Calls recvmsg(2) with room for every descriptor that one message can carry. All received
/// descriptors are close-on-exec and are closed through `bin`.
///
/// With less room, the kernel would close the surplus descriptors in the calling thread, and a
/// close may last as long as the sender likes. The same happens when this process has no free
/// descriptor numbers, so a server keeps [`MAX_FILES`] of them free.
///
/// Waits for a message unless the socket or `flags` are non-blocking.
///
/// # Errors
/// The errors of recvmsg(2).
pub fn receive(
    socket: impl AsFd,
    into: &mut [IoSliceMut<'_>],
    bin: &Bin,
    flags: RecvFlags,
) -> rustix::io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    #[allow(clippy::disallowed_methods, reason = "this is the form that others use")]
    let message = rustix::net::recvmsg(socket, into, &mut control, flags)?;
    let mut files = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = part {
            files.extend(more.map(|file| Foreign::new(file, bin)));
        }
    }
    Ok(Received { bytes: message.bytes, files, flags: message.flags })
}

/// Receives a reply as [`receive`] does, also one that the peer sent before it closed its end with
/// this process's request unread. Of such a Unix socket Linux reports ECONNRESET first, once, and
/// the messages that are queued after it.
///
/// # Errors
/// The errors of recvmsg(2).
pub fn receive_reply(
    socket: impl AsFd,
    into: &mut [IoSliceMut<'_>],
    bin: &Bin,
    flags: RecvFlags,
) -> rustix::io::Result<Received> {
    match receive(&socket, into, bin, flags) {
        Err(Errno::CONNRESET) => receive(&socket, into, bin, flags),
        other => other,
    }
}

/// `SO_PASSRIGHTS` of asm-generic/socket.h (Linux 6.16).
const SO_PASSRIGHTS: libc::c_int = 83;

/// Makes the kernel refuse (EPERM) a peer's call that sends descriptors to `socket`. Sockets that
/// are accepted from a listening one inherit the option. Returns `false` if this kernel does not
/// know the option.
///
/// A server of a protocol without descriptors calls this and still uses [`receive`], for older
/// kernels.
pub fn refuse_descriptors(socket: impl AsFd) -> bool {
    let off: libc::c_int = 0;
    let len = size_of_val(&off) as libc::socklen_t;
    // SAFETY: the descriptor is borrowed for the call, and the kernel reads `len` bytes of `off`.
    let outcome = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const off).cast(),
            len,
        )
    };
    outcome == 0
}
