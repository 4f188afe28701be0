//! The target of a call: a container of a sandbox.

use std::sync::Arc;

use slipway_telemetry::trace::Call;

use crate::container::Container;
use crate::record::{Added, PAUSED, Process, Run, SandboxState, Settings};
use crate::sandbox::Sandbox;
use crate::stdio::Input;
use crate::{Error, Result, v1};

/// A container together with its sandbox: the target of a call.
#[derive(Clone)]
pub struct Target {
    /// The sandbox.
    pub sandbox: Arc<Sandbox>,
    /// The container: the sandbox's own, or one that was added to a pod.
    pub container: Arc<Container>,
}

impl Target {
    /// Returns the sandbox's own container.
    pub(crate) fn own(sandbox: Arc<Sandbox>) -> Self {
        let container = Arc::clone(&sandbox.own);
        Self { sandbox, container }
    }

    /// Returns whether the container is the sandbox's own, or stands for a whole pod.
    pub(crate) fn is_own(&self) -> bool {
        Arc::ptr_eq(&self.container, &self.sandbox.own)
    }

    /// Returns the name with which users refer to the container.
    pub(crate) fn name(&self) -> String {
        match self.is_own() {
            true => self.sandbox.name.clone(),
            false => format!("{}/{}", self.sandbox.name, self.container.name),
        }
    }

    /// Adds the container's names to the span of a call.
    pub(crate) fn describe(&self, call: &mut Call) {
        if !call.is_recorded() {
            return;
        }
        let id = if self.is_own() { &self.sandbox.id } else { &self.container.name };
        call.set("container.id", id);
        call.set("container.name", &self.name());
        self.look(|settings| call.set("container.image.name", &settings.image));
    }

    /// Ends the input of a process that an earlier daemon fed by a pipe: some of that input may be
    /// lost.
    pub(crate) fn end_lost_input(&self) {
        let piped = |process: &Process| process.stdin && !process.terminal;
        if self.look(|settings| piped(&settings.process)) {
            let _ = self.container.input.try_send(Input::Close);
        }
    }

    /// Returns the result of `look` on the container's record, if it was added to a pod. Once it is
    /// removed, that is its last record: another container may have its name by then.
    pub(crate) fn look_added<T>(&self, look: impl FnOnce(Option<&Added>) -> T) -> T {
        let Container { name, removed, .. } = &*self.container;
        self.sandbox.look(|record| match removed.get().or_else(|| record.added(name)) {
            _ if self.is_own() => look(None),
            added => look(added),
        })
    }

    /// Returns the result of `look` on the container's settings.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&Settings) -> T) -> T {
        match self.is_own() {
            true => self.sandbox.look(|record| look(&record.settings)),
            false => self.look_added(|added| match added {
                Some(added) => look(&added.settings),
                None => look(&Settings::default()),
            }),
        }
    }

    /// Returns whether the container's processes are stopped where they are.
    pub(crate) fn is_paused(&self) -> bool {
        let runs = self.container.state() == SandboxState::Running;
        runs && match self.is_own() {
            true => self.sandbox.look(|record| record.run.paused),
            false => self.look_added(|added| added.is_some_and(|added| added.run.paused)),
        }
    }

    /// Returns the exit of the container, as far as it is known.
    pub(crate) fn exit(&self) -> v1::Exit {
        let exit = |run: &Run, message: &str| v1::Exit {
            termination_message: message.to_owned(),
            status: run.exit_status.unwrap_or(125),
            reason: run.reason.clone(),
            out_of_memory: run.out_of_memory,
        };
        if self.is_own() {
            return self.sandbox.look(|record| exit(&record.run, ""));
        }
        self.look_added(|added| match added {
            Some(added) => exit(&added.run, &added.message),
            None => exit(&Run::default(), ""),
        })
    }

    /// Returns the error for a call that the container's state does not allow.
    pub(crate) fn wrong_state(&self, advice: &str) -> Error {
        Error::WrongState {
            name: self.name(),
            state: match self.is_paused() {
                true => PAUSED.to_owned(),
                false => self.container.state().as_str().to_owned(),
            },
            advice: advice.to_owned(),
        }
    }

    /// Checks that there is a container to run a process in, which a pod is not.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub(crate) fn has_process(&self) -> Result<()> {
        let name = &self.sandbox.name;
        match self.is_own() && self.sandbox.look(|record| record.pod) {
            true => Err(Error::Invalid(format!(
                "{name} is a pod: name one of its containers, as {name}/CONTAINER; `slipway \
                 inspect {name}` lists them"
            ))),
            false => Ok(()),
        }
    }
}
