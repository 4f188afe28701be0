//! The life of a sandbox: its container's run, its end, and the release of what it held.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use slipway_telemetry::trace::Call;

use crate::cgroup;
use crate::error::MOST_MESSAGE;
use crate::node::{Node, remove_files};
use crate::record::{Record, SandboxState, ShareServer};
use crate::running::{Running, end};
use crate::sandbox::Sandbox;
use crate::start::start;
use crate::{Error, Result, function, network, pod_functions, save, sockets, traces, warm};

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
    let saves = sandbox.look(|record| record.saves.clone());
    if let Some(name) = saves {
        let made = save::template(&node, &sandbox, &name).await;
        end_life(&node, &sandbox, made.map(|()| 0)).await;
        return remove_ended(&node, &sandbox).await;
    }
    let started = match warm::make_first(&node, &sandbox).await {
        Ok(()) => start(&node, &sandbox).await,
        Err(error) => Err(error),
    };
    let ended = match started {
        Ok(running) => {
            traces::end(&mut call, None);
            sandbox.look(|record| node.starts.succeeded(&record.timeline));
            warm::make_later(&node, &sandbox);
            running.wait(&sandbox).await
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
    remove_ended(&node, &sandbox).await;
}

/// Runs an adopted sandbox, which outlived its daemon, to its end.
pub async fn live_on(node: Arc<Node>, sandbox: Arc<Sandbox>, running: Running) {
    let ended = running.wait(&sandbox).await;
    end_life(&node, &sandbox, ended).await;
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

async fn remove_ended(node: &Node, sandbox: &Sandbox) {
    if sandbox.record().remove {
        match node.remove(&sandbox.id, false).await {
            // Another call removed the sandbox first.
            Err(Error::NoSandbox(_)) => {}
            removed => note(sandbox, removed),
        }
    }
}

async fn end_life(node: &Node, sandbox: &Sandbox, ended: Result<u32>) {
    let stopping = sandbox.update(|record| record.state = SandboxState::Stopping).await;
    note(sandbox, stopping);
    sandbox.set_agent(None);
    let released = release(node, sandbox).await;
    note(sandbox, released.outcome);
    let describe = |record: &mut Record| finish(record, ended, sandbox.is_stopping());
    let finished = record_end(node, sandbox, released.processes_gone, describe).await;
    note(sandbox, finished);
    sandbox.close_outputs();
    node.settled();
}

/// Logs a failure while a sandbox ends. Such a failure must not keep the rest of the sandbox from
/// being released.
fn note(sandbox: &Sandbox, outcome: Result<()>) {
    if let Err(error) = outcome {
        tracing::warn!(sandbox = sandbox.name, %error, "while it ended");
    }
}

/// Saves the end of a released sandbox, which `describe` puts into its record. Then gives the user
/// id of its VMM back if its processes are gone. Two sandboxes must never share a user id: it is
/// free only if no process has it, and once no record on disk names it.
///
/// # Errors
/// The errors of saving the record. The user id stays taken then.
pub async fn record_end(
    node: &Node,
    sandbox: &Sandbox,
    processes_gone: bool,
    describe: impl FnOnce(&mut Record),
) -> Result<()> {
    let mut free = None;
    let recorded = sandbox.update(|record| {
        free = forget_vmm(record, processes_gone);
        describe(record);
    });
    recorded.await?;
    if let Some(uid) = free {
        node.uids.give_back(uid);
    }
    Ok(())
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

/// Takes the VMM out of the record of a released sandbox. If a process is left, the VMM stays in
/// the record, so that the next daemon ends that process and does not give its user id away.
/// Returns the user id that is free once the record is saved.
fn forget_vmm(record: &mut Record, processes_gone: bool) -> Option<u32> {
    if !processes_gone {
        return None;
    }
    record.vm = None;
    record.vmm_uid.take()
}

fn finish(record: &mut Record, ended: Result<u32>, stopped: bool) {
    let outcome = Outcome::of(ended, stopped);
    (record.state, record.exit_status) = (outcome.state, Some(outcome.exit_status));
    record.reason = outcome.reason.unwrap_or(std::mem::take(&mut record.reason));
    // The function goes to others, by the same name.
    if let Some(pool) = record.network.as_mut().and_then(|network| network.pool.as_mut()) {
        pool.taken = None;
    }
    finish_added(record, "its pod ended");
}

/// Marks the containers of a pod that has ended as ended. One whose own exit status is known keeps
/// that.
pub(crate) fn finish_added(record: &mut Record, reason: &str) {
    for added in record.added.iter_mut().filter(|added| added.state.is_live()) {
        (added.state, added.disks) = (SandboxState::Exited, None);
        if added.exit_status.is_none() {
            added.exit_status = Some(128 + libc::SIGKILL as u32);
            added.reason = slipway_printable::line(reason, MOST_MESSAGE);
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

/// Ends the VMM of a sandbox that another daemon started. The daemon may not have recorded the
/// VMM's process, but it recorded the user id before the start, and only this sandbox uses that id.
/// Returns whether no process is left.
async fn end_leftover(record: &Record, run_dir: PathBuf) -> bool {
    const PATIENCE: Duration = Duration::from_secs(5);
    let (vm, uid, name) = (record.vm.clone(), record.vmm_uid, record.name.clone());
    let cgroup = cgroup::path(record);
    let shares = record.share_server != ShareServer::None;
    let ended = tokio::task::spawn_blocking(move || {
        if let Some(Err(error)) = vm.map(|vm| slipway_hypervisor::reap_leftover(&vm, PATIENCE)) {
            tracing::warn!(sandbox = name, %error, "its VMM may still run");
        }
        uid.is_none_or(|uid| {
            let owned = crate::proc::Owned { uid, shares, run_dir: &run_dir, cgroup: &cgroup };
            crate::proc::kill_all(&owned, PATIENCE)
        })
    });
    let ended = ended.await.unwrap_or(false);
    if !ended {
        tracing::warn!(sandbox = record.name, "a process of its is left");
    }
    ended
}

/// The outcome of a sandbox's release.
pub struct Released {
    /// Set if no process of the sandbox is left on the host.
    pub processes_gone: bool,
    /// The first failure. The remaining resources are released even so.
    pub outcome: Result<()>,
}

/// Releases everything that a live sandbox holds on the host but the user id of its VMM, which
/// [`record_end`] gives back. Missing resources are no error, so this also cleans up after a daemon
/// that was killed.
pub async fn release(node: &Node, sandbox: &Sandbox) -> Released {
    let record = sandbox.record();
    let processes_gone = if let Some(vm) = sandbox.vm() {
        sandbox.set_vm(None);
        let ended = end(&*vm).await;
        // The server of its shares ends with the VMM's connections, unless it hangs.
        let alone = record.share_server == ShareServer::None;
        ended && (alone || end_leftover(&record, node.run_dir(&record.id)).await)
    } else {
        end_leftover(&record, node.run_dir(&record.id)).await
    };
    sandbox.hold_memory(None);
    let endpoint = function::remove(node, &record).await;
    sandbox.hold_fetcher(None);
    let network = network::release(node, &record).await;
    pod_functions::give_back(node, sandbox).await;
    let run_dir = node.run_dir(&record.id);
    let dir = sandbox.lane.run(move || match std::fs::remove_dir_all(&run_dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::file("cannot remove", &run_dir)(error))
        }
        _ => Ok(()),
    });
    let dir = dir.await;
    // A process that is left keeps its group.
    let cgroup = if processes_gone { cgroup::release(node, sandbox).await } else { Ok(()) };
    // A VMM that is left has the root mapped, which counts as long as that is so.
    if processes_gone {
        sandbox.hold_root(None);
    }
    Released { processes_gone, outcome: endpoint.and(network).and(dir).and(cgroup) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::record_of;

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
