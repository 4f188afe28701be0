//! Calls that were under way when an earlier serving process was killed.
//!
//! containerd still waits for their answers. Those that tell or wait, and those that may be carried
//! out twice, are carried out again. The others ([`CHANGES`]) are answered by what became of them:
//! well if they were done, and else by an error, once nothing is left of them.

use std::path::Path;

use tonic::Code;

use super::{Service, answer, request};
use crate::containerd as cd;
use crate::process::{Phase, Process};
use crate::ttrpc::Failure;
use crate::{checkpoint, hooks, rootfs};

/// The methods of calls that are not carried out again.
pub(super) const CHANGES: [&str; 7] =
    ["Create", "CreateSandbox", "Start", "StartSandbox", "Exec", "Checkpoint", "Pause"];

impl Service {
    /// Answers a call of one of the [`CHANGES`].
    pub(super) async fn answer_again(
        &self,
        method: &str,
        payload: &[u8],
    ) -> Result<Vec<u8>, Failure> {
        match method {
            "Create" => {
                let request: cd::CreateTaskRequest = request(payload)?;
                let pid = self.created(&request.id, &request.bundle).await;
                answer(pid.map(|pid| cd::CreateTaskResponse { pid }))
            }
            "CreateSandbox" => {
                let request: cd::CreateSandboxRequest = request(payload)?;
                let pid = self.created(&request.sandbox_id, &request.bundle_path).await;
                answer(pid.map(|_| cd::Empty {}))
            }
            "Start" => answer(self.started(request(payload)?).await),
            "StartSandbox" => answer(self.started_sandbox(request(payload)?).await),
            "Exec" => answer(self.added(request(payload)?)),
            "Checkpoint" => answer(self.saved(request(payload)?).await),
            _ => answer(self.went_on(request(payload)?).await),
        }
    }

    /// Returns the process id of a task that was created, or removes what is left of one that was
    /// not.
    async fn created(&self, id: &str, bundle: &str) -> Result<u32, Failure> {
        if let Ok(task) = self.tasks.find(id) {
            return Ok(task.pid());
        }
        self.remove_made(Path::new(bundle)).await;
        hooks::ended(id, Path::new(bundle), self.keep.holder.as_ref()).await;
        Err(killed("the container was created"))
    }

    /// Removes what was made for a container that did not come to be, by the notes in its bundle.
    pub(super) async fn remove_made(&self, bundle: &Path) {
        for snapshot in checkpoint::left_of(bundle) {
            checkpoint::discard(&self.daemon, &snapshot).await;
        }
        if let Some(image) = rootfs::private_of(bundle)
            && let Err(reason) = rootfs::remove_private(&self.daemon, &image).await
        {
            crate::log::warn(&format!("image {image} may be left: {reason}"));
        }
    }

    async fn started(&self, request: cd::ProcessRequest) -> Result<cd::StartResponse, Failure> {
        let task = self.tasks.find(&request.id)?;
        let process = task.process(&request.exec_id)?;
        if process.phase() == Phase::Created {
            // The call had not begun.
            return self.start(request).await;
        }
        has_started(&process).await?;
        if process.is_init() {
            // They may not have run, or not to their end.
            hooks::started(&task, self.keep.holder.as_ref()).await;
        }
        Ok(cd::StartResponse { pid: task.known_pid().await })
    }

    async fn started_sandbox(
        &self,
        request: cd::SandboxRequest,
    ) -> Result<cd::StartSandboxResponse, Failure> {
        let task = self.tasks.find(&request.sandbox_id)?;
        let process = cd::ProcessRequest { id: request.sandbox_id, exec_id: String::new() };
        let pid = self.started(process).await?.pid;
        let created_at = task.sandbox().map(|sandbox| sandbox.created_at);
        Ok(cd::StartSandboxResponse { pid, created_at })
    }

    /// Adds a further process, unless that was done.
    fn added(&self, request: cd::ExecProcessRequest) -> Result<cd::Empty, Failure> {
        let task = self.tasks.find(&request.id)?;
        let is_there = task.execs().contains_key(&request.exec_id);
        if is_there { Ok(cd::Empty {}) } else { self.exec(request) }
    }

    /// Removes what is left of a checkpoint.
    async fn saved(&self, request: cd::CheckpointTaskRequest) -> Result<cd::Empty, Failure> {
        let task = self.tasks.find(&request.id)?;
        checkpoint::forget_saved(&task).await;
        Err(killed("the container was saved"))
    }

    /// Has a task go on that may have been paused.
    async fn went_on(&self, request: cd::ProcessRequest) -> Result<cd::Empty, Failure> {
        self.set_paused(request, false).await?;
        Err(killed("the container was paused"))
    }
}

/// Waits until a process that an earlier serving process was starting runs, or is removed.
///
/// # Errors
/// It does not run.
async fn has_started(process: &Process) -> Result<(), Failure> {
    let mut phase = process.phase.subscribe();
    let settled = phase.wait_for(|phase| *phase != Phase::Starting).await;
    match settled.as_deref() {
        Ok(Phase::Stopped(end)) if !end.ran => Err(killed("the process was started")),
        _ => Ok(()),
    }
}

fn killed(when: &str) -> Failure {
    let message = format!("the shim was killed while {when}: nothing is left of that; try again");
    Failure::new(Code::Unavailable, message)
}
