//! The life of a sandbox: its container's run and its end. The module `release` gives back what the
//! sandbox held.

use std::sync::Arc;
use std::time::Duration;

use slipway_telemetry::trace::Call;

use crate::cgroup;
use crate::error::MOST_MESSAGE;
use crate::node::{Node, remove_files};
use crate::record::{Record, SandboxState};
use crate::release::{end_leftover, record_end, release};
use crate::running::Running;
use crate::sandbox::Sandbox;
use crate::start::start;
use crate::starts::Beginning;
use crate::{Error, Result, save, sockets, to_file, traces, warm};

/// How long a command that lost its daemon tries to reach the next one.
pub const RETURN: Duration = Duration::from_secs(30);

impl Node {
    /// Starts a created sandbox. Returns at once; a task on the guests' thread runs the sandbox to
    /// its end. `call` is the span of the call that starts it, which ends with the start.
    pub fn start(self: &Arc<Self>, sandbox: &Arc<Sandbox>, mut call: Call) {
        // A caller that says no trace may have had the interface made by a CNI plugin, which did.
        sandbox.look(|record| {
            let namespace = record.network.as_ref().and_then(|one| one.namespace.as_ref());
            if let Some(interface) = namespace {
                call.adopt(interface.traceparent.as_bytes());
            }
        });
        sandbox.set_trace(call.parent());
        self.guests.spawn(live(Arc::clone(self), Arc::clone(sandbox), call));
    }

    /// Removes a sandbox and all of its files. With `force`, kills it first if it is live.
    ///
    /// # Errors
    /// [`Error::WrongState`] if the sandbox is live and `force` is not set, or if a process of it
    /// does not end: its record stays, by which the process is found again.
    pub async fn remove(&self, id: &str, force: bool) -> Result<()> {
        let sandbox = self.find(id)?;
        if sandbox.state().is_live() {
            if !force {
                return Err(
                    sandbox.wrong_state("`slipway stop` ends it, `slipway rm -f` removes it")
                );
            }
            sandbox.kill();
            sandbox.wait_state(|state| !state.is_live()).await;
        }
        end_rest(self, &sandbox).await?;
        remove_files(&sandbox).await?;
        self.forget(&sandbox);
        Ok(())
    }
}

/// Runs a sandbox from its start to its end. The record tells how it ended.
async fn live(node: Arc<Node>, sandbox: Arc<Sandbox>, mut call: Call) {
    let saves = sandbox.look(|record| record.saving.as_template.clone());
    if let Some(name) = saves {
        let made = save::template(&node, &sandbox, &name).await;
        end_life(&node, &sandbox, made.map(|()| 0)).await;
        return remove_and_close(&node, &sandbox).await;
    }
    let started = match warm::make_first(&node, &sandbox).await {
        Ok(()) => start(&node, &sandbox).await,
        Err(error) => Err(error),
    };
    let ended = match started {
        Ok(running) => {
            traces::end(&mut call, None);
            sandbox.look(|record| {
                node.starts.succeeded(&record.timeline, Beginning::of(record));
            });
            warm::make_later(&node, &sandbox);
            to_file::wait(&node, &sandbox, running).await
        }
        Err(error) => {
            if !sandbox.is_stopping() {
                node.starts.failed();
            }
            let error = sockets::blame(&sandbox.record(), error).await;
            traces::end(&mut call, Some(&error));
            Err(error)
        }
    };
    end_life(&node, &sandbox, ended).await;
    remove_and_close(&node, &sandbox).await;
}

/// Runs an adopted sandbox, which outlived its daemon, to its end.
pub async fn live_on(node: Arc<Node>, sandbox: Arc<Sandbox>, running: Running) {
    let ended = to_file::wait(&node, &sandbox, running).await;
    end_life(&node, &sandbox, ended).await;
    sandbox.close_outputs();
    remove_later(node, sandbox).await;
}

/// Runs a sandbox of an earlier daemon to its end whose memory is in a file.
pub(crate) async fn live_in_file(node: Arc<Node>, sandbox: Arc<Sandbox>) {
    let ended = to_file::wait_in_file(&node, &sandbox).await;
    end_life(&node, &sandbox, ended).await;
    sandbox.close_outputs();
    remove_later(node, sandbox).await;
}

/// Removes an ended sandbox if it is to be removed. Before that, clients that lost the sandbox with
/// the earlier daemon get [`RETURN`] to come back for its output and its exit status.
pub async fn remove_later(node: Arc<Node>, sandbox: Arc<Sandbox>) {
    if sandbox.record().remove {
        tokio::time::sleep(RETURN.saturating_sub(node.age())).await;
        remove_ended(&node, &sandbox).await;
    }
}

/// Removes an ended sandbox if it is to be removed, and then ends the streams of its clients: a
/// client that was told of the end finds nothing of the sandbox, and can give its name to another.
async fn remove_and_close(node: &Node, sandbox: &Sandbox) {
    remove_ended(node, sandbox).await;
    sandbox.close_outputs();
}

async fn remove_ended(node: &Node, sandbox: &Sandbox) {
    if sandbox.record().remove {
        match node.remove(&sandbox.id, false).await {
            // Another call removed the sandbox first.
            Err(Error::NoSandbox(_)) => {}
            removed => note(sandbox, removed),
        }
    }
}

/// Releases what a sandbox held, and records how it ended. The caller closes its outputs.
pub(crate) async fn end_life(node: &Node, sandbox: &Sandbox, ended: Result<u32>) {
    let stopping = sandbox.update(|record| record.state = SandboxState::Stopping).await;
    note(sandbox, stopping);
    sandbox.set_agent(None);
    let released = release(node, sandbox).await;
    note(sandbox, released.outcome);
    let describe = |record: &mut Record| finish(record, ended, sandbox.is_stopping());
    let finished = record_end(node, sandbox, released.processes_gone, describe).await;
    note(sandbox, finished);
    node.settled();
}

/// Logs a failure while a sandbox ends. Such a failure must not keep the rest of the sandbox from
/// being released.
fn note(sandbox: &Sandbox, outcome: Result<()>) {
    if let Err(error) = outcome {
        tracing::warn!(sandbox = sandbox.name, %error, "while it ended");
    }
}

/// Ends the processes that an ended sandbox has left, if any. Then gives back what they kept: the
/// sandbox's root, its control group, and the user id of its VMM.
///
/// # Errors
/// [`Error::WrongState`] if a process is left even so; those of saving the record.
async fn end_rest(node: &Node, sandbox: &Sandbox) -> Result<()> {
    let record = sandbox.record();
    if record.vmm_uid.is_none() {
        return Ok(());
    }
    if !end_leftover(&record, node.run_dir(&record.id)).await {
        return Err(sandbox.wrong_state("a process of its VMM has not ended yet; try again later"));
    }
    sandbox.hold_root(None);
    note(sandbox, cgroup::release(node, sandbox).await);
    record_end(node, sandbox, true, |_| {}).await
}

fn finish(record: &mut Record, ended: Result<u32>, stopped: bool) {
    let outcome = Outcome::of(ended, stopped);
    (record.state, record.saving.in_file) = (outcome.state, false);
    record.run.finish(outcome.exit_status, outcome.reason);
    if let Some(network) = &mut record.network {
        network.forget_taken();
    }
    finish_added(record, "its pod ended");
}

/// Marks the containers of a pod that has ended as ended. One whose own exit status is known keeps
/// that.
pub(crate) fn finish_added(record: &mut Record, reason: &str) {
    for added in record.added.iter_mut().filter(|added| added.state.is_live()) {
        (added.state, added.disks) = (SandboxState::Exited, None);
        if added.run.exit_status.is_none() {
            added.run.lose(reason);
        }
    }
}

/// How the life of a container or a pod ended.
pub(crate) struct Outcome {
    /// [`SandboxState::Exited`] or [`SandboxState::Failed`].
    pub state: SandboxState,
    /// The exit status, 0 to 255.
    pub exit_status: u32,
    /// The reason, or `None` if the container ended by itself.
    pub reason: Option<String>,
}

impl Outcome {
    /// Returns the outcome of a life that ended with an exit status or by an error. `stopped` is
    /// set if the microVM was killed on request.
    pub fn of(ended: Result<u32>, stopped: bool) -> Self {
        match ended {
            Ok(exit_status) => Self { state: SandboxState::Exited, exit_status, reason: None },
            Err(_) if stopped => Self {
                state: SandboxState::Exited,
                exit_status: 128 + libc::SIGKILL as u32,
                reason: Some("killed".to_owned()),
            },
            Err(error) => Self {
                state: SandboxState::Failed,
                exit_status: exit_status_of(&error),
                // The message may contain text of a VMM's or an engine's beside ours.
                reason: Some(slipway_printable::line(&error.to_string(), MOST_MESSAGE)),
            },
        }
    }
}

/// Returns the exit status that container runtimes use when the container has none of its own: 137
/// if its microVM ended before it, as after SIGKILL; as in a shell 127 for a program that was not
/// found and 126 for one that cannot be executed; 125 for any other failure.
fn exit_status_of(error: &Error) -> u32 {
    match error {
        Error::Exec { status, .. } => *status,
        Error::VmEnded(_) => 128 + libc::SIGKILL as u32,
        _ => 125,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::record_of;
    use crate::release::forget_vmm;

    #[test]
    fn a_sandbox_that_is_killed_while_a_daemon_waits_for_it_has_exited() {
        let mut record = record_of(SandboxState::Stopping);
        finish(&mut record, Err(Error::Stopped), true);
        let run = &record.run;
        assert_eq!((record.state, run.exit_status), (SandboxState::Exited, Some(137)));
        assert_eq!(run.reason, "killed");
    }

    #[test]
    fn a_user_id_is_free_once_no_process_has_it() {
        let mut record = record_of(SandboxState::Stopping);
        let uid = record.vmm_uid;
        assert!(uid.is_some() && record.vm.is_some());
        assert_eq!(forget_vmm(&mut record, false), None);
        finish(&mut record, Ok(0), false);
        // The next daemon ends the process by the record, and marks the user id as taken.
        assert_eq!((record.state, record.vmm_uid), (SandboxState::Exited, uid));
        assert!(record.vm.is_some());
        assert_eq!(forget_vmm(&mut record, true), uid);
        assert_eq!((record.vmm_uid, record.vm.is_none()), (None, true));
    }
}
