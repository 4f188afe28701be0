//! Connections to TCP ports of the sandbox's loopback interface, carried for the host.
//!
//! Bytes are read only when HTTP/2 has room for them, in both directions, so a slow end slows the
//! other one down.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use slipway_agent_protocol::v1::{ForwardIn, ForwardOut, forward_in};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

/// The most bytes of a reply.
const PIECE: usize = 16 << 10;
/// The most replies in flight to a host that reads slowly.
const QUEUE: usize = 2;

/// The replies of a connection.
pub type Connection = ReceiverStream<Result<ForwardOut, Status>>;

/// Connects to `port`, and carries `input` to it. Dropping the replies ends the connection.
///
/// # Errors
/// The port is no port, or no program accepts the connection.
pub async fn connect(port: u32, input: Streaming<ForwardIn>) -> Result<Connection, Status> {
    let port = u16::try_from(port).ok().filter(|port| *port > 0);
    let port =
        port.ok_or_else(|| Status::invalid_argument("a port is a number from 1 to 65535"))?;
    let addresses: [SocketAddr; 2] =
        [(Ipv4Addr::LOCALHOST, port).into(), (Ipv6Addr::LOCALHOST, port).into()];
    let connected = TcpStream::connect(&addresses[..]).await;
    let refused = |error| Status::unavailable(format!("port {port} of the sandbox: {error}"));
    let (from, to) = connected.map_err(refused)?.into_split();
    let (sender, replies) = mpsc::channel(QUEUE);
    tokio::spawn(send_in(input, to));
    tokio::spawn(send_out(from, sender));
    Ok(ReceiverStream::new(replies))
}

/// Carries the host's bytes to the peer, and then the end.
async fn send_in(mut input: Streaming<ForwardIn>, mut to: OwnedWriteHalf) {
    while let Ok(Some(message)) = input.message().await {
        let sent = match message.kind {
            Some(forward_in::Kind::Data(data)) => to.write_all(&data).await,
            _ => break,
        };
        if sent.is_err() {
            return;
        }
    }
    let _ = to.shutdown().await;
}

/// Carries the peer's bytes to the host until either ends.
async fn send_out(mut from: OwnedReadHalf, sender: mpsc::Sender<Result<ForwardOut, Status>>) {
    let mut data = Vec::new();
    let mut buffer = vec![0; PIECE];
    // The first message is empty.
    while sender.send(Ok(ForwardOut { data })).await.is_ok() {
        let read = tokio::select! {
            () = sender.closed() => return,
            read = from.read(&mut buffer) => read,
        };
        match read {
            Ok(0) => return,
            Ok(bytes) => data = buffer[..bytes].to_vec(),
            Err(error) => return drop(sender.send(Err(Status::aborted(error.to_string()))).await),
        }
    }
}
