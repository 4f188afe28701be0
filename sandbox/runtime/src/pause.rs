//! Pausing a container: its processes stay where they are until they go on.

use slipway_agent_protocol::v1 as agent_v1;

use crate::Result;
use crate::agent::Agent;
use crate::node::Node;
use crate::record::{Record, SandboxState};
use crate::target::Target;

/// Stops all processes of a container where they are.
///
/// # Errors
/// [`Error::WrongState`](crate::Error::WrongState) if it does not run, or is paused already;
/// [`Error::Agent`](crate::Error::Agent) if the guest does not stop it; those of saving the record.
pub(crate) async fn pause(target: &Target) -> Result<()> {
    let _turn = target.container.pausing.write().await;
    check_running(target)?;
    check_runs(target)?;
    // A daemon that is killed in between leaves a container that seems paused: the next one has it
    // stop (`settle`).
    note(target, true).await?;
    let paused = freeze_target(target, true).await;
    if paused.is_err() {
        note(target, false).await?;
    }
    paused
}

/// Has a container go on. One that is not paused runs on.
///
/// # Errors
/// As for [`pause`].
pub(crate) async fn resume(target: &Target) -> Result<()> {
    let _turn = target.container.pausing.write().await;
    check_running(target)?;
    freeze_target(target, false).await?;
    note(target, false).await
}

/// Has a container go on if it is paused: it takes no signal but SIGKILL until then.
///
/// # Errors
/// As for [`pause`].
pub(crate) async fn resume_paused(target: &Target) -> Result<()> {
    if target.is_paused() { resume(target).await } else { Ok(()) }
}

/// Has a task stop the processes of an adopted container whose record says that it is paused. The
/// daemon before may have ended before they stopped, or after they went on and before the record
/// said so. A container that does not stop goes on, and is recorded so.
pub(crate) fn settle(node: &Node, target: Target) {
    if target.is_paused() {
        node.guests.spawn(async move { stop_again(&target).await });
    }
}

async fn stop_again(target: &Target) {
    let _turn = target.container.pausing.write().await;
    // A call may have had it go on meanwhile.
    if !target.is_paused() {
        return;
    }
    let Err(error) = freeze_target(target, true).await else { return };
    tracing::warn!(container = target.name(), %error, "it was paused, and goes on");
    let gone_on = async {
        freeze_target(target, false).await?;
        note(target, false).await
    };
    if let Err(error) = gone_on.await {
        tracing::warn!(container = target.name(), %error, "it may be paused or not");
    }
}

/// Checks that a container is not paused, so that one more process can begin in it.
///
/// # Errors
/// [`Error::WrongState`](crate::Error::WrongState): it is paused.
pub(crate) fn check_runs(target: &Target) -> Result<()> {
    match target.is_paused() {
        true => Err(target.wrong_state("`slipway resume` has it go on")),
        false => Ok(()),
    }
}

/// Checks that a container has a process that runs, paused or not.
fn check_running(target: &Target) -> Result<()> {
    target.has_process()?;
    match target.container.state() {
        SandboxState::Running => Ok(()),
        _ => Err(target.wrong_state("its process does not run")),
    }
}

async fn freeze_target(target: &Target, frozen: bool) -> Result<()> {
    freeze(&target.sandbox.agent()?, &target.container.name, frozen).await
}

/// Has the agent stop the processes of the container `id` where they are, or have them go on.
///
/// # Errors
/// [`Error::Agent`](crate::Error::Agent).
pub(crate) async fn freeze(agent: &Agent, id: &str, frozen: bool) -> Result<()> {
    let request = agent_v1::FreezeRequest { id: id.to_owned(), frozen };
    agent.call(|mut client| async move { client.freeze(request).await }).await.map(drop)
}

/// Records whether a container is paused.
async fn note(target: &Target, paused: bool) -> Result<()> {
    let (is_own, name) = (target.is_own(), target.container.name.clone());
    let change = move |record: &mut Record| match record.added_mut(&name) {
        _ if is_own => record.run.paused = paused,
        Some(added) => added.run.paused = paused,
        None => {}
    };
    target.sandbox.update(change).await
}
