//! Streams: connections by a socket device or the kernel, behind tokio's traits.

use std::fmt;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use slipway_socket::{Address, NotConnected};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, ToSocketAddrs, lookup_host};
use tokio::task::spawn_blocking;

use crate::device::{Device, Owned};
use crate::engine::Engine;
use crate::split::{OwnedReadHalf, OwnedWriteHalf};
use crate::{address, socket_address};

/// A connection, by a socket device or the kernel: see the crate's head.
pub struct SocketStream(pub(crate) Transport);

pub(crate) enum Transport {
    Device(Box<Device>),
    Kernel(TcpStream),
}

impl Engine {
    /// Connects to the first of the addresses that can be reached.
    ///
    /// # Errors
    /// The errors of connect(2), of the last address.
    pub async fn connect(&self, to: impl ToSocketAddrs) -> io::Result<SocketStream> {
        let mut last = io::ErrorKind::InvalidInput.into();
        for to in lookup_host(to).await? {
            match self.connect_to(to).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn connect_to(&self, to: SocketAddr) -> io::Result<SocketStream> {
        let engine = self.clone();
        let ask = move || {
            let Some(session) = engine.session() else { return Err(NotConnected::NotOurs) };
            let opened = session.family.connect(address(to), Address::ANY)?;
            Ok(Owned::new(opened, &session))
        };
        match spawn_blocking(ask).await.map_err(io::Error::other)? {
            Ok(opened) => Ok(SocketStream(Transport::Device(Device::new(opened)?.into()))),
            Err(NotConnected::NotOurs) => {
                Ok(SocketStream(Transport::Kernel(TcpStream::connect(to).await?)))
            }
            Err(NotConnected::Failed(errno)) => Err(errno.into()),
        }
    }
}

impl SocketStream {
    /// Connects as [`Engine::connect`] of the shared engine does.
    ///
    /// # Errors
    /// The errors of [`Engine::connect`].
    pub async fn connect(to: impl ToSocketAddrs) -> io::Result<Self> {
        Engine::shared().connect(to).await
    }

    /// Returns whether the stream is a socket device, and not the kernel's.
    pub fn is_device(&self) -> bool {
        matches!(self.0, Transport::Device(_))
    }

    /// Returns the local address.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.0 {
            Transport::Device(device) => Ok(socket_address(device.endpoint().local())),
            Transport::Kernel(stream) => stream.local_addr(),
        }
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        match &self.0 {
            Transport::Device(device) => Ok(socket_address(device.endpoint().remote())),
            Transport::Kernel(stream) => stream.peer_addr(),
        }
    }

    /// Sets `TCP_NODELAY`. Does nothing for a device, which never delays bytes.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_nodelay(&self, on: bool) -> io::Result<()> {
        match &self.0 {
            Transport::Device(_) => Ok(()),
            Transport::Kernel(stream) => stream.set_nodelay(on),
        }
    }

    /// Waits for bytes to read, and returns them without taking them.
    ///
    /// # Errors
    /// The errors of reading.
    pub async fn peek(&self, into: &mut [u8]) -> io::Result<usize> {
        match &self.0 {
            Transport::Device(device) => {
                std::future::poll_fn(|cx| device.poll_peek(cx, into)).await
            }
            Transport::Kernel(stream) => stream.peek(into).await,
        }
    }

    /// Splits the stream into two halves for two tasks. Dropping the sending half ends the sending
    /// direction.
    pub fn into_split(self) -> (OwnedReadHalf, OwnedWriteHalf) {
        let stream = Arc::new(self);
        (OwnedReadHalf(stream.clone()), OwnedWriteHalf(stream))
    }

    pub(crate) fn read(
        &self,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &self.0 {
            Transport::Device(device) => {
                let count = ready!(device.poll_read(cx, into.initialize_unfilled()))?;
                into.advance(count);
            }
            Transport::Kernel(stream) => loop {
                ready!(stream.poll_read_ready(cx))?;
                match stream.try_read_buf(into) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    done => return Poll::Ready(done.map(drop)),
                }
            },
        }
        Poll::Ready(Ok(()))
    }

    pub(crate) fn write(&self, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        match &self.0 {
            Transport::Device(device) => device.poll_write(cx, from),
            Transport::Kernel(stream) => loop {
                ready!(stream.poll_write_ready(cx))?;
                match stream.try_write(from) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    done => return Poll::Ready(done),
                }
            },
        }
    }

    pub(crate) fn write_vectored(
        &self,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &self.0 {
            Transport::Device(device) => device.poll_write_vectored(cx, from),
            Transport::Kernel(stream) => loop {
                ready!(stream.poll_write_ready(cx))?;
                match stream.try_write_vectored(from) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    done => return Poll::Ready(done),
                }
            },
        }
    }

    /// Ends the sending direction.
    pub(crate) fn finish(&self) -> io::Result<()> {
        match &self.0 {
            Transport::Device(device) => device.endpoint().finish(),
            Transport::Kernel(stream) => {
                rustix::net::shutdown(stream.as_fd(), rustix::net::Shutdown::Write)?;
            }
        }
        Ok(())
    }
}

impl AsyncRead for SocketStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.read(cx, into)
    }
}

impl AsyncWrite for SocketStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.write(cx, from)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write_vectored(cx, from)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Written bytes need no flush: they are on their way already.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.finish())
    }
}

impl fmt::Debug for SocketStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SocketStream")
            .field("local", &self.local_addr().ok())
            .field("peer", &self.peer_addr().ok())
            .field("is_device", &self.is_device())
            .finish()
    }
}
