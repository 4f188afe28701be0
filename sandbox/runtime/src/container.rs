//! One container in the daemon: its streams, and its state as clients see it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use slipway_agent_protocol::v1::ProcessRef;
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};

use crate::agent::process;
use crate::copies::Copies;
use crate::lock::lock;
use crate::record::{Added, SandboxState};
use crate::stdio::{Fanout, Input, input_queue};
use crate::{Error, Result};

/// The name that the container of a sandbox has in its guest if it has the sandbox for its own.
pub(crate) const OWN: &str = "main";

/// A container's handles. A pod has one that stands for the pod as a whole.
pub struct Container {
    /// The container's name in the guest; constant.
    pub name: String,
    /// The clients attached to the container's output.
    pub fanout: Fanout,
    /// The queue to the first process's standard input.
    pub input: mpsc::Sender<Input>,
    input_end: Mutex<Option<mpsc::Receiver<Input>>>,
    /// The other end of the queue that was renewed last, which stays open and unused.
    renewed: Mutex<Option<mpsc::Sender<Input>>>,
    log: PathBuf,
    state: watch::Sender<SandboxState>,
    /// Held for writing while the container is paused or goes on, and for reading while a process
    /// begins in it. That of a pod as a whole is held for writing while the pod is saved or comes
    /// back, and for reading when a container begins to start or to be released.
    pub(crate) pausing: tokio::sync::RwLock<()>,
    /// The files for a container that is not created yet.
    copies: Mutex<Copies>,
    /// The session of a container whose pod has come back from a file, until the container's task
    /// goes on with it.
    session: Mutex<Option<OwnedSemaphorePermit>>,
    /// The last record of a container that was removed from its pod, for calls that still have the
    /// container's handles.
    pub(crate) removed: OnceLock<Added>,
}

impl Container {
    /// Makes the handles of a container in `state`, with its kept output in the file `log`.
    pub(crate) fn new(name: &str, log: PathBuf, state: SandboxState) -> Arc<Self> {
        let (input, input_end) = input_queue();
        Arc::new(Self {
            name: name.to_owned(),
            fanout: Fanout::default(),
            input,
            input_end: Mutex::new(Some(input_end)),
            renewed: Mutex::default(),
            log,
            state: watch::Sender::new(state),
            pausing: tokio::sync::RwLock::default(),
            copies: Mutex::default(),
            session: Mutex::default(),
            removed: OnceLock::new(),
        })
    }

    /// Returns a reference to the container's first process.
    pub(crate) fn process(&self) -> Option<ProcessRef> {
        process(&self.name, "")
    }

    /// Returns the path of the kept output.
    pub(crate) fn log(&self) -> PathBuf {
        self.log.clone()
    }

    /// Returns the state that was announced last.
    pub fn state(&self) -> SandboxState {
        *self.state.borrow()
    }

    /// Waits until `done` holds for the state, and returns that state.
    pub async fn wait_state(&self, done: impl FnMut(&SandboxState) -> bool) -> SandboxState {
        let mut watcher = self.state.subscribe();
        // The sender lives as long as `self`, so the wait cannot fail.
        watcher.wait_for(done).await.map_or(SandboxState::Lost, |state| *state)
    }

    /// Announces a state.
    pub(crate) fn announce(&self, state: SandboxState) {
        self.state.send_if_modified(|old| std::mem::replace(old, state) != state);
    }

    /// Takes the queue's end from which input is read.
    ///
    /// # Errors
    /// [`Error::Agent`] if it was taken before.
    pub(crate) fn take_input(&self) -> Result<mpsc::Receiver<Input>> {
        let taken = || Error::Agent("its input was taken already".to_owned());
        lock(&self.input_end).take().ok_or_else(taken)
    }

    /// Has [`take_input`](Self::take_input) give an empty queue once more, for a container without
    /// standard input whose streams are attached anew.
    pub(crate) fn renew_input(&self) {
        let (sender, end) = input_queue();
        *lock(&self.renewed) = Some(sender);
        *lock(&self.input_end) = Some(end);
    }

    /// Keeps the session of a container whose pod has come back from a file, or drops it.
    pub(crate) fn keep_session(&self, session: Option<OwnedSemaphorePermit>) {
        *lock(&self.session) = session;
    }

    /// Takes the session of [`keep_session`](Self::keep_session). Returns `None` if there is none.
    pub(crate) fn take_session(&self) -> Option<OwnedSemaphorePermit> {
        lock(&self.session).take()
    }

    /// Sets the files that the container will have.
    pub(crate) fn set_copies(&self, copies: Copies) {
        *lock(&self.copies) = copies;
    }

    /// Takes the files that the container is to have.
    pub(crate) fn take_copies(&self) -> Copies {
        std::mem::take(&mut *lock(&self.copies))
    }
}
