//! The settings of a guest as a whole, before a container of its runs or goes on.

use slipway_agent_protocol::v1 as agent_v1;
use slipway_telemetry::realtime_ns;

use crate::agent::Agent;
use crate::record::Record;
use crate::{Result, name};

/// Gives the guest its host name, the time, random numbers and kernel settings.
///
/// # Errors
/// [`Error::Agent`](crate::Error::Agent).
pub(crate) async fn configure(agent: &Agent, record: &Record) -> Result<()> {
    let request = agent_v1::ConfigureRequest {
        hostname: record.hostname.clone(),
        realtime_ns: realtime_ns(),
        entropy: (0..4).flat_map(|_| name::random().to_ne_bytes()).collect(),
        sysctls: record.settings.process.security.sysctls.clone().into_iter().collect(),
    };
    agent.call(|mut client| async move { client.configure(request).await }).await.map(drop)
}
