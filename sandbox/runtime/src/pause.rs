//! Pausing a container: its processes stay where they are until they go on.
//!
//! A pod is paused as a whole while its memory is in a file, and after a daemon was killed while
//! the pod came back: its memory is in a VMM then, and [`resume`] has the pod go on.

use std::time::Duration;

use slipway_agent_protocol::v1 as agent_v1;

use crate::Result;
use crate::agent::Agent;
use crate::container::OWN;
use crate::node::Node;
use crate::record::{Added, Record, SandboxState};
use crate::target::Target;

/// The longest time in which all containers of a pod stop, or go on. A guest could take that of a
/// call for each of them, and keep its pod between the two for hours.
const ALL: Duration = Duration::from_secs(120);

/// Stops all processes of a container where they are. That goes on to its end if the caller stops
/// waiting.
///
/// # Errors
/// [`Error::WrongState`](crate::Error::WrongState) if it does not run, or is paused already;
/// [`Error::Agent`](crate::Error::Agent) if the guest does not stop it; those of saving the record.
pub(crate) async fn pause(target: &Target) -> Result<()> {
    let target = target.clone();
    to_end(async move { pause_now(&target).await }).await
}

async fn pause_now(target: &Target) -> Result<()> {
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

/// Has a container go on. One that is not paused runs on. That goes on to its end if the caller
/// stops waiting.
///
/// # Errors
/// As for [`pause`].
pub(crate) async fn resume(target: &Target) -> Result<()> {
    let target = target.clone();
    to_end(async move { resume_now(&target).await }).await
}

async fn resume_now(target: &Target) -> Result<()> {
    let _turn = target.container.pausing.write().await;
    check_running(target)?;
    freeze_target(target, false).await?;
    note(target, false).await
}

/// Runs a task to its end, even if the caller stops waiting: a container that has gone on and whose
/// record says that it is paused would be stopped by the next daemon ([`settle`]).
async fn to_end(task: impl Future<Output = Result<()>> + Send + 'static) -> Result<()> {
    let ended = tokio::spawn(task).await;
    ended.unwrap_or_else(|error| Err(crate::Error::Agent(error.to_string())))
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

/// Checks that a container is not paused, alone or with its pod, so that one more process can begin
/// in it.
///
/// # Errors
/// [`Error::WrongState`](crate::Error::WrongState): it is paused.
pub(crate) fn check_runs(target: &Target) -> Result<()> {
    target.sandbox.check_in_no_file()?;
    let own = Target::own(target.sandbox.clone());
    match [target, &own].into_iter().find(|one| one.is_paused()) {
        Some(paused) => Err(paused.wrong_state("`slipway resume` has it go on")),
        None => Ok(()),
    }
}

/// Checks that a container has a process that runs, paused or not. A pod that is paused counts as
/// one.
fn check_running(target: &Target) -> Result<()> {
    if !target.is_own() || !target.is_paused() {
        target.has_process()?;
    }
    match target.container.state() {
        SandboxState::Running => Ok(()),
        _ => Err(target.wrong_state("its process does not run")),
    }
}

async fn freeze_target(target: &Target, frozen: bool) -> Result<()> {
    let agent = target.sandbox.agent()?;
    if target.is_own() {
        let containers = target.sandbox.look(containers);
        return freeze_all(&agent, &containers, frozen).await;
    }
    freeze(&agent, &target.container.name, frozen).await
}

/// Returns the containers of a sandbox that stop and go on with it, by their names in the guest:
/// its own one, or those of a pod that run and that no user has paused.
pub(crate) fn containers(record: &Record) -> Vec<String> {
    if !record.pod {
        return vec![OWN.to_owned()];
    }
    let runs = |added: &&Added| added.state == SandboxState::Running && !added.run.paused;
    record.added.iter().filter(runs).map(|added| added.name.clone()).collect()
}

/// Does what [`freeze`] does for each of these containers, one after another, within [`ALL`].
///
/// # Errors
/// The first error of [`freeze`]; [`Error::Agent`](crate::Error::Agent) if it takes longer. Those
/// before it have stopped, or go on.
pub(crate) async fn freeze_all(agent: &Agent, containers: &[String], frozen: bool) -> Result<()> {
    let all = async {
        for id in containers {
            freeze(agent, id, frozen).await?;
        }
        Ok::<_, crate::Error>(())
    };
    let what = if frozen { "stop" } else { "go on" };
    tokio::time::timeout(ALL, all).await.unwrap_or_else(|_| {
        let late = format!("its containers do not {what} within {} s", ALL.as_secs());
        Err(crate::Error::Agent(late))
    })
}

/// Has the agent stop the processes of the container `id` where they are, or have them go on.
///
/// # Errors
/// [`Error::Agent`](crate::Error::Agent).
async fn freeze(agent: &Agent, id: &str, frozen: bool) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::{added_of, record_of, sandbox_of};

    #[tokio::test]
    async fn a_pod_stops_with_the_containers_that_run_and_no_user_has_paused() {
        let mut record = Record { pod: true, ..record_of(SandboxState::Running) };
        let (runs, ended) = (SandboxState::Running, SandboxState::Exited);
        record.added = vec![added_of("a", runs), added_of("b", runs), added_of("c", ended)];
        record.added[1].run.paused = true;
        assert_eq!(containers(&record), ["a"]);
        record.run.paused = true;
        assert_eq!(containers(&record), ["a"], "a pod that is paused goes on with the same ones");
        let dir = tempfile::tempdir().unwrap();
        let sandbox = sandbox_of(record, dir.path());
        let container = sandbox.find_added("a").unwrap();
        let target = Target { sandbox: sandbox.clone(), container };
        let refused = check_runs(&target).unwrap_err().to_string();
        assert!(refused.contains("one is paused: `slipway resume`"), "{refused}");
        sandbox.note(|record| record.run.paused = false);
        check_runs(&target).unwrap();
        assert_eq!(containers(&record_of(SandboxState::Running)), [OWN]);
    }
}
