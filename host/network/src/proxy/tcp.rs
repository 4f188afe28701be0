//! A published TCP port: connections that are carried to the sandbox.
//!
//! A connection over which nothing comes for [`IDLE`] is closed. Its program may have been killed
//! while its host lost power, or keep it open for nothing, and each one has a place that others
//! want.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{self, AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::shares::Shares;

/// The longest time for a sandbox to accept a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// The longest time for which a connection carries nothing: that of the kernel's
/// `net.ipv4.tcp_keepalive_time`.
const IDLE: Duration = Duration::from_secs(2 * 60 * 60);
/// The pause after a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// Carries the connections of `listener` to the address `to` in a sandbox, until the future is
/// dropped. `room` has the connections that there may be: of this port, which its clients share,
/// and of all ports, which the sandboxes share.
pub async fn serve(listener: TcpListener, to: SocketAddr, room: (Arc<Shares>, Arc<Shares>)) {
    let (own, all) = room;
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let Ok((near, client)) = listener.accept().await else {
            sleep(PAUSE).await;
            continue;
        };
        // A connection without room is closed: in a queue it would block the others.
        let Some(of_client) = own.take(client.ip()) else { continue };
        let Some(of_sandbox) = all.take(to.ip()) else { continue };
        connections.spawn(async move {
            if let Ok(Ok(far)) = timeout(CONNECT, TcpStream::connect(to)).await {
                carry(near, far, IDLE).await;
            }
            drop((of_client, of_sandbox));
        });
    }
}

/// Carries bytes both ways until both streams have ended, one of them breaks off, or nothing has
/// come for `idle`. If either end breaks off, the other sees the end of its stream.
async fn carry(near: TcpStream, far: TcpStream, idle: Duration) {
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    let heard = LastHeard::now();
    let mut near = HeardStream { stream: near, heard: &heard };
    let mut far = HeardStream { stream: far, heard: &heard };
    tokio::select! {
        _ = io::copy_bidirectional(&mut near, &mut far) => {}
        () = heard.silence(idle) => {}
    }
}

/// The time at which either stream of a connection was last read from.
struct LastHeard(Mutex<Instant>);

impl LastHeard {
    fn now() -> Self {
        Self(Mutex::new(Instant::now()))
    }

    fn note(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn get(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nothing has come for `idle`.
    async fn silence(&self, idle: Duration) {
        loop {
            let last = self.get();
            sleep_until(last + idle).await;
            if self.get() == last {
                return;
            }
        }
    }
}

/// A stream that notes when something comes.
struct HeardStream<'a> {
    stream: TcpStream,
    heard: &'a LastHeard,
}

impl AsyncRead for HeardStream<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.heard.note();
        }
        polled
    }
}

impl AsyncWrite for HeardStream<'_> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Returns both ends of a connection.
    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (one, other) = tokio::join!(TcpStream::connect(address), listener.accept());
        (one.unwrap(), other.unwrap().0)
    }

    #[tokio::test]
    async fn a_connection_over_which_nothing_comes_is_closed() {
        let idle = Duration::from_secs(3);
        let ((mut client, near), (far, mut server)) = (pair().await, pair().await);
        let begun = Instant::now();
        let carrying = tokio::spawn(carry(near, far, idle));
        sleep(idle / 6).await;
        client.write_all(b"question").await.unwrap();
        let mut asked = [0; 8];
        server.read_exact(&mut asked).await.unwrap();
        assert_eq!(&asked, b"question");
        carrying.await.unwrap();
        assert!(begun.elapsed() >= idle * 7 / 6);
        assert_eq!(
            (client.read(&mut asked).await.unwrap(), server.read(&mut asked).await.unwrap()),
            (0, 0)
        );
    }

    #[tokio::test]
    async fn no_more_connections_than_there_may_be_in_all_are_carried() {
        let inside = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let outside = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (to, port) = (inside.local_addr().unwrap(), outside.local_addr().unwrap());
        let all = Shares::new(1);
        let serving = tokio::spawn(serve(outside, to, (Shares::new(64), all.clone())));
        let first = TcpStream::connect(port).await.unwrap();
        let (server, _) = inside.accept().await.unwrap();
        let mut second = TcpStream::connect(port).await.unwrap();
        assert_eq!(second.read(&mut [0]).await.unwrap(), 0);
        drop((first, server));
        while all.take(to.ip()).is_none() {
            tokio::task::yield_now().await;
        }
        let _third = TcpStream::connect(port).await.unwrap();
        inside.accept().await.unwrap();
        serving.abort();
    }

    #[tokio::test]
    async fn a_sandbox_with_many_connections_leaves_some_for_another() {
        let inside = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let outside = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (to, port) = (inside.local_addr().unwrap(), outside.local_addr().unwrap());
        let all = Shares::new(4);
        let greedy: Vec<_> = std::iter::from_fn(|| all.take([10, 0, 0, 1].into())).collect();
        assert_eq!(greedy.len(), 2);
        let serving = tokio::spawn(serve(outside, to, (Shares::new(64), all)));
        let _client = TcpStream::connect(port).await.unwrap();
        inside.accept().await.unwrap();
        serving.abort();
    }
}
