//! A sandbox while its container runs, up to the end of its VMM.

use std::sync::Arc;
use std::time::Duration;

use slipway_agent_protocol::v1 as agent_v1;
use slipway_hypervisor::{Vm, VmExit};

use crate::agent::Agent;
use crate::record::SandboxState;
use crate::sandbox::Sandbox;
use crate::{Error, Result};

/// The time that a guest has for its own end: to end its containers, for which the agent gives them
/// 5 s, write back its volumes and say so. What it has not written back by then is lost, so it is
/// longer than a busy machine stands still. `slipway rm --force` does not wait for it.
pub(crate) const GUEST_END: Duration = Duration::from_secs(60);
/// The time that a guest has to power off after that.
const POWER_OFF: Duration = Duration::from_millis(300);
/// The time for output that has come from a guest whose VMM has ended, before its sandbox comes
/// back from a file. Only a client that does not read needs it.
const CARRY_ENDS: Duration = Duration::from_secs(5);
/// The longest time from the break of the agent's port until the end of its VMM is known.
const PORT_BREAKS: Duration = Duration::from_secs(3);

/// A task that carries the output of a container.
pub(crate) type Carry = tokio::task::JoinHandle<Result<()>>;

/// A sandbox whose container runs, or a pod that runs.
pub struct Running {
    vm: Arc<dyn Vm>,
    agent: Agent,
    carry: Option<Carry>,
}

impl Running {
    /// Makes the handle; `carry` carries the container's output. A pod has none.
    pub(crate) fn new(vm: Arc<dyn Vm>, agent: Agent, carry: Option<Carry>) -> Self {
        Self { vm, agent, carry }
    }

    /// Waits for the end of the container, or of the pod, and returns the exit status. After an
    /// error its output may still be carried.
    pub(crate) async fn wait(&mut self, sandbox: &Sandbox) -> Result<u32> {
        let Some(carry) = &mut self.carry else {
            tokio::select! {
                () = sandbox.pod_ends() => {}
                ended = self.vm.wait() => return Err(Error::vm_ended(&ended)),
            }
            shut_down(&self.agent, &*self.vm, &sandbox.name).await;
            return Ok(0);
        };
        let ended = tokio::select! {
            ended = self.agent.wait(sandbox.own.process()) => match ended {
                Ok(ended) => ended,
                Err(error) => return Err(blame(&*self.vm, error).await),
            },
            ended = self.vm.wait() => return Err(Error::vm_ended(&ended)),
        };
        carried(carry, &sandbox.name).await;
        // The exit status is recorded before the agent ends, since only the agent knows it, too.
        let recorded = sandbox.update(|record| {
            // A call that stops the sandbox from here on waits for the guest's own end.
            record.state = SandboxState::Stopping;
            let killed = "the guest ran out of memory; `--memory` gives it more";
            record.run.exit(ended.status, ended.out_of_memory.then_some(killed));
        });
        if let Err(error) = recorded.await {
            tracing::warn!(sandbox = sandbox.name, %error, "its record is not saved");
        }
        shut_down(&self.agent, &*self.vm, &sandbox.name).await;
        Ok(ended.status)
    }

    /// Does what [`end_carry`] does, if an output is carried.
    pub(crate) async fn end_carry(self) {
        if let Some(carry) = self.carry {
            end_carry(carry).await;
        }
    }
}

/// Waits until the output of an ended container has reached the log and the attached clients. The
/// guest has sent all of it.
pub(crate) async fn carried(carry: &mut Carry, name: &str) {
    let carried = tokio::time::timeout(Duration::from_secs(60), &mut *carry).await;
    // A guest that leaves the stream open must not keep the log's writer.
    carry.abort();
    if !matches!(carried, Ok(Ok(Ok(())))) {
        tracing::warn!(container = name, "output may be cut: {carried:?}");
    }
}

/// Ends the task that carries the output of a container whose VMM has ended, before the container's
/// output is carried from its next VMM: two writers would spoil the log. Output that has come
/// already has [`CARRY_ENDS`] to reach the log and the attached clients. What is not in the log
/// then, the guest sends again; a client that has taken nothing meanwhile may miss a piece.
pub(crate) async fn end_carry(mut carry: Carry) {
    if tokio::time::timeout(CARRY_ENDS, &mut carry).await.is_err() {
        carry.abort();
        let _ = carry.await;
    }
}

/// Asks the guest of sandbox `name` to write back its volumes and power off, then kills the VMM.
async fn shut_down(agent: &Agent, vm: &dyn Vm, name: &str) {
    let asked = agent.call_within(Some(GUEST_END), |mut client| async move {
        client.shutdown(agent_v1::ShutdownRequest {}).await
    });
    let answer = tokio::select! {
        // In this order: a guest that has answered ends its VMM.
        biased;
        answered = asked => answered.map(drop),
        ended = vm.wait() => Err(Error::vm_ended(&ended)),
    };
    match answer {
        Ok(()) => {
            let _ = tokio::time::timeout(POWER_OFF, vm.wait()).await;
        }
        Err(error) => tracing::warn!(
            sandbox = name,
            %error,
            "its guest does not say that its volumes are written back: they may lack data"
        ),
    }
    end(vm).await;
}

/// Kills the VMM and waits until it is reaped. Returns `false` if it is not reaped in time.
pub(crate) async fn end(vm: &dyn Vm) -> bool {
    if let Err(error) = vm.kill() {
        tracing::warn!(%error, "the VMM could not be killed");
    }
    tokio::time::timeout(Duration::from_secs(10), vm.wait()).await.is_ok()
}

/// Waits for an answer of the agent, or for the end of the VMM, after which there will be none.
pub(crate) async fn or_end<T>(vm: &dyn Vm, asked: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::select! {
        outcome = asked => match outcome {
            Err(error @ Error::Agent(_)) => Err(blame(vm, error).await),
            outcome => outcome,
        },
        ended = vm.wait() => Err(Error::vm_ended(&ended)),
    }
}

/// Returns the better explanation of a failed call of the agent. The agent's port breaks a moment
/// before the VMM is known to have ended, and then the VMM's last message tells more. A refusal is
/// returned at once.
pub(crate) async fn blame(vm: &dyn Vm, error: Error) -> Error {
    explained(error, vm.wait()).await
}

/// Returns the better one of `error` and the VMM's end, if that comes within [`PORT_BREAKS`].
async fn explained(error: Error, ended: impl Future<Output = VmExit>) -> Error {
    if matches!(error, Error::Refused(_)) {
        return error;
    }
    match tokio::time::timeout(PORT_BREAKS, ended).await {
        Ok(ended) => Error::vm_ended(&ended),
        Err(_) => error,
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, sleep};
    use tonic::Status;

    use super::*;
    use crate::agent::refused;

    /// Returns the explanation of a call that failed with `status`, and the time that it took. The
    /// VMM ends after a second.
    async fn explanation(status: Status) -> (Error, Duration) {
        let begun = Instant::now();
        let ended = async {
            sleep(Duration::from_secs(1)).await;
            VmExit { code: Some(1), signal: None, reason: None, stderr: String::new() }
        };
        let error = explained(refused(status), ended).await;
        (error, begun.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_call_without_an_answer_waits_for_the_end_of_the_vmm() {
        for answer in [
            Status::invalid_argument("no"),
            Status::not_found("no"),
            Status::already_exists("no"),
            Status::failed_precondition("no"),
        ] {
            let (error, took) = explanation(answer).await;
            assert!(matches!(error, Error::Refused(_)), "{error}");
            assert_eq!((error.to_string().as_str(), took), ("no", Duration::ZERO));
        }
        for lost in [
            Status::unavailable("broken"),
            Status::unknown("broken"),
            Status::cancelled("broken"),
            Status::internal("broken"),
            Status::from_error(Box::new(std::io::Error::other("broken"))),
        ] {
            let (error, _) = explanation(lost).await;
            assert!(matches!(error, Error::VmEnded(_)), "{error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_log_has_no_writer_when_the_next_one_comes() {
        end_carry(tokio::spawn(async { Ok(()) })).await;
        // A client that does not read keeps the task.
        let (writer, is_gone) = tokio::sync::oneshot::channel::<()>();
        let carry = tokio::spawn(async move {
            let _writer = writer;
            std::future::pending().await
        });
        end_carry(carry).await;
        assert!(is_gone.await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_of_a_guest_that_runs_on_is_told_as_it_is() {
        let begun = Instant::now();
        let failed = refused(Status::internal("no memory"));
        let error = explained(failed, std::future::pending()).await;
        assert!(matches!(error, Error::Agent(_)), "{error}");
        assert!(begun.elapsed() >= PORT_BREAKS);
    }
}
