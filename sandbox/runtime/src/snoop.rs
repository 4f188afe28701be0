//! What the guest says of its commands' latencies, handed on to a client.

use slipway_agent_protocol::v1 as agent_v1;
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use crate::agent::{Agent, refused};
use crate::{Result, v1};

/// Reports under way to a client.
const QUEUE: usize = 4;

/// What a client gets.
pub type Reports = mpsc::Receiver<std::result::Result<v1::GuestReport, Status>>;

/// Has the guest trace; it stops when the reports are dropped.
///
/// # Errors
/// What the agent says: a kernel without tracepoints, somebody who traces already.
pub async fn start(agent: &Agent, interval_ms: u32) -> Result<Reports> {
    let mut client = agent.client();
    let reply = client.trace(agent_v1::TraceRequest { interval_ms }).await;
    let replies = reply.map_err(refused)?.into_inner();
    let (sender, reports) = mpsc::channel(QUEUE);
    tokio::spawn(carry(replies, sender));
    Ok(reports)
}

async fn carry(
    mut replies: Streaming<agent_v1::TraceReply>,
    sender: mpsc::Sender<std::result::Result<v1::GuestReport, Status>>,
) {
    loop {
        let reply = tokio::select! {
            () = sender.closed() => return,
            reply = replies.message() => reply,
        };
        let report = match reply {
            Ok(Some(reply)) => Ok(report(reply)),
            Ok(None) => return,
            Err(status) => Err(Status::unavailable(status.message().to_owned())),
        };
        let over = report.is_err();
        if sender.send(report).await.is_err() || over {
            return;
        }
    }
}

fn report(reply: agent_v1::TraceReply) -> v1::GuestReport {
    let latencies = reply.latencies.into_iter().map(|one| v1::GuestLatency {
        opcode: one.opcode,
        driver: one.driver,
        block: one.block,
        application: one.application,
        between: one.between,
    });
    v1::GuestReport {
        from_ns: reply.from_ns,
        to_ns: reply.to_ns,
        latencies: latencies.collect(),
        losses: reply.losses,
    }
}
