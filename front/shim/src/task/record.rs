//! The records of a task: what the next serving process finds of it.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock, PoisonError};

use serde::{Deserialize, Serialize};

use super::{Sandbox, Task, TaskKind};
use crate::copies::Copy;
use crate::hold::KeptDescriptor;
use crate::netns::HookNetwork;
use crate::store::{RestartStore, Store, name};

/// The record of a task for the next serving process.
#[derive(Default)]
pub struct TaskFiles {
    store: OnceLock<Store>,
    /// The file for the termination message, whose path may lead elsewhere by then.
    message: Mutex<Option<KeptDescriptor>>,
    /// The network namespace that was made for its hooks.
    pub network: HookNetwork,
}

impl TaskFiles {
    /// Makes the record of a task that an earlier serving process has left in `store`.
    pub fn left(store: &Store, message: Option<KeptDescriptor>) -> Self {
        Self {
            store: store.clone().into(),
            message: Mutex::new(message),
            network: HookNetwork::default(),
        }
    }
}

/// A task as the next serving process finds it, beside its processes and its copies.
#[derive(Debug, Serialize, Deserialize)]
pub struct Record {
    /// The container's id.
    pub id: String,
    /// The bundle's directory.
    pub bundle: PathBuf,
    /// The name by which the daemon knows it.
    pub name: String,
    /// Its kind.
    pub kind: KindRecord,
    /// Set while its processes are stopped where they are.
    pub paused: bool,
    /// The name of the image that is this container's alone, if there is one.
    pub private: Option<String>,
    /// The name of the snapshot with which its sandbox begins, until that is removed.
    pub snapshot: Option<String>,
    /// The memory that its copies took of its guest when it was made, bytes.
    #[serde(default)]
    pub copied: usize,
}

/// The [`TaskKind`] of a task as the next serving process finds it.
#[derive(Debug, Serialize, Deserialize)]
pub enum KindRecord {
    /// A container with a sandbox of its own.
    Alone,
    /// A pod's sandbox: its network namespace, its `emptyDir` volumes as JSON, and its part of the
    /// Sandbox API.
    Pod(String, serde_json::Value, Option<Sandbox>),
    /// A container of the pod with this id.
    Member(String),
}

/// The kind of the files with the records of tasks.
pub const RECORDS: &str = "task";

impl Task {
    /// Keeps the task from here on, for the next serving process.
    ///
    /// # Errors
    /// A record cannot be written. Others may be there ([`forget`](Self::forget)).
    pub fn keep_in(&self, keep: &RestartStore) -> io::Result<()> {
        let message = self.message.as_ref().and_then(|file| file.try_clone().ok());
        if let (Some(holder), Some(file)) = (&keep.holder, message) {
            let spare = holder.put(name("message", &[&self.id]), file.into());
            *self.kept.message.lock().unwrap_or_else(PoisonError::into_inner) = Some(spare);
        }
        // Set once: when the task is made.
        let _ = self.kept.store.set(keep.store.clone());
        for copy in &*self.copies.lock().unwrap_or_else(PoisonError::into_inner) {
            keep.store.try_put_json(&copy.file(&self.id), copy)?;
        }
        self.kept.network.keep_in(keep, &self.id);
        self.init.keep_in(keep, &self.id)?;
        // Last: what has no task is removed.
        keep.store.try_put_json(&name(RECORDS, &[&self.id]), &self.record())
    }

    /// Writes what the next serving process is to know of the task itself.
    pub fn keep(&self) {
        if let Some(store) = self.kept.store.get() {
            store.put_json(&name(RECORDS, &[&self.id]), &self.record());
        }
    }

    fn record(&self) -> Record {
        let kind = match &self.kind {
            TaskKind::Alone => KindRecord::Alone,
            TaskKind::Pod { network, empty_dirs, sandbox } => {
                let volumes = serde_json::to_value(&**empty_dirs).unwrap_or_default();
                KindRecord::Pod(network.clone(), volumes, sandbox.clone())
            }
            TaskKind::Member(pod) => KindRecord::Member(pod.id.clone()),
        };
        Record {
            id: self.id.clone(),
            bundle: self.bundle.clone(),
            name: self.name.clone(),
            kind,
            paused: self.paused.load(Ordering::Relaxed),
            private: self.private.clone(),
            snapshot: self.snapshot.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            copied: self.copied,
        }
    }

    /// Writes the copies that the container has of files of the host.
    pub fn keep_copies(&self, copies: &[Copy]) {
        if let Some(store) = self.kept.store.get() {
            copies.iter().for_each(|copy| store.put_json(&copy.file(&self.id), copy));
        }
    }

    /// Removes what was kept of the task.
    pub fn forget(&self) {
        let Some(store) = self.kept.store.get() else { return };
        // The task first: what has none is removed by the next process.
        store.remove(&name(RECORDS, &[&self.id]));
        let copies = store.names(&Copy::files(&self.id));
        copies.iter().for_each(|file| store.remove(file));
        self.execs().values().chain([&self.init]).for_each(|process| process.forget());
        self.kept.message.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.kept.network.clear(store, &self.id);
    }
}
