//! Turns for tokio connections that share a thread.

use std::io::{Error, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::Bin;

/// Most bytes that a connection reads in one turn. The smallest HTTP/2 frame has 9 bytes, so a turn
/// is fewer than two thousand frames.
const TURN: usize = 16 << 10;
/// Most things in a peer's bin. With more, reads of the peer's connections fail.
const MOST_HELD: usize = 64;

/// A connection that yields to other tasks after each `TURN` bytes read. HTTP/2 reads until nothing
/// is left, and a peer can ensure that something always is. Reads fail while the peer's bin holds
/// too much.
pub struct InTurns<S> {
    stream: S,
    bin: Bin,
    left: usize,
}

impl<S> InTurns<S> {
    /// Wraps `stream`, whose peer owns `bin`.
    pub fn new(stream: S, bin: &Bin) -> Self {
        Self { stream, bin: bin.clone(), left: TURN }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for InTurns<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let this = self.get_mut();
        if this.bin.held() > MOST_HELD {
            return Poll::Ready(Err(Error::other("it sends descriptors that cannot be closed")));
        }
        if this.left == 0 {
            this.left = TURN;
            // Requeues this task behind all tasks that are ready now.
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let room = into.remaining().min(this.left);
        let mut some = ReadBuf::new(into.initialize_unfilled_to(room));
        let polled = Pin::new(&mut this.stream).poll_read(context, &mut some);
        let read = some.filled().len();
        // A read that finds nothing ends the turn.
        this.left = if polled.is_pending() { TURN } else { this.left - read };
        ready!(polled)?;
        into.advance(read);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for InTurns<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use tokio::io::AsyncReadExt;

    use super::*;

    /// A stream that always has more to read.
    struct Endless;

    impl AsyncRead for Endless {
        fn poll_read(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            into: &mut ReadBuf<'_>,
        ) -> Poll<Result<()>> {
            let len = into.initialize_unfilled().len();
            into.advance(len);
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn a_connection_that_always_has_more_gives_way() {
        let (counter, mut count) = (Arc::new(()), 0);
        let read = Arc::clone(&counter);
        let flood = tokio::spawn(async move {
            let mut stream = InTurns::new(Endless, &Bin::new());
            let mut buffer = vec![0; 1000];
            while Arc::strong_count(&read) > 1 {
                // Without turns, this would be ready at once for ever.
                let _ = stream.read(&mut buffer).await;
            }
        });
        while count < 100 {
            tokio::task::yield_now().await;
            count += 1;
        }
        drop(counter);
        flood.await.unwrap();
    }

    /// A value whose drop waits until the sender is gone.
    struct Sleeps(std::sync::mpsc::Receiver<()>);

    impl Drop for Sleeps {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[tokio::test]
    async fn a_peer_whose_bin_is_full_is_not_heard() {
        let bin = Bin::new();
        let mut stream = InTurns::new(Endless, &bin);
        stream.read_u8().await.unwrap();
        let (_awake, asleep) = std::sync::mpsc::channel();
        bin.discard_value(Sleeps(asleep));
        (0..MOST_HELD).for_each(|_| bin.discard_value(()));
        assert!(stream.read_u8().await.is_err());
    }

    #[tokio::test]
    async fn everything_arrives_across_turns() {
        let data: Vec<u8> = (0..5 * TURN as u32 + 7).map(|i| i as u8).collect();
        let mut read = Vec::new();
        let mut stream = InTurns::new(data.as_slice(), &Bin::new());
        stream.read_to_end(&mut read).await.unwrap();
        assert_eq!(read, data);
    }
}
