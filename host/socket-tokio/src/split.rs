//! The halves of a stream.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::SocketStream;

/// The receiving half of a stream.
#[derive(Debug)]
pub struct OwnedReadHalf(pub(crate) Arc<SocketStream>);

/// The sending half of a stream. Dropping it ends the sending direction.
#[derive(Debug)]
pub struct OwnedWriteHalf(pub(crate) Arc<SocketStream>);

impl AsRef<SocketStream> for OwnedReadHalf {
    fn as_ref(&self) -> &SocketStream {
        &self.0
    }
}

impl AsRef<SocketStream> for OwnedWriteHalf {
    fn as_ref(&self) -> &SocketStream {
        &self.0
    }
}

impl AsyncRead for OwnedReadHalf {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.0.read(cx, into)
    }
}

impl AsyncWrite for OwnedWriteHalf {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.write(cx, from)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.0.write_vectored(cx, from)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.0.finish())
    }
}

impl Drop for OwnedWriteHalf {
    fn drop(&mut self) {
        // Fails only if the connection is gone, which has ended anyway.
        let _ = self.0.finish();
    }
}
