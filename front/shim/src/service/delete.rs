//! Delete: a process's entry goes, or a task with all that the node has of it.

use std::sync::Arc;
use std::time::Duration;

use tonic::Code;

use super::Service;
use crate::containerd as cd;
use crate::events::Event;
use crate::process::{Phase, ProcessExit};
use crate::task::Task;
use crate::ttrpc::Failure;
use crate::{checkpoint, hooks, rootfs, session};

/// The longest time that a deleted process's output may take to be written.
const LAST_WORDS: Duration = Duration::from_secs(2);

impl Service {
    /// Deletes a process that does not run.
    pub(super) async fn delete(
        &self,
        request: cd::ProcessRequest,
    ) -> Result<cd::DeleteResponse, Failure> {
        let task = self.tasks.find(&request.id)?;
        let process = task.process(&request.exec_id)?;
        let (exit_status, exited_at) = match process.phase() {
            // From here on it cannot be started.
            Phase::Created
                if process.step(&Phase::Created, Phase::Stopped(ProcessExit::now(0, ""))) =>
            {
                (0, None)
            }
            Phase::Stopped(end) => (end.status, Some(end.at)),
            _ => {
                let message = "the process runs: kill it first";
                return Err(Failure::new(Code::FailedPrecondition, message));
            }
        };
        process.finish_output(LAST_WORDS).await;
        let response = cd::DeleteResponse { pid: task.pid(), exit_status, exited_at };
        if process.is_init() {
            self.delete_task(&task, &response).await?;
        } else {
            process.forget();
            task.execs().remove(&request.exec_id);
        }
        Ok(response)
    }

    /// Deletes a task, once: containerd repeats a call that takes long.
    async fn delete_task(
        &self,
        task: &Arc<Task>,
        response: &cd::DeleteResponse,
    ) -> Result<(), Failure> {
        let _alone = task.deleting.lock().await;
        if !self.tasks.find(&task.id).is_ok_and(|found| Arc::ptr_eq(&found, task)) {
            return Ok(());
        }
        self.remove(task).await?;
        hooks::ended(&task.id, &task.bundle, self.keep.holder.as_ref()).await;
        self.events.publish(&Event::Delete(cd::TaskDelete {
            container_id: task.id.clone(),
            pid: response.pid,
            exit_status: response.exit_status,
            exited_at: response.exited_at,
            id: String::new(),
        }));
        task.forget();
        if self.tasks.remove(&task.id) {
            self.end.notify_one();
        }
        Ok(())
    }

    /// Removes what the node has of a task: a pod with all its containers.
    pub(super) async fn remove(&self, task: &Task) -> Result<(), Failure> {
        self.daemon.remove(&task.name, session::RETURN).await?;
        // Before the image, which stays as long as a snapshot has it.
        checkpoint::forget(task).await;
        checkpoint::forget_saved(task).await;
        if let Some(private) = &task.private {
            rootfs::remove_private(&self.daemon, private).await?;
        }
        Ok(())
    }
}
