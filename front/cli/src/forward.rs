//! `slipway port-forward`: ports of the host that lead to ports of a sandbox, while it runs.

use anyhow::{Context, Result};
use futures_util::future::try_join_all;
use slipway_runtime::v1::{self, forward_in};
use slipway_runtime::{Config, SandboxClient};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::args::{Forward, ForwardArgs, NodeArgs};
use crate::client::{connect, refused};

/// The most bytes of a message.
const PIECE: usize = 16 << 10;
/// The most messages in flight to the daemon.
const QUEUE: usize = 4;

/// Serves the ports until it is interrupted. Returns the exit status.
pub async fn forward(node: &NodeArgs, config: &Config, args: &ForwardArgs) -> Result<i32> {
    let mut client = connect(node, config).await?;
    // A name that is wrong is said now, not at the first connection.
    let named = v1::Name { name: args.name.clone() };
    client.inspect(named).await.map_err(|status| refused(&status))?;
    let mut listeners = Vec::new();
    for forward in &args.ports {
        let listener = TcpListener::bind(forward.local).await;
        let listener = listener.with_context(|| format!("cannot listen at {}", forward.local))?;
        crate::say!("{} -> {}:{}", listener.local_addr()?, args.name, forward.port);
        listeners.push((listener, *forward));
    }
    let served = listeners
        .into_iter()
        .map(|(listener, forward)| serve(client.clone(), args.name.clone(), listener, forward));
    tokio::select! {
        served = try_join_all(served) => served.map(|_| 0),
        _ = tokio::signal::ctrl_c() => Ok(0),
    }
}

/// Accepts connections for ever.
async fn serve(
    client: SandboxClient,
    name: String,
    listener: TcpListener,
    forward: Forward,
) -> Result<()> {
    loop {
        let (stream, peer) = listener.accept().await.context("cannot accept connections")?;
        let (client, to) =
            (client.clone(), v1::ForwardTo { name: name.clone(), port: forward.port.into() });
        tokio::spawn(async move {
            if let Err(error) = carry(client, to, stream).await {
                crate::complain(&error.context(format!("connection of {peer}")));
            }
        });
    }
}

/// Carries one connection to its end.
async fn carry(mut client: SandboxClient, to: v1::ForwardTo, stream: TcpStream) -> Result<()> {
    let (sender, messages) = mpsc::channel(QUEUE);
    sender.send(v1::ForwardIn { kind: Some(forward_in::Kind::To(to)) }).await?;
    let replies = client.forward(ReceiverStream::new(messages)).await;
    let replies = replies.map_err(|status| refused(&status))?.into_inner();
    let (from, to) = stream.into_split();
    let sending = tokio::spawn(send(from, sender));
    let received = receive(replies, to).await;
    sending.abort();
    received
}

async fn send(mut from: OwnedReadHalf, sender: mpsc::Sender<v1::ForwardIn>) {
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
    mut replies: tonic::Streaming<v1::ForwardOut>,
    mut to: OwnedWriteHalf,
) -> Result<()> {
    while let Some(reply) = replies.message().await.map_err(|status| refused(&status))? {
        to.write_all(&reply.data).await?;
    }
    to.shutdown().await?;
    Ok(())
}
