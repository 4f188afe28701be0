//! Files that clients copy out of containers and into them, as tar archives: `slipway cp`.
//!
//! The daemon carries the archives and does not look into them. The agent makes the one that comes
//! out, and a hostile guest any other: the client's program unpacks it as such.

use slipway_agent_protocol::MOST_OUTPUT;
use slipway_agent_protocol::v1::{self as agent_v1, copy_in_request, copy_out_reply};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::agent::{Agent, CALL, refused};
use crate::record::SandboxState;
use crate::target::Target;
use crate::{Error, Result, v1};

/// The most pieces in flight, in each direction.
const QUEUE: usize = 4;
/// The longest path in bytes.
const LONGEST: usize = 4095;
/// The most characters of a path that a guest names.
const SHOWN: usize = 200;

/// The stream of replies to a client.
pub type Replies = mpsc::Receiver<std::result::Result<v1::CopyOutReply, Status>>;

/// Has the guest pack what the request names. Returns the replies for the client.
///
/// # Errors
/// [`Error::Invalid`], [`Error::WrongState`], [`Error::Busy`]; [`Error::Refused`] if there is no
/// such file; [`Error::Agent`].
pub(crate) async fn copy_out(target: &Target, request: v1::CopyOutRequest) -> Result<Replies> {
    let (agent, session) = begin(target, &request.path)?;
    let v1::CopyOutRequest { path, follow, top, .. } = request;
    let container_id = target.container.name.clone();
    let request = agent_v1::CopyOutRequest { container_id, path, follow, name: top };
    let opened = agent.open((MOST_OUTPUT, CALL), |mut client| async move {
        let mut replies = client.copy_out(request).await.map_err(failed)?.into_inner();
        let first = replies.message().await.map_err(refused)?.and_then(|reply| reply.kind);
        match first {
            Some(copy_out_reply::Kind::Found(found)) => Ok((replies, found.directory)),
            _ => Err(Error::Agent("the agent did not say what it copies".to_owned())),
        }
    });
    let (from_guest, directory) = opened.await?;
    let (sender, replies) = mpsc::channel(QUEUE);
    // The queue is empty, so this never fails for lack of room.
    let found = v1::copy_out_reply::Kind::Found(v1::CopyFound { directory });
    let _ = sender.try_send(Ok(v1::CopyOutReply { kind: Some(found) }));
    agent.guests().spawn(carry(from_guest, sender, session));
    Ok(replies)
}

/// Carries the guest's archive to the client. Runs on the guests' thread; each message is one turn.
async fn carry(
    mut replies: Streaming<agent_v1::CopyOutReply>,
    sender: mpsc::Sender<std::result::Result<v1::CopyOutReply, Status>>,
    _session: OwnedSemaphorePermit,
) {
    loop {
        let reply = tokio::select! {
            () = sender.closed() => return,
            reply = replies.message() => reply,
        };
        let told = match reply.map(|reply| reply.and_then(|reply| reply.kind)) {
            Ok(Some(copy_out_reply::Kind::Data(data))) => Ok(v1::copy_out_reply::Kind::Data(data)),
            Ok(Some(copy_out_reply::Kind::End(left_out))) => {
                Ok(v1::copy_out_reply::Kind::End(told(left_out)))
            }
            Ok(_) => Err(Status::aborted("the sandbox's agent has ended the copy half-way")),
            Err(status) => Err(Status::aborted(refused(status).to_string())),
        };
        let last = !matches!(told, Ok(v1::copy_out_reply::Kind::Data(_)));
        let told = told.map(|kind| v1::CopyOutReply { kind: Some(kind) });
        if sender.send(told).await.is_err() || last {
            return;
        }
        tokio::task::yield_now().await;
    }
}

/// Has the guest unpack the archive in the client's further messages at the place that `to` names.
/// Returns when it has: the client ends the call earlier by leaving.
///
/// # Errors
/// As [`copy_out`]; files of the archive before an error are there.
pub(crate) async fn copy_in(
    target: &Target,
    to: v1::CopyInTo,
    messages: Streaming<v1::CopyInRequest>,
) -> Result<v1::CopyInReply> {
    let (agent, _session) = begin(target, &to.path)?;
    let v1::CopyInTo { path, source, owners, .. } = to;
    let source = source.map(|source| agent_v1::CopySource {
        directory: source.directory,
        contents: source.contents,
        name: source.name,
    });
    let container_id = target.container.name.clone();
    let first = agent_v1::CopyInTo { container_id, path, source, owners };
    let (input, pieces) = mpsc::channel(QUEUE);
    let first = tokio_stream::once(copy_in_request::Kind::To(first));
    let stream = first.chain(ReceiverStream::new(pieces));
    let stream = stream.map(|kind| agent_v1::CopyInRequest { kind: Some(kind) });
    tokio::spawn(forward(messages, input));
    let copy = |mut client: crate::agent::Client| async move {
        client.copy_in(stream).await.map_err(known)
    };
    let reply = agent.call_within(None, copy).await?;
    Ok(v1::CopyInReply { left_out: reply.left_out.map(told) })
}

/// Carries a client's archive to the guest, until the guest's copy has ended. If the client leaves
/// before the archive's end, the guest's copy breaks off.
async fn forward(
    mut messages: Streaming<v1::CopyInRequest>,
    input: mpsc::Sender<copy_in_request::Kind>,
) {
    loop {
        let message = tokio::select! {
            // A client that sends nothing more is not waited for.
            () = input.closed() => return,
            message = messages.message() => message,
        };
        let Ok(Some(message)) = message else { return };
        let kind = match message.kind {
            Some(v1::copy_in_request::Kind::Data(data)) => copy_in_request::Kind::Data(data),
            Some(v1::copy_in_request::Kind::End(end)) => copy_in_request::Kind::End(end),
            _ => return,
        };
        if input.send(kind).await.is_err() {
            return;
        }
    }
}

/// Checks what a copy names. Returns the agent, and the permit for one more session with it.
fn begin(target: &Target, path: &str) -> Result<(Agent, OwnedSemaphorePermit)> {
    target.has_process()?;
    if target.container.state() != SandboxState::Running {
        return Err(target.wrong_state("files of a container that runs can be copied"));
    }
    check(path)?;
    let agent = target.sandbox.agent()?;
    let session = agent.session(&target.sandbox.name)?;
    Ok((agent, session))
}

fn check(path: &str) -> Result<()> {
    if path.starts_with('/') && path.len() <= LONGEST && !path.contains('\0') {
        return Ok(());
    }
    let shown = slipway_printable::line(path, SHOWN);
    Err(Error::Invalid(format!("{shown} is no absolute path in a container")))
}

/// Returns what a guest has left out.
fn told(left_out: agent_v1::LeftOut) -> v1::LeftOut {
    let first = slipway_printable::line(&left_out.first, SHOWN);
    v1::LeftOut { count: left_out.count, first }
}

fn failed(status: Status) -> Error {
    refused(known(status))
}

/// Returns the status of a call that agents of earlier versions do not know.
fn known(status: Status) -> Status {
    match status.code() {
        Code::Unimplemented => Status::unimplemented(
            "the sandbox's agent is of an earlier version, which copies no files: start the \
             sandbox anew",
        ),
        _ => status,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_in_a_container_is_absolute() {
        for path in ["/", "/a/../b", "/a/"] {
            check(path).unwrap();
        }
        for path in ["", "a", "/a\0", &format!("/{}", "x".repeat(LONGEST))] {
            let error = check(path).unwrap_err().to_string();
            assert!(error.contains("no absolute path") && error.len() < 500, "{error}");
        }
    }

    #[test]
    fn what_a_guest_has_left_out_is_one_line() {
        let first = "a\x1b[2J\n".repeat(1000);
        let told = told(agent_v1::LeftOut { count: 3, first });
        assert!(told.count == 3 && told.first.chars().count() <= SHOWN);
        assert!(told.first.chars().all(slipway_printable::is_printable));
    }
}
