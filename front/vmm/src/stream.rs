//! A stream socket with one client at a time.

use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};
use slipway_peer::{Bin, Received};

/// A client of a listening socket.
pub struct Client {
    socket: OwnedFd,
    bin: Bin,
    /// Bytes that the client has not taken yet.
    unsent: VecDeque<u8>,
    /// The most bytes of `unsent`.
    most: usize,
}

/// The connection has ended, or its client does not read.
#[derive(Debug)]
pub struct Ended;

impl Client {
    /// Accepts the next client of `listener`, of which at most `most` bytes wait to be sent.
    /// Returns `None` if there is none.
    pub fn accept(listener: &OwnedFd, most: usize) -> Option<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::accept_with(listener, flags).ok()?;
        Some(Self { socket, bin: Bin::new(), unsent: VecDeque::new(), most })
    }

    /// Receives into `into`. Returns `None` if nothing is there.
    ///
    /// # Errors
    /// [`Ended`].
    pub fn receive(&mut self, into: &mut [u8]) -> Result<Option<Received>, Ended> {
        let mut parts = [IoSliceMut::new(into)];
        match slipway_peer::receive(&self.socket, &mut parts, &self.bin, RecvFlags::DONTWAIT) {
            Ok(received) if received.bytes > 0 => Ok(Some(received)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Ok(_) | Err(_) => Err(Ended),
        }
    }

    /// Sends `bytes`, or keeps them until the client takes more.
    ///
    /// # Errors
    /// [`Ended`]: the connection is gone, or the client leaves too much unread.
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), Ended> {
        if self.unsent.len() + bytes.len() > self.most {
            return Err(Ended);
        }
        self.unsent.extend(bytes);
        self.flush()
    }

    /// Returns whether the peer has closed its end.
    pub fn is_hung_up(&self) -> bool {
        !slipway_peer::ready(&self.socket, PollFlags::empty()).is_empty()
    }

    /// Returns the number of bytes that can be sent at present.
    pub fn room(&self) -> usize {
        self.most - self.unsent.len()
    }

    /// Returns whether bytes wait for the client.
    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Sends as many of the waiting bytes as the client takes.
    ///
    /// # Errors
    /// [`Ended`].
    pub fn flush(&mut self) -> Result<(), Ended> {
        while !self.unsent.is_empty() {
            let (first, _) = self.unsent.as_slices();
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.socket, first, flags) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(Errno::AGAIN | Errno::INTR) => break,
                Err(_) => return Err(Ended),
            }
        }
        Ok(())
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn pair(most: usize) -> (Client, UnixStream) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener: OwnedFd = UnixListener::bind(&path).unwrap().into();
        let peer = UnixStream::connect(&path).unwrap();
        (Client::accept(&listener, most).unwrap(), peer)
    }

    #[test]
    fn bytes_pass_both_ways_and_an_end_is_seen() {
        let (mut client, mut peer) = pair(100);
        let mut bytes = [0; 10];
        assert!(client.receive(&mut bytes).unwrap().is_none());
        peer.write_all(b"abc").unwrap();
        assert_eq!(client.receive(&mut bytes).unwrap().unwrap().bytes, 3);
        client.send(b"defg").unwrap();
        let mut got = [0; 4];
        peer.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"defg");
        assert!(!client.is_hung_up());
        peer.write_all(b"unread").unwrap();
        drop(peer);
        assert!(client.is_hung_up(), "with bytes that were not read");
        assert_eq!(client.receive(&mut bytes).unwrap().unwrap().bytes, 6);
        assert!(client.receive(&mut bytes).is_err());
    }

    #[test]
    fn a_client_that_does_not_read_is_given_up() {
        let (mut client, _peer) = pair(1 << 20);
        let chunk = vec![0; 1 << 16];
        let sent = (0..1000).take_while(|_| client.send(&chunk).is_ok()).count();
        assert!((16..100).contains(&sent), "{sent}");
    }
}
