//! The connection to the engine: a request, its reply, and the descriptors that come with it.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::sockopt::Timeout;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use slipway_peer::Bin;
use slipway_sgiov_spec::control::{DESCRIPTORS, REPLY, Reply, Request};

use crate::hidden::Hidden;

/// The longest time for the engine's answer; after that, the engine counts as dead.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(10);

pub(crate) struct Connection {
    socket: Hidden,
}

/// A reply and its descriptors.
pub(crate) struct Answer {
    pub reply: Reply,
    pub descriptors: Descriptors,
}

/// Descriptors of a message, in the order in which they were sent.
#[derive(Default)]
pub(crate) struct Descriptors([Option<OwnedFd>; DESCRIPTORS], usize);

impl<const N: usize> From<[OwnedFd; N]> for Descriptors {
    fn from(some: [OwnedFd; N]) -> Self {
        let mut all = Self::default();
        all.0.iter_mut().zip(some).for_each(|(place, fd)| *place = Some(fd));
        all
    }
}

impl Descriptors {
    /// Takes the last descriptor.
    ///
    /// # Errors
    /// `EPROTO`: no descriptor is left.
    pub fn last(&mut self) -> Result<OwnedFd, Errno> {
        self.0.iter_mut().rev().find_map(Option::take).ok_or(Errno::PROTO)
    }

    /// Takes the next descriptor.
    ///
    /// # Errors
    /// `EPROTO`: no descriptor is left.
    pub fn next(&mut self) -> Result<OwnedFd, Errno> {
        let at = self.1;
        self.1 += 1;
        self.0.get_mut(at).and_then(Option::take).ok_or(Errno::PROTO)
    }
}

impl Connection {
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        let kind = SocketType::SEQPACKET;
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        let socket = Hidden::new(socket)?;
        rustix::net::connect(&socket, &address)?;
        Self::of(socket)
    }

    pub fn of(socket: Hidden) -> std::io::Result<Self> {
        rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        Ok(Self { socket })
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends a request that has no reply.
    pub fn tell(&self, request: Request, with: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        let bytes = request.encode();
        let pieces = [std::io::IoSlice::new(&bytes)];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let passed = with.map(|fd| [fd]);
        if let Some(fds) = &passed {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        rustix::io::retry_on_intr(|| {
            rustix::net::sendmsg(&self.socket, &pieces, &mut ancillary, SendFlags::NOSIGNAL)
        })?;
        Ok(())
    }

    /// Sends a request and receives its reply.
    ///
    /// # Errors
    /// The engine is gone, or its reply is invalid.
    pub fn ask(&self, request: Request, with: Option<BorrowedFd<'_>>) -> Result<Answer, Errno> {
        // `EPIPE`: the engine is gone, or it refuses this user. Then it has sent the reason before
        // it hung up.
        let told = self.tell(request, with);
        told.or_else(|errno| if errno == Errno::PIPE { Ok(()) } else { Err(errno) })?;
        let mut bytes = [0; REPLY];
        let got = rustix::io::retry_on_intr(|| {
            let pieces = &mut [std::io::IoSliceMut::new(&mut bytes)];
            slipway_peer::receive_reply(&self.socket, pieces, &Bin::new(), RecvFlags::empty())
        })?;
        if got.bytes == 0 {
            told?;
        }
        // All descriptors are the engine's own: eventfds and memory that it made, and its
        // connections. It passes on nothing that another program sent, so closing one never blocks.
        let mut descriptors = Descriptors::default();
        for (place, fd) in descriptors.0.iter_mut().zip(got.files) {
            *place = Some(fd.into_owned());
        }
        let reply = Reply::decode(&bytes[..got.bytes]).ok_or(Errno::PROTO)?;
        Ok(Answer { reply, descriptors })
    }
}
