//! Receiving from a peer that may send descriptors.

#![allow(unsafe_code)] // the one setsockopt(2)

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};

use crate::{Bin, Foreign};

/// Descriptors that the kernel takes in one message at most: `SCM_MAX_FD` of linux/net/scm.h.
pub const MAX_FILES: usize = 253;

/// The result of one call: bytes and descriptors.
#[derive(Debug)]
pub struct Received {
    /// Bytes that were stored; 0 at the end of a stream.
    pub bytes: usize,
    /// All descriptors that came.
    pub files: Vec<Foreign>,
    /// The kernel's flags of the message: `TRUNC` if a datagram was longer than the buffers.
    pub flags: ReturnFlags,
}

/// Calls recvmsg(2) with room for every descriptor that one message can carry; all of them are
/// closed on exec and closed through `bin`.
///
/// A call with less room has the kernel close what is left over, in the calling thread, and a close
/// may last as long as the sender likes. The same happens when this process has no descriptor
/// numbers left, so a server keeps [`MAX_FILES`] of them free.
///
/// It waits for a message unless the socket or `flags` say otherwise.
///
/// # Errors
/// What recvmsg(2) says.
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

/// `SO_PASSRIGHTS` of asm-generic/socket.h (Linux 6.16).
const SO_PASSRIGHTS: libc::c_int = 83;

/// Has the kernel refuse (EPERM) a peer's call that sends descriptors to `socket`. Sockets that are
/// accepted from a listening one inherit it. Returns `false` if this kernel does not know the
/// option.
///
/// A protocol without descriptors says so with this and still uses [`receive`], for older kernels.
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
