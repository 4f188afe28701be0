//! Latencies of the guest's NVMe commands, as the guest reports them, forwarded to a client.

use slipway_agent_protocol::{MOST_REPORT, v1 as agent_v1};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tonic::{Status, Streaming};

use crate::agent::{Agent, CALL, refused};
use crate::{Result, v1};

/// The most reports in flight to a client.
const QUEUE: usize = 4;

/// The stream of reports to a client.
pub type Reports = mpsc::Receiver<std::result::Result<v1::GuestReport, Status>>;

/// The kinds of commands that a guest may report.
const OPCODES: [&str; 4] = ["read", "write", "flush", "other"];

/// Makes the guest trace its commands. Tracing stops when the reports are dropped. `name` is the
/// sandbox's, for the error.
///
/// # Errors
/// The agent's error: the kernel has no tracepoints, or another client traces already.
/// [`crate::Error::Busy`] if the sandbox has too many commands and traces.
pub async fn start(agent: &Agent, name: &str, interval_ms: u32) -> Result<Reports> {
    let session = agent.session(name)?;
    let request = agent_v1::TraceRequest { interval_ms };
    let opened = agent.open((MOST_REPORT, CALL), move |mut client| async move {
        client.trace(request).await.map(tonic::Response::into_inner).map_err(refused)
    });
    let replies = opened.await?;
    let (sender, reports) = mpsc::channel(QUEUE);
    agent.guests().spawn(carry(replies, sender, session));
    Ok(reports)
}

/// Forwards reports. Runs on the guests' thread; each report is one turn.
async fn carry(
    mut replies: Streaming<agent_v1::TraceReply>,
    sender: mpsc::Sender<std::result::Result<v1::GuestReport, Status>>,
    _session: OwnedSemaphorePermit,
) {
    loop {
        let reply = tokio::select! {
            () = sender.closed() => return,
            reply = replies.message() => reply,
        };
        let report = match reply {
            Ok(Some(reply)) => Ok(report(&reply)),
            Ok(None) => return,
            Err(status) => Err(Status::unavailable(refused(status).to_string())),
        };
        let over = report.is_err();
        if sender.send(report).await.is_err() || over {
            return;
        }
        tokio::task::yield_now().await;
    }
}

/// Returns the latencies of the known kinds of commands, each kind once. The histograms are the
/// guest's word and unchecked: code that parses them must validate them.
fn report(reply: &agent_v1::TraceReply) -> v1::GuestReport {
    let known = OPCODES.iter().filter_map(|opcode| {
        let one = reply.latencies.iter().find(|one| one.opcode == *opcode)?.clone();
        Some(v1::GuestLatency {
            opcode: one.opcode,
            driver: one.driver,
            block: one.block,
            application: one.application,
            between: one.between,
        })
    });
    v1::GuestReport {
        from_ns: reply.from_ns,
        to_ns: reply.to_ns,
        latencies: known.collect(),
        losses: reply.losses,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_kinds_of_commands_are_told_once() {
        let latency = |opcode: &str| agent_v1::TraceLatency {
            opcode: opcode.to_owned(),
            ..Default::default()
        };
        let mut latencies = vec![latency(""); 1000];
        latencies.extend(["write", "\x1b[2J", "read", "read"].map(latency));
        let told = report(&agent_v1::TraceReply { latencies, ..Default::default() });
        let opcodes: Vec<_> = told.latencies.iter().map(|one| one.opcode.as_str()).collect();
        assert_eq!(opcodes, ["read", "write"]);
    }
}
