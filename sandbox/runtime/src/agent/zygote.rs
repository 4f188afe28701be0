//! Further processes of containers, which may be forks of a zygote.

use std::time::Duration;

use slipway_agent_protocol::v1;
use tonic::transport::Channel;

use super::{Agent, AgentClient, CALL};
use crate::Result;
use crate::error::MOST_MESSAGE;

/// The longest time in which a zygote is to stop itself, milliseconds.
const MOST_READY: u32 = 60_000;
/// The reason why an agent of an earlier version forks nothing.
const OLD: &str = "the sandbox's agent is of an earlier version";

impl Agent {
    /// Has the guest set up another process in a container. The reason in the reply is one line. An
    /// agent that has no zygotes starts the process anew.
    ///
    /// # Errors
    /// Those of [`Agent::call`].
    pub(crate) async fn exec(&self, mut request: v1::ExecRequest) -> Result<v1::ExecReply> {
        let mut limit = CALL;
        if let Some(zygote) = &mut request.zygote {
            zygote.ready_ms = zygote.ready_ms.min(MOST_READY);
            limit += Duration::from_millis(zygote.ready_ms.into());
        }
        let old = request.zygote.is_some() && !self.abilities.has_zygotes;
        if old && start_anew(&mut request) {
            return Ok(v1::ExecReply { refused: OLD.to_owned(), ..Default::default() });
        }
        let exec = |mut client: AgentClient<Channel>| async move { client.exec(request).await };
        let mut reply = self.call_within(Some(limit), exec).await?;
        let reason = if old { OLD } else { reply.refused.as_str() };
        reply.refused = slipway_printable::line(reason, MOST_MESSAGE);
        Ok(reply)
    }
}

/// Has `request` start a process anew. Returns `true` if it is to start a zygote only.
fn start_anew(request: &mut v1::ExecRequest) -> bool {
    let Some(zygote) = request.zygote.take() else { return false };
    if let Some(process) = &mut request.spec {
        process.env.extend(zygote.variables);
    }
    zygote.prepare
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_agent_starts_processes_anew() {
        let request = |zygote: Option<v1::Zygote>| v1::ExecRequest {
            spec: Some(v1::ProcessSpec { env: vec!["A=1".to_owned()], ..Default::default() }),
            zygote,
            ..Default::default()
        };
        let asked = |prepare| {
            let variables = vec!["B=2".to_owned()];
            request(Some(v1::Zygote { variables, prepare, ..Default::default() }))
        };
        let mut plain = request(None);
        assert!(!start_anew(&mut plain));
        assert_eq!(plain, request(None));
        let mut fork = asked(false);
        assert!(!start_anew(&mut fork));
        assert_eq!((fork.spec.unwrap().env.join(" "), fork.zygote), ("A=1 B=2".to_owned(), None));
        assert!(start_anew(&mut asked(true)));
    }
}
