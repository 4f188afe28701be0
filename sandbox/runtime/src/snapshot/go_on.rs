//! The container of a sandbox that began with a snapshot goes on.
//!
//! A further part of a fork's identity is given where its kind is: to the guest's kernel by
//! `ConfigureRequest` (`configure`, which every start calls), to the interface by `network`, to the
//! container by `RejoinRequest` (`agent.proto`; the agent's `rejoin`), to a disk or a function when
//! it is attached (`begin`, `fork::attach`). What a VM itself tells its guest, as the generation
//! ID, is the VMM's: `host/vmm`. Tests: `tests/daemon/snapshots.rs`, `tests/rejoin_as_root.rs` of
//! `sandbox/agent`, `tests/e2e/14-forks.sh` and `16-snapshots.sh`. The table of
//! `docs/snapshots.md`, "What a fork is given, and what it has", has a row; the sections below the
//! table say what programs notice.

use std::sync::Arc;

use slipway_agent_protocol::v1 as agent_v1;

use crate::agent::Agent;
use crate::carrier::OutputCarrier;
use crate::configure::configure;
use crate::record::Record;
use crate::running::Carry;
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::{Result, network};

/// Gives the guest the sandbox's own random numbers, time, names and addresses, and then has its
/// container go on once `learning` has ended. Returns the task that carries the container's output
/// from there.
///
/// # Errors
/// [`Error::Agent`](crate::Error::Agent) with the agent's message; those of
/// [`OutputCarrier::attach`].
pub(crate) async fn go_on(
    sandbox: &Arc<Sandbox>,
    agent: &Agent,
    record: &Record,
    network: Option<network::Configuring>,
    learning: impl Future<Output = ()>,
    log_bytes: u64,
) -> Result<Carry> {
    configure(agent, record).await?;
    if let Some(network) = network {
        network.done().await?;
    }
    learning.await;
    let own = Target::own(Arc::clone(sandbox));
    let request = agent_v1::RejoinRequest {
        id: own.container.name.clone(),
        hostname: record.hostname.clone(),
        names: network::names(record),
        frozen: record.run.paused,
    };
    agent.call(|mut client| async move { client.rejoin(request).await }).await?;
    let carrier = OutputCarrier::attach(&own, agent, log_bytes, None).await?;
    own.end_lost_input();
    Ok(carrier.carry(&own, agent))
}
