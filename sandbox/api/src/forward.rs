//! Connections to TCP ports of a sandbox, from a client's side.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::SandboxClient;
use crate::v1::{self, forward_in};

/// The most bytes of a message.
const PIECE: usize = 16 << 10;
/// The most messages in flight to the daemon.
const QUEUE: usize = 4;

/// Carries bytes between a local connection and a port of 127.0.0.1 or ::1 in the sandbox `name`,
/// until the sandbox's end has sent everything or the local end is gone.
///
/// # Errors
/// The daemon's status: the sandbox does not run, or no program accepts connections at the port.
pub async fn carry(
    client: &mut SandboxClient,
    name: &str,
    port: u16,
    from: impl AsyncRead + Unpin + Send + 'static,
    to: impl AsyncWrite + Unpin,
) -> Result<(), Status> {
    let (sender, messages) = mpsc::channel(QUEUE);
    let first = v1::ForwardTo { name: name.to_owned(), port: port.into() };
    // The queue is empty, so this never fails.
    let _ = sender.try_send(v1::ForwardIn { kind: Some(forward_in::Kind::To(first)) });
    let replies = client.forward(ReceiverStream::new(messages)).await?.into_inner();
    let sending = tokio::spawn(send(from, sender));
    let received = receive(replies, to).await;
    sending.abort();
    received
}

async fn send(mut from: impl AsyncRead + Unpin, sender: mpsc::Sender<v1::ForwardIn>) {
    let mut buffer = vec![0; PIECE];
    loop {
        let kind = match from.read(&mut buffer).await {
            Ok(0) | Err(_) => forward_in::Kind::End(true),
            Ok(bytes) => forward_in::Kind::Data(buffer[..bytes].to_vec()),
        };
        let last = matches!(kind, forward_in::Kind::End(_));
        if sender.send(v1::ForwardIn { kind: Some(kind) }).await.is_err() {
            return;
        }
        if last {
            // The stream of messages stays open until the replies have ended.
            return sender.closed().await;
        }
    }
}

async fn receive(
    mut replies: Streaming<v1::ForwardOut>,
    mut to: impl AsyncWrite + Unpin,
) -> Result<(), Status> {
    while let Some(reply) = replies.message().await? {
        if to.write_all(&reply.data).await.is_err() {
            return Ok(());
        }
    }
    // Fails if the local end is gone.
    let _ = to.shutdown().await;
    Ok(())
}
