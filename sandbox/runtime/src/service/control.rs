//! Input, signals and the end of containers.

use std::time::Duration;

use slipway_agent_protocol::v1 as agent_v1;
use tonic::Streaming;

use super::forward;
use crate::record::SandboxState;
use crate::running::GUEST_END;
use crate::snapshot::LONGEST;
use crate::stdio::{self, Input};
use crate::target::Target;
use crate::{Error, pause, pod, v1};

/// The time in which the killed processes of a sandbox end. What has not ended then ends with its
/// VMM.
const KILLED_IN_SANDBOX: Duration = Duration::from_secs(5);
/// The time for a guest's own end, and for the release of what its sandbox held.
const END: Duration = GUEST_END.saturating_add(Duration::from_secs(5));

/// The effect of a client's leaving on the container's standard input.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Leaving {
    /// The input ends: the client that fed a pipe is gone, and the pipe's reader must not wait for
    /// ever.
    EndsInput,
    /// The input stays open: a terminal waits for the next client.
    KeepsInput,
}

impl Leaving {
    /// Returns the effect for the client that created the container.
    pub(super) fn of_owner(spec: &v1::RunSpec) -> Self {
        let ends = spec.stdin && !spec.terminal && !spec.keeps_input;
        if ends { Self::EndsInput } else { Self::KeepsInput }
    }
}

/// Carries a client's input to the container's first process, if the process takes any.
pub(super) fn join_input(
    target: &Target,
    messages: Streaming<v1::RunIn>,
    takes_input: bool,
    leaving: Leaving,
) {
    let target = target.clone();
    // A process without input still gets signals and window sizes; bytes are dropped.
    let input = if takes_input { target.container.input.clone() } else { stdio::input_queue().0 };
    tokio::spawn(async move {
        let agent = || target.sandbox.agent().ok();
        forward(messages, input.clone(), agent, target.container.process()).await;
        if leaving == Leaving::EndsInput {
            let _ = input.send(Input::Close).await;
        }
    });
}

/// Sends a signal to the container's first process. SIGKILL ends a sandbox that starts, whose
/// memory is in a file, or whose guest has not answered a restarted daemon.
///
/// # Errors
/// The container does not run, or the agent refuses.
pub(super) async fn send_signal(target: &Target, signal: u32) -> Result<(), Error> {
    let sandbox = &target.sandbox;
    let is_kill = signal == libc::SIGKILL as u32;
    if target.is_own() && is_kill && has_no_agent(target) {
        sandbox.kill();
        return Ok(());
    }
    target.has_process()?;
    if target.container.state() != SandboxState::Running {
        return Err(target.wrong_state("its process does not run"));
    }
    let process = target.container.process();
    let request = agent_v1::SignalRequest { process, signal, all: false };
    sandbox.agent()?.call(|mut client| async move { client.signal(request).await }).await?;
    Ok(())
}

/// Returns whether a sandbox has no agent that takes a signal, so that only all of it can be
/// killed. A pod that runs takes no signal in any case.
fn has_no_agent(target: &Target) -> bool {
    let sandbox = &target.sandbox;
    match sandbox.state() {
        SandboxState::Starting => true,
        _ if sandbox.is_in_file() => true,
        SandboxState::Running => target.has_process().is_ok() && sandbox.agent().is_err(),
        _ => false,
    }
}

/// Ends a container, a sandbox with its own container, or a pod with all of its containers.
///
/// # Errors
/// A container of a pod does not end, or its pod's memory is in a file. A sandbox ends in any case.
pub(super) async fn stop(target: &Target, patience: Duration) -> Result<(), Error> {
    if !target.is_own() {
        if !target.container.state().is_live() {
            return Ok(());
        }
        // A guest that is being saved hears nothing until that is done.
        let _ = tokio::time::timeout(LONGEST, target.container.pausing.read()).await;
        target.sandbox.check_in_no_file()?;
        // Its stop signal is lost on a guest that does not hear it yet.
        let _ = tokio::time::timeout(patience, hears(target)).await;
        return pod::stop(target, patience).await;
    }
    if target.sandbox.is_in_file() {
        // A sandbox that comes back from its file gets the signal once it is back.
        let _ = tokio::time::timeout(LONGEST, target.container.pausing.read()).await;
    }
    if target.sandbox.state() == SandboxState::Running {
        let _ = tokio::time::timeout(patience, hears(target)).await;
        match target.sandbox.look(|record| record.pod) {
            true => stop_pod(target, patience).await,
            false => stop_own(target, patience).await,
        }
    }
    // Its guest writes back its volumes, whether the container ended by itself or on request.
    if target.sandbox.state() == SandboxState::Stopping {
        let ended = target.container.wait_state(|state| !state.is_live());
        let _ = tokio::time::timeout(END, ended).await;
    }
    if target.sandbox.state().is_live() {
        target.sandbox.kill();
        target.container.wait_state(|state| !state.is_live()).await;
    }
    Ok(())
}

/// Returns once the guest of a sandbox that runs can hear of a signal, or the sandbox ends: the
/// guest may not have answered a restarted daemon yet.
async fn hears(target: &Target) {
    if target.sandbox.is_in_file() {
        return;
    }
    tokio::select! {
        () = target.sandbox.answers() => {}
        _ = target.sandbox.wait_state(|state| *state != SandboxState::Running) => {}
    }
}

/// Ends a sandbox's own container: its stop signal, then SIGKILL after `patience`. Returns when the
/// container's process has ended, or after the time that it has. A guest that does not answer has
/// no more time than one whose container does not end.
async fn stop_own(target: &Target, patience: Duration) {
    // A guest that is being saved hears nothing until that is done.
    let _ = tokio::time::timeout(LONGEST, target.container.pausing.read()).await;
    let signal = target.look(|settings| settings.stop_signal);
    for (signal, patience) in [(signal, patience), (libc::SIGKILL as u32, KILLED_IN_SANDBOX)] {
        let asked = async {
            pause::resume_paused(target).await?;
            send_signal(target, signal).await?;
            target.container.wait_state(|state| *state != SandboxState::Running).await;
            Ok::<_, Error>(())
        };
        if let Ok(Ok(())) = tokio::time::timeout(patience, asked).await {
            return;
        }
    }
}

/// Ends a pod: its containers first, then the guest. Leaves one whose memory is in a file to the
/// caller: nothing of it runs.
async fn stop_pod(target: &Target, patience: Duration) {
    // A guest that is being saved hears nothing until that is done.
    let _ = tokio::time::timeout(LONGEST, target.container.pausing.read()).await;
    if target.sandbox.is_in_file() {
        return;
    }
    // A pod that does not go on within its patience is killed below.
    let _ = tokio::time::timeout(patience, pause::resume_paused(target)).await;
    let containers = pod::stop_all(&target.sandbox, patience);
    let _ = tokio::time::timeout(patience + KILLED_IN_SANDBOX, containers).await;
    target.sandbox.end_pod();
    let ended = target.container.wait_state(|state| !state.is_live());
    let _ = tokio::time::timeout(END, ended).await;
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::adopt::tests::{added_of, record_of, sandbox_of};

    #[tokio::test]
    async fn a_kill_ends_a_sandbox_whose_guest_has_not_answered_a_restarted_daemon() {
        let kill = libc::SIGKILL as u32;
        let dir = tempfile::tempdir().unwrap();
        let sandbox = sandbox_of(record_of(SandboxState::Running), dir.path());
        let own = Target::own(sandbox);
        let late = send_signal(&own, libc::SIGTERM as u32).await.unwrap_err().to_string();
        assert!(late.contains("does not answer yet") && !own.sandbox.is_stopping(), "{late}");
        send_signal(&own, kill).await.unwrap();
        assert!(own.sandbox.is_stopping());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_of_a_pods_container_waits_for_a_guest_that_has_not_answered_yet() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = record_of(SandboxState::Running);
        record.pod = true;
        record.added.push(added_of("one", SandboxState::Running));
        let sandbox = sandbox_of(record, dir.path());
        let container = sandbox.find_added("one").unwrap();
        let (target, begun) = (Target { sandbox, container }, tokio::time::Instant::now());
        let patience = Duration::from_secs(10);
        stop(&target, patience).await.unwrap_err();
        // The guest never answers: the time for its answer, and then the time of a kill.
        assert!(begun.elapsed() >= patience + slipway_sandbox_api::stop::KILLED);
        // The clock is the test's, so a busy machine does not move it.
        assert!(begun.elapsed() < slipway_sandbox_api::stop::longest(patience));
    }

    #[tokio::test]
    async fn a_pod_in_a_file_ends_at_once_and_none_of_its_containers_alone() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = record_of(SandboxState::Running);
        (record.pod, record.run.paused, record.saving.in_file) = (true, true, true);
        record.added.push(added_of("one", SandboxState::Running));
        let sandbox = sandbox_of(record, dir.path());
        let container = sandbox.find_added("one").unwrap();
        let one = Target { sandbox: Arc::clone(&sandbox), container };
        let refused = stop(&one, Duration::ZERO).await.unwrap_err().to_string();
        assert!(refused.contains("one is paused") && refused.contains("resume"), "{refused}");
        let pod = Target::own(Arc::clone(&sandbox));
        let ends = tokio::spawn(async move { stop(&pod, Duration::ZERO).await });
        sandbox.stopped().await;
        sandbox.update(|record| record.state = SandboxState::Exited).await.unwrap();
        ends.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_sandbox_that_comes_back_from_its_file_is_not_killed_by_a_stop_before_it_is_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = record_of(SandboxState::Starting);
        (record.run.paused, record.saving.in_file) = (true, true);
        let sandbox = sandbox_of(record, dir.path());
        let own = Target::own(Arc::clone(&sandbox));
        let returns = sandbox.own.pausing.write().await;
        let mut stops = Box::pin(stop(&own, Duration::ZERO));
        assert!(tokio::time::timeout(Duration::from_secs(60), &mut stops).await.is_err());
        assert!(!sandbox.is_stopping());
        // It does not come back, and is in its file as before.
        drop(returns);
        assert!(tokio::time::timeout(Duration::from_secs(60), &mut stops).await.is_err());
        assert!(sandbox.is_stopping());
    }

    #[tokio::test]
    async fn a_pod_that_runs_is_ended_by_no_signal() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = record_of(SandboxState::Running);
        record.pod = true;
        let pod = Target::own(sandbox_of(record, dir.path()));
        let refused = send_signal(&pod, libc::SIGKILL as u32).await.unwrap_err().to_string();
        assert!(refused.contains("is a pod") && !pod.sandbox.is_stopping(), "{refused}");
    }
}
