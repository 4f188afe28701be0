//! The daemon's socket, and its connections, which are counted.

use std::io::IoSlice;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::{Connected, UdsConnectInfo};

/// The most connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// Listens at `path`, where only this process's user can connect, whatever the umask is.
///
/// # Errors
/// The errors of [`slipway_private::listen_async`]; something is at the path.
pub fn listen(path: &Path) -> std::io::Result<UnixListener> {
    slipway_private::listen_async(path, BACKLOG)
}

/// A connection that is counted while it is open.
pub struct Counted {
    stream: UnixStream,
    count: watch::Sender<usize>,
}

impl Counted {
    /// Accepts connections of `listener`, and counts them in `count`.
    pub fn incoming(
        listener: UnixListener,
        count: watch::Sender<usize>,
    ) -> impl Stream<Item = std::io::Result<Self>> {
        tokio_stream::wrappers::UnixListenerStream::new(listener).map(move |stream| {
            let stream = stream?;
            count.send_modify(|count| *count += 1);
            Ok(Self { stream, count: count.clone() })
        })
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.count.send_modify(|count| *count -= 1);
    }
}

impl Connected for Counted {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, data)
    }

    // By default only the first of the slices is written.
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn only_the_daemons_user_may_connect() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _listener = listen(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
        assert!(listen(&path).is_err(), "the path is taken");
    }

    #[tokio::test]
    async fn a_connection_is_counted_and_written_to_by_vectors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let count = watch::Sender::new(0);
        let incoming = Counted::incoming(listen(&path).unwrap(), count.clone());
        tokio::pin!(incoming);
        let mut client = UnixStream::connect(&path).await.unwrap();
        let mut server = incoming.next().await.unwrap().unwrap();
        assert_eq!(*count.borrow(), 1);
        assert!(server.is_write_vectored());
        let slices = [IoSlice::new(b"one "), IoSlice::new(b"two")];
        assert_eq!(server.write_vectored(&slices).await.unwrap(), 7);
        drop(server);
        assert_eq!(*count.borrow(), 0);
        let mut text = String::new();
        client.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "one two");
    }
}
