//! A Unix stream for tokio whose peer cannot make a thread sleep.

use std::io::{Error, IoSliceMut, Result};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustix::net::RecvFlags;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

use crate::{Bin, Foreign, receive};

mod turns;

pub use turns::InTurns;

/// A connection to a peer that is not expected to send descriptors. Descriptors that it sends all
/// the same are closed through a [`Bin`], and so is the connection itself, which may hold unread
/// ones.
pub struct Stream {
    /// The connection, until the drop takes it out.
    inner: Option<UnixStream>,
    bin: Bin,
}

impl Stream {
    /// Wraps `inner`, a connection to the peer that owns `bin`. Makes the kernel refuse descriptors
    /// on it, if the kernel can.
    pub fn new(inner: UnixStream, bin: &Bin) -> Self {
        crate::refuse_descriptors(&inner);
        Self { inner: Some(inner), bin: bin.clone() }
    }

    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// The errors of connect(2).
    pub async fn connect(path: impl AsRef<Path>, bin: &Bin) -> Result<Self> {
        Ok(Self::new(UnixStream::connect(path).await?, bin))
    }

    /// Duplicates the connection's descriptor, for what a stream cannot do. The duplicate is closed
    /// through the same bin.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn try_clone(&self) -> Result<Foreign> {
        Ok(Foreign::new(self.inner()?.as_fd().try_clone_to_owned()?, &self.bin))
    }

    fn inner(&self) -> Result<&UnixStream> {
        self.inner.as_ref().ok_or_else(|| Error::from(std::io::ErrorKind::NotConnected))
    }

    fn pinned(&mut self) -> Result<Pin<&mut UnixStream>> {
        let inner = self.inner.as_mut();
        inner.map(Pin::new).ok_or_else(|| Error::from(std::io::ErrorKind::NotConnected))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Takes the connection out of tokio's epoll without closing it.
        if let Some(Ok(stream)) = self.inner.take().map(UnixStream::into_std) {
            self.bin.discard(OwnedFd::from(stream));
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let inner = self.inner()?;
        loop {
            ready!(inner.poll_read_ready(context))?;
            let read = inner.try_io(Interest::READABLE, || {
                let parts = &mut [IoSliceMut::new(into.initialize_unfilled())];
                Ok(receive(inner, parts, &self.bin, RecvFlags::DONTWAIT)?.bytes)
            });
            match read {
                Ok(bytes) => {
                    into.advance(bytes);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        self.get_mut().pinned()?.poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        self.get_mut().pinned()?.poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        self.get_mut().pinned()?.poll_shutdown(context)
    }
}
