//! The host's side of the agent's protocol.

use std::path::Path;
use std::time::Duration;

use slipway_agent_protocol::v1::agent_client::AgentClient;
use slipway_agent_protocol::{EXIT_STATUS_METADATA, PROTOCOL, v1};
use slipway_telemetry::monotonic_ns;
use tonic::transport::Channel;

use crate::{Error, Result};

/// How long the agent may take for a call that needs no process of the container's.
const CALL: Duration = Duration::from_secs(30);

/// Largest message of an agent's, bytes. A hostile guest decides how long its messages are, and
/// some wait in queues for clients that are slow; the agent's own pieces of output are 64 KiB.
const LARGEST: usize = 256 << 10;

/// A connection to a sandbox's agent; clones share it.
#[derive(Clone)]
pub struct Agent(AgentClient<Channel>);

/// What the agent said first.
pub struct Hello {
    /// The guest's stages on the host's axis: (name, start, end), CLOCK_MONOTONIC ns.
    pub stages: Vec<(String, u64, u64)>,
    /// When the agent answered.
    pub at_ns: u64,
}

impl Agent {
    /// Connects to the VMM's end of the agent's port and waits until the agent answers.
    ///
    /// # Errors
    /// [`Error::Agent`]: nothing listens, another protocol.
    pub async fn connect(socket: &Path) -> Result<(Self, Hello)> {
        let channel = slipway_plane_api::connect(socket)
            .await
            .map_err(|error| Error::Agent(format!("cannot reach the agent's port: {error}")))?;
        let agent = Self(AgentClient::new(channel).max_decoding_message_size(LARGEST));
        let hello = agent.hello().await?;
        Ok((agent, hello))
    }

    /// Asks for the stages that the guest has behind it.
    ///
    /// # Errors
    /// [`Error::Agent`].
    pub async fn hello(&self) -> Result<Hello> {
        let reply = self.client().hello(v1::HelloRequest { protocol: PROTOCOL }).await;
        let reply = reply.map_err(refused)?.into_inner();
        if reply.protocol != PROTOCOL {
            return Err(Error::Agent(format!(
                "the agent speaks protocol {}, this daemon {PROTOCOL}",
                reply.protocol
            )));
        }
        let at_ns = monotonic_ns();
        // The reply's way back is the error of this clock: well under a millisecond when the
        // guest is awake.
        let guest_zero = at_ns.saturating_sub(reply.boottime_ns);
        let stages = reply.stages.into_iter().map(|stage| {
            let host = |ns: u64| guest_zero.saturating_add(ns);
            (stage.name, host(stage.start_ns), host(stage.end_ns))
        });
        Ok(Hello { stages: stages.collect(), at_ns })
    }

    /// The generated client, for calls without a deadline of ours.
    pub fn client(&self) -> AgentClient<Channel> {
        self.0.clone()
    }

    /// Makes one call with a deadline.
    ///
    /// # Errors
    /// [`Error::Agent`] with what the agent said.
    pub async fn call<T, F>(&self, call: impl FnOnce(AgentClient<Channel>) -> F) -> Result<T>
    where
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        match tokio::time::timeout(CALL, call(self.client())).await {
            Ok(reply) => reply.map(tonic::Response::into_inner).map_err(refused),
            Err(_) => Err(Error::Agent(format!(
                "the sandbox's agent did not answer within {} s",
                CALL.as_secs()
            ))),
        }
    }
}

/// The agent's words as an error of ours. A status that carries an exit status is about the
/// program that should have been run.
pub fn refused(status: tonic::Status) -> Error {
    let reason = status.message().to_owned();
    let exit = status.metadata().get(EXIT_STATUS_METADATA);
    match exit.and_then(|value| value.to_str().ok()?.parse().ok()) {
        Some(status) => Error::Exec { status, reason },
        None => Error::Agent(reason),
    }
}

/// The first process of container `id`, or the one that Exec named `exec_id`.
pub fn process(id: &str, exec_id: &str) -> Option<v1::ProcessRef> {
    Some(v1::ProcessRef { container_id: id.to_owned(), exec_id: exec_id.to_owned() })
}
