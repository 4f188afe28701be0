//! A sandbox whose memory is in a file, and how it comes back.

use std::sync::Arc;

use slipway_hypervisor::Vm;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;

use super::Sandbox;
use crate::agent::Agent;
use crate::lock::lock;
use crate::record::SandboxState;
use crate::{Error, Result};

/// The advice for a sandbox whose memory is in a file.
pub(super) const IN_FILE: &str = "its memory is in a file; `slipway resume` has it go on";

/// A machine whose containers go on, with the task that carries the output of the sandbox's own
/// container. A pod has no such task.
pub(crate) type Back = (Arc<dyn Vm>, Agent, Option<JoinHandle<Result<()>>>);

impl Sandbox {
    /// Returns whether the sandbox is paused and its memory is in a file.
    pub(crate) fn is_in_file(&self) -> bool {
        self.look(|record| record.saving.in_file)
    }

    /// Checks that the sandbox's memory is in no file.
    ///
    /// # Errors
    /// [`Error::WrongState`] if it is.
    pub(crate) fn check_in_no_file(&self) -> Result<()> {
        if self.is_in_file() { Err(self.wrong_state(IN_FILE)) } else { Ok(()) }
    }

    /// Waits until a sandbox whose memory is in a file has come back and answers, or has ended.
    pub(crate) async fn leaves_file(&self) {
        tokio::select! {
            () = self.answers() => {}
            _ = self.wait_state(|state| !state.is_live()) => {}
        }
    }

    /// Notes that the memory is in a file and nothing of a VMM is left.
    pub(crate) fn come_to_rest(&self) {
        self.rests.send_replace(true);
    }

    /// Returns whether the memory is in a file and nothing of a VMM is left.
    pub(crate) fn rests(&self) -> bool {
        *self.rests.borrow()
    }

    /// Waits until the memory is in a file and nothing of a VMM is left.
    pub(crate) async fn comes_to_rest(&self) {
        // The sender is in `self`.
        let _ = self.rests.subscribe().wait_for(|rests| *rests).await;
    }

    /// Takes a session with the guest of a pod that has come back from a file for each container
    /// that runs. The caller has told nobody of the guest yet: commands of clients could have all
    /// sessions before the containers' tasks go on (`pod::rejoin`), and a container without one
    /// ends.
    pub(crate) fn take_sessions(&self, agent: &Agent) {
        self.keep_sessions(|| agent.session(&self.name));
    }

    /// Gives each container that runs a `session`, to be kept for its task. One that gets none
    /// tries again when its task goes on.
    pub(crate) fn keep_sessions(&self, mut session: impl FnMut() -> Result<OwnedSemaphorePermit>) {
        for container in self.added() {
            let runs = container.state() == SandboxState::Running;
            container.keep_session(if runs { session().ok() } else { None });
        }
    }

    /// Hands over the outcome of coming back from the file.
    pub(crate) fn give_back(&self, back: Result<Back>) {
        *lock(&self.back) = Some(back);
        self.rests.send_replace(false);
    }

    /// Waits until a sandbox that rests has come back, and returns the outcome.
    ///
    /// # Errors
    /// [`Error::Stopped`] if it is asked to end instead; the error that was handed over.
    pub(crate) async fn returned(&self) -> Result<Back> {
        let back = async {
            let _ = self.rests.subscribe().wait_for(|rests| !*rests).await;
        };
        let stopped = async {
            let _ = self.stopping.subscribe().wait_for(|stopping| *stopping).await;
        };
        tokio::select! {
            () = back => {}
            () = stopped => {}
        }
        // A call that has it come back is over then.
        let _turn = self.own.pausing.write().await;
        self.rests.send_replace(false);
        lock(&self.back).take().unwrap_or(Err(Error::Stopped))
    }
}
