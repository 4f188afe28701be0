//! The connection of a disk to the fetcher. No call waits.

use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, ReturnFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use slipway_lazy_spec::{Hello, MOST, Want};
use slipway_peer::{Bin, Foreign, receive, refuse_descriptors};

use crate::OpenError;
use crate::file::failed;

/// A connection to the fetcher, or the lack of one.
pub(super) struct FetcherConnection {
    address: SocketAddrUnix,
    hello: Hello,
    /// Closes connections.
    bin: Bin,
    state: ConnectionState,
}

enum ConnectionState {
    /// There is no connection.
    Lost,
    /// The greeting is sent, and not answered yet.
    Greeted(Foreign),
    /// The fetcher has the image.
    Open(Foreign),
}

/// The outcome of one look for a message.
pub(super) enum ReceiveOutcome {
    /// There is no message, or no connection.
    Nothing,
    /// A message of so many bytes.
    Message(usize),
    /// The connection has ended, or its message is longer than any of the protocol.
    End,
}

impl FetcherConnection {
    /// Makes the link of a disk to the fetcher at `socket`, which it greets with `hello`. There is
    /// no connection yet.
    ///
    /// # Errors
    /// [`OpenError::File`] if the path is too long for a socket.
    pub fn new(socket: &Path, hello: Hello) -> Result<Self, OpenError> {
        let address = SocketAddrUnix::new(socket).map_err(failed(socket, "connect to"))?;
        Ok(Self { address, hello, bin: Bin::new(), state: ConnectionState::Lost })
    }

    /// Returns whether there is no connection.
    pub fn is_lost(&self) -> bool {
        matches!(self.state, ConnectionState::Lost)
    }

    /// Returns whether the fetcher has said that it has the image.
    pub fn is_open(&self) -> bool {
        matches!(self.state, ConnectionState::Open(_))
    }

    /// Notes that the fetcher has the image.
    pub fn open(&mut self) {
        self.state = match std::mem::replace(&mut self.state, ConnectionState::Lost) {
            ConnectionState::Greeted(socket) | ConnectionState::Open(socket) => {
                ConnectionState::Open(socket)
            }
            ConnectionState::Lost => ConnectionState::Lost,
        };
    }

    /// Connects and greets the fetcher; `wake` is readable from then on while a message waits.
    /// Leaves the link lost if that cannot be done now.
    pub fn connect(&mut self, wake: &OwnedFd) {
        let connected = self.greet().and_then(|socket| {
            epoll::add(wake, &socket, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
            Ok(socket)
        });
        if let Ok(socket) = connected {
            self.lose(wake);
            self.state = ConnectionState::Greeted(socket);
        }
    }

    /// Ends the connection, if there is one.
    pub fn lose(&mut self, wake: &OwnedFd) {
        match std::mem::replace(&mut self.state, ConnectionState::Lost) {
            ConnectionState::Lost => {}
            // It is closed later and by another thread: until then `wake` would report it.
            ConnectionState::Greeted(socket) | ConnectionState::Open(socket) => {
                let _ = epoll::delete(wake, &socket);
            }
        }
    }

    fn greet(&self) -> rustix::io::Result<Foreign> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(family, kind, flags, None)?;
        let socket = Foreign::new(socket, &self.bin);
        refuse_descriptors(&socket);
        rustix::net::connect(&socket, &self.address)?;
        rustix::net::send(&socket, &self.hello.encode(), SEND)?;
        Ok(socket)
    }

    /// Sends a request for bytes. Returns `false` if the connection takes none now; it does once
    /// the fetcher has answered others.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn send(&self, want: &Want) -> rustix::io::Result<bool> {
        let ConnectionState::Open(socket) = &self.state else { return Ok(false) };
        match rustix::net::send(socket, &want.encode(), SEND) {
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    /// Takes a message into `buffer`.
    pub fn receive(&self, buffer: &mut [u8; MOST]) -> ReceiveOutcome {
        let (ConnectionState::Greeted(socket) | ConnectionState::Open(socket)) = &self.state else {
            return ReceiveOutcome::Nothing;
        };
        let mut into = [IoSliceMut::new(buffer)];
        match receive(socket, &mut into, &self.bin, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) => ReceiveOutcome::Nothing,
            Ok(one) if one.bytes > 0 && !one.flags.contains(ReturnFlags::TRUNC) => {
                ReceiveOutcome::Message(one.bytes)
            }
            Ok(_) | Err(_) => ReceiveOutcome::End,
        }
    }
}

/// A call that does not wait, and raises no signal if the other end is gone.
const SEND: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);
