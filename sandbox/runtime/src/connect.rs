//! Connections of clients to TCP ports of a sandbox, through its agent.

use slipway_agent_protocol::MOST_OUTPUT;
use slipway_agent_protocol::v1 as agent_v1;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::agent::{Agent, CALL, refused};
use crate::target::Target;
use crate::v1::{self, forward_in};
use crate::{Error, Result};

/// The most pieces in flight, in each direction.
const QUEUE: usize = 4;

/// The stream of replies to a client.
pub type Replies = mpsc::Receiver<std::result::Result<v1::ForwardOut, Status>>;

/// Connects to a port of the sandbox. The client's further messages are carried there.
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
    tokio::spawn(forward(messages, input));
    agent.guests().spawn(async move {
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

/// Carries a client's bytes to the guest, and then their end.
async fn forward(
    mut messages: Streaming<v1::ForwardIn>,
    input: mpsc::Sender<agent_v1::forward_in::Kind>,
) {
    while let Ok(Some(message)) = messages.message().await {
        let Some(forward_in::Kind::Data(data)) = message.kind else { break };
        if input.send(agent_v1::forward_in::Kind::Data(data)).await.is_err() {
            return;
        }
    }
    let _ = input.send(agent_v1::forward_in::Kind::End(true)).await;
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
