//! containerd's sandbox service, version 1: a pod is a sandbox, and no container stands for it.
//!
//! The sandbox is a task like that of a pause container, by the same id, so that the pod's
//! containers find it. containerd gets no events of it: it waits for the answer to WaitSandbox.

use std::sync::Arc;
use std::time::Duration;

use slipway_sandbox_api::v1;
use tonic::Code;

use super::{Service, answer, request};
use crate::containerd as cd;
use crate::daemon::failure;
use crate::process::{Phase, timestamp};
use crate::task::{SIGKILL, Task};
use crate::ttrpc::Failure;
use crate::{session, spec};

/// The service's name.
pub(super) const SERVICE: &str = "containerd.runtime.sandbox.v1.Sandbox";
/// The states of a sandbox, by the names of the CRI.
const READY: &str = "SANDBOX_READY";
const NOT_READY: &str = "SANDBOX_NOTREADY";
/// The longest time that a sandbox may take to end after SIGKILL. The daemon gives killed
/// containers 5 s, and then the guest and the release of what the sandbox held 65 s.
const PATIENCE: Duration = Duration::from_secs(100);
/// The number of times that the daemon may wait for the timeout of a stop: for a guest that has not
/// answered it yet, and then for the containers.
const WAITS: u32 = 2;

impl Service {
    /// Carries out a call of the sandbox service other than WaitSandbox.
    pub(super) async fn change_sandbox(
        &self,
        method: &str,
        payload: &[u8],
    ) -> Result<Vec<u8>, Failure> {
        match method {
            "CreateSandbox" => answer(self.create_sandbox(&request(payload)?).await),
            "StartSandbox" => answer(self.start_sandbox(&request(payload)?).await),
            "Platform" => answer(self.platform(&request(payload)?)),
            "StopSandbox" => answer(self.stop_sandbox(&request(payload)?).await),
            "SandboxStatus" => answer(self.sandbox_status(request(payload)?).await),
            "PingSandbox" => answer(self.ping_sandbox(&request(payload)?)),
            "ShutdownSandbox" => answer(self.shutdown_sandbox(&request(payload)?).await),
            "UpdateSandbox" => answer(self.update_sandbox(&request(payload)?).await),
            "SandboxMetrics" => answer(self.sandbox_metrics(&request(payload)?).await),
            _ => Err(Failure::new(Code::Unimplemented, format!("no method {method}"))),
        }
    }

    async fn create_sandbox(
        &self,
        request: &cd::CreateSandboxRequest,
    ) -> Result<cd::Empty, Failure> {
        let place = self.tasks.reserve(&request.sandbox_id)?;
        let task = self.task_maker().make_sandbox(request).await?;
        self.enter(place, task).await?;
        Ok(cd::Empty {})
    }

    async fn start_sandbox(
        &self,
        request: &cd::SandboxRequest,
    ) -> Result<cd::StartSandboxResponse, Failure> {
        let task = self.sandbox(&request.sandbox_id)?;
        session::start(&task, &task.init).await?;
        let created_at = task.sandbox().map(|sandbox| sandbox.created_at);
        Ok(cd::StartSandboxResponse { pid: task.pid(), created_at })
    }

    fn platform(&self, request: &cd::SandboxRequest) -> Result<cd::PlatformResponse, Failure> {
        self.sandbox(&request.sandbox_id)?;
        let (os, architecture) = ("linux".to_owned(), architecture().to_owned());
        Ok(cd::PlatformResponse { platform: Some(cd::Platform { os, architecture }) })
    }

    /// Ends a sandbox with all its containers, and returns when it has ended.
    async fn stop_sandbox(&self, request: &cd::StopSandboxRequest) -> Result<cd::Empty, Failure> {
        let task = self.sandbox(&request.sandbox_id)?;
        match task.init.phase() {
            Phase::Stopped(_) => return Ok(cd::Empty {}),
            Phase::Running if request.timeout_secs > 0 => task.stop(request.timeout_secs),
            Phase::Created | Phase::Starting | Phase::Running => {
                task.kill(&task.init, SIGKILL).await?;
            }
        }
        let timeout = Duration::from_secs(request.timeout_secs.into());
        let patience = PATIENCE + timeout.saturating_mul(WAITS);
        match tokio::time::timeout(patience, task.init.ended()).await {
            Ok(_) => Ok(cd::Empty {}),
            Err(_) => {
                let message = format!("the sandbox {} does not end: see `slipway ps`", task.name);
                Err(Failure::new(Code::DeadlineExceeded, message))
            }
        }
    }

    /// Returns the end of a sandbox once it has ended.
    pub(super) async fn wait_sandbox(
        &self,
        request: &cd::SandboxRequest,
    ) -> Result<cd::WaitSandboxResponse, Failure> {
        let task = self.sandbox(&request.sandbox_id)?;
        let end = task.init.ended().await;
        Ok(cd::WaitSandboxResponse { exit_status: end.status, exited_at: Some(end.at) })
    }

    async fn sandbox_status(
        &self,
        request: cd::SandboxStatusRequest,
    ) -> Result<cd::SandboxStatusResponse, Failure> {
        let task = self.sandbox(&request.sandbox_id)?;
        let pid = task.known_pid().await;
        let (state, exited_at) = match task.init.phase() {
            Phase::Running => (READY, None),
            Phase::Created | Phase::Starting => (NOT_READY, None),
            Phase::Stopped(end) => (NOT_READY, Some(end.at)),
        };
        let info = request.verbose.then(|| ("slipway".to_owned(), task.name.clone()));
        Ok(cd::SandboxStatusResponse {
            sandbox_id: request.sandbox_id,
            pid,
            state: state.to_owned(),
            info: info.into_iter().collect(),
            created_at: task.sandbox().map(|sandbox| sandbox.created_at),
            exited_at,
        })
    }

    fn ping_sandbox(&self, request: &cd::SandboxRequest) -> Result<cd::Empty, Failure> {
        self.sandbox(&request.sandbox_id).map(|_| cd::Empty {})
    }

    /// Removes what is left of a sandbox, and ends the shim. Without a sandbox, as after a refused
    /// CreateSandbox, only the latter.
    async fn shutdown_sandbox(&self, request: &cd::SandboxRequest) -> Result<cd::Empty, Failure> {
        if request.sandbox_id != self.args.id {
            return Err(no_sandbox(&request.sandbox_id));
        }
        if let Ok(task) = self.sandbox(&request.sandbox_id) {
            if let Err(failed) = self.remove(&task).await {
                // containerd forgets a sandbox that did not start, and asks again for others.
                if has_run(&task) {
                    return Err(failed);
                }
                crate::log::warn(&format!("{} may be left: {failed}", task.name));
            }
            task.forget();
            self.tasks.remove(&task.id);
        }
        self.end.notify_one();
        Ok(cd::Empty {})
    }

    /// Gives a pod the limits that all of its containers have together. The call is of containerd
    /// 2.4 and later, which takes it that an earlier shim does not know it.
    async fn update_sandbox(
        &self,
        request: &cd::UpdateSandboxRequest,
    ) -> Result<cd::Empty, Failure> {
        let task = self.sandbox(&request.sandbox_id)?;
        let limits = spec::updated_limits(request).map_err(Failure::invalid)?;
        if limits.is_none() || !matches!(task.init.phase(), Phase::Running) {
            return Ok(cd::Empty {});
        }
        let name = task.name.clone();
        let request = v1::UpdateRequest { name, resources: limits, ..Default::default() };
        let mut client = self.daemon.connect().await?;
        client.update(request).await.map_err(|status| failure(&status))?;
        Ok(cd::Empty {})
    }

    async fn sandbox_metrics(
        &self,
        request: &cd::SandboxRequest,
    ) -> Result<cd::SandboxMetricsResponse, Failure> {
        let id = self.sandbox(&request.sandbox_id)?.id.clone();
        let process = cd::ProcessRequest { id: id.clone(), exec_id: String::new() };
        let data = self.stats(&process).await?.stats;
        let metric = cd::Metric { timestamp: Some(timestamp()), id, data };
        Ok(cd::SandboxMetricsResponse { metrics: Some(metric) })
    }

    /// Finds a sandbox that CreateSandbox made.
    fn sandbox(&self, id: &str) -> Result<Arc<Task>, Failure> {
        let found = self.tasks.find(id).ok().filter(|task| task.sandbox().is_some());
        found.ok_or_else(|| no_sandbox(id))
    }
}

fn no_sandbox(id: &str) -> Failure {
    Failure::new(Code::NotFound, format!("no sandbox {id}"))
}

/// Returns whether a sandbox runs, may be about to, or has run.
fn has_run(task: &Task) -> bool {
    match task.init.phase() {
        Phase::Created => false,
        Phase::Starting | Phase::Running => true,
        Phase::Stopped(end) => end.ran,
    }
}

/// Returns the architecture of this program and of its guests, by the name that images have.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
