//! One connection of a load, plain or with TLS.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use super::openssl::Session;

/// A connection.
pub enum Connection {
    /// A socket.
    Plain(TcpStream),
    /// TLS on a socket.
    Tls(Session),
}

impl Connection {
    /// Sends some of `bytes`. Returns how many.
    #[inline]
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(bytes),
            Self::Tls(session) => session.send(bytes),
        }
    }

    /// Receives into `bytes`. Returns the number of bytes, 0 at the end.
    #[inline]
    pub fn receive(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(bytes),
            Self::Tls(session) => session.receive(bytes),
        }
    }

    /// Sets whether calls return an error where they would block.
    pub fn set_nonblocking(&mut self, yes: bool) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.set_nonblocking(yes),
            Self::Tls(session) => session.set_nonblocking(yes),
        }
    }

    /// Sends all of `bytes`. Retries at once if the connection does not block.
    #[inline]
    pub fn send_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.send(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if is_early(&error) => std::hint::spin_loop(),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Fills `bytes`. Retries at once if the connection does not block. Returns `false` if the
    /// connection ended.
    #[inline]
    pub fn fill(&mut self, bytes: &mut [u8]) -> io::Result<bool> {
        let mut have = 0;
        while have < bytes.len() {
            match self.receive(&mut bytes[have..]) {
                Ok(0) => return Ok(false),
                Ok(count) => have += count,
                Err(error) if is_early(&error) => std::hint::spin_loop(),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Plain(stream) => stream.as_fd(),
            Self::Tls(session) => session.as_fd(),
        }
    }
}

/// Returns whether the call can be retried.
#[inline]
pub fn is_early(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
