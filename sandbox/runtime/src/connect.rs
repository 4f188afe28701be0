//! Connections of clients to TCP ports of a sandbox, through its agent.

use slipway_agent_protocol::MOST_OUTPUT;
use slipway_agent_protocol::v1 as agent_v1;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Status, Streaming};

use crate::agent::{Agent, CALL, refused};
use crate::target::Target;
use crate::v1::{self, forward_in};
use crate::{Error, Result};

/// The most pieces in flight, in each direction.
const QUEUE: usize = 4;

/// The stream of replies to a client.
pub type Replies = mpsc::Receiver<std::result::Result<v1::ForwardOut, Status>>;

/// Connects to a port of the sandbox. The client's further messages are carried there until the
/// guest's side of the connection ends, whether or not the client ends its own.
///
/// # Errors
/// The sandbox does not run, no program listens at the port, or [`Error::Busy`].
pub(crate) async fn start(
    target: &Target,
    port: u32,
    messages: Streaming<v1::ForwardIn>,
) -> Result<Replies> {
    let agent = target.sandbox.agent()?;
    let session = agent.forward(&target.sandbox.name)?;
    let (input, input_end) = mpsc::channel(QUEUE);
    let mut from_guest = open(&agent, port, input_end).await?;
    let (sender, replies) = mpsc::channel(QUEUE);
    let (guest, guest_ends) = oneshot::channel();
    tokio::spawn(forward(messages, input, guest_ends));
    agent.guests().spawn(async move {
        // Dropped with the guest's side.
        let _guest: oneshot::Sender<()> = guest;
        carry(&mut from_guest, sender, session).await;
    });
    Ok(replies)
}

/// Opens the connection in the guest. Returns its replies after the first one.
async fn open(
    agent: &Agent,
    port: u32,
    input: mpsc::Receiver<agent_v1::forward_in::Kind>,
) -> Result<Streaming<agent_v1::ForwardOut>> {
    let first = tokio_stream::once(agent_v1::forward_in::Kind::Port(port));
    let messages = first.chain(ReceiverStream::new(input));
    let messages = messages.map(|kind| agent_v1::ForwardIn { kind: Some(kind) });
    let opened = agent.open((MOST_OUTPUT, CALL), |mut client| async move {
        let mut replies = client.forward(messages).await.map_err(refused)?.into_inner();
        match replies.message().await.map_err(refused)? {
            Some(_) => Ok(replies),
            None => Err(Error::Agent("the agent ended the connection".to_owned())),
        }
    });
    opened.await
}

/// Carries a client's bytes to the guest, and then their end. Returns early once the sender of
/// `guest_ends` is dropped: a client that sends nothing more holds nothing.
async fn forward<S>(
    mut messages: S,
    input: mpsc::Sender<agent_v1::forward_in::Kind>,
    guest_ends: oneshot::Receiver<()>,
) where
    S: Stream<Item = std::result::Result<v1::ForwardIn, Status>> + Unpin,
{
    let carrying = async {
        while let Some(Ok(message)) = messages.next().await {
            let Some(forward_in::Kind::Data(data)) = message.kind else { break };
            if input.send(agent_v1::forward_in::Kind::Data(data)).await.is_err() {
                return;
            }
        }
        let _ = input.send(agent_v1::forward_in::Kind::End(true)).await;
    };
    tokio::select! {
        () = carrying => {}
        _ = guest_ends => {}
    }
}

/// Carries the guest's bytes to the client. Runs on the guests' thread; each message is one turn.
async fn carry(
    replies: &mut Streaming<agent_v1::ForwardOut>,
    sender: mpsc::Sender<std::result::Result<v1::ForwardOut, Status>>,
    _session: [OwnedSemaphorePermit; 2],
) {
    let mut data = Vec::new();
    // The first message is empty.
    while sender.send(Ok(v1::ForwardOut { data })).await.is_ok() {
        let reply = tokio::select! {
            () = sender.closed() => return,
            reply = replies.message() => reply,
        };
        match reply {
            Ok(Some(reply)) => data = reply.data,
            Ok(None) => return,
            Err(status) => {
                let status = Status::aborted(refused(status).to_string());
                return drop(sender.send(Err(status)).await);
            }
        }
        tokio::task::yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn message(kind: forward_in::Kind) -> std::result::Result<v1::ForwardIn, Status> {
        Ok(v1::ForwardIn { kind: Some(kind) })
    }

    #[tokio::test]
    async fn a_connection_ends_with_the_guests_side_although_the_client_does_not_end_its_own() {
        let data = forward_in::Kind::Data(b"x".to_vec());
        let silent = tokio_stream::iter([message(data)]).chain(tokio_stream::pending());
        let (input, mut guest_input) = mpsc::channel(QUEUE);
        let (guest, guest_ends) = oneshot::channel::<()>();
        let forwarding = tokio::spawn(forward(silent, input, guest_ends));
        let expected = agent_v1::forward_in::Kind::Data(b"x".to_vec());
        assert_eq!(guest_input.recv().await, Some(expected));
        drop(guest);
        let ended = tokio::time::timeout(Duration::from_secs(60), forwarding).await;
        ended.expect("the client holds it").unwrap();
        assert_eq!(guest_input.recv().await, None);
    }

    #[tokio::test]
    async fn the_end_of_a_clients_input_is_told_to_the_guest() {
        let ends = tokio_stream::iter([message(forward_in::Kind::End(true))]);
        let (input, mut guest_input) = mpsc::channel(QUEUE);
        let (_guest, guest_ends) = oneshot::channel::<()>();
        forward(ends, input, guest_ends).await;
        assert_eq!(guest_input.recv().await, Some(agent_v1::forward_in::Kind::End(true)));
        assert_eq!(guest_input.recv().await, None);
    }
}
