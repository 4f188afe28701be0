//! The tasks of a shim, by their containers' ids.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use tonic::Code;

use crate::store::Store;
use crate::task::{Task, TaskKind};
use crate::ttrpc::Failure;

/// The file in the store that is there while the shim is to end with its last task.
const ENDS: &str = "ends";
/// The most tasks of a shim: more than Kubernetes has in a pod, or on a node.
const MOST: usize = 1024;

/// The tasks of a shim.
#[derive(Default)]
pub struct Tasks(Mutex<Table>);

#[derive(Default)]
struct Table {
    slots: HashMap<String, Slot>,
    /// Set if the shim is to end with its last task.
    ends: bool,
    store: Store,
}

impl Table {
    fn set_ends(&mut self, ends: bool) {
        match ends {
            _ if ends == self.ends => {}
            true => self.store.put(ENDS, b""),
            false => self.store.remove(ENDS),
        }
        self.ends = ends;
    }
}

enum Slot {
    /// A Create is at work.
    Taken,
    Full(Arc<Task>),
}

/// The place of a task that is being created. It is free again on drop.
pub struct Reservation<'a> {
    tasks: &'a Tasks,
    id: &'a str,
}

impl Tasks {
    /// Makes the table of a shim whose next serving process finds in `store` whether the shim is to
    /// end with its last task.
    pub fn kept(store: Store) -> Self {
        Self(Mutex::new(Table { store, ..Table::default() }))
    }

    /// Puts the tasks that an earlier serving process had into the empty table.
    pub fn fill(&self, tasks: &[Arc<Task>]) {
        let mut table = self.table();
        let slots = tasks.iter().map(|task| (task.id.clone(), Slot::Full(Arc::clone(task))));
        table.slots.extend(slots);
        table.ends = table.store.get(ENDS).is_some();
    }

    /// Takes the place of a new task.
    ///
    /// # Errors
    /// [`Code::AlreadyExists`], or [`Code::ResourceExhausted`].
    pub fn reserve<'a>(&'a self, id: &'a str) -> Result<Reservation<'a>, Failure> {
        let mut table = self.table();
        if table.slots.contains_key(id) {
            let message = format!("container {id} exists already");
            return Err(Failure::new(Code::AlreadyExists, message));
        }
        if table.slots.len() >= MOST {
            let message = format!("the shim has {MOST} containers already");
            return Err(Failure::new(Code::ResourceExhausted, message));
        }
        table.slots.insert(id.to_owned(), Slot::Taken);
        table.set_ends(false);
        Ok(Reservation { tasks: self, id })
    }

    /// Finds a task.
    ///
    /// # Errors
    /// [`Code::NotFound`].
    pub fn find(&self, id: &str) -> Result<Arc<Task>, Failure> {
        match self.table().slots.get(id) {
            Some(Slot::Full(task)) => Ok(Arc::clone(task)),
            _ => Err(Failure::new(Code::NotFound, format!("no container {id}"))),
        }
    }

    /// Returns the memory that copies of the host's files take of the guest of a pod, by the name
    /// that the daemon knows the pod by, bytes.
    pub fn copied(&self, pod: &str) -> usize {
        let of_pod = |slot: &Slot| match slot {
            Slot::Full(task) if matches!(&task.kind, TaskKind::Member(its) if its.name == pod) => {
                task.copied
            }
            _ => 0,
        };
        self.table().slots.values().map(of_pod).sum()
    }

    /// Removes a task. Returns whether the shim is to end now.
    pub fn remove(&self, id: &str) -> bool {
        let mut table = self.table();
        table.slots.remove(id);
        table.ends && table.slots.is_empty()
    }

    /// Notes that the shim is to end. Returns whether it is to end now. containerd asks after each
    /// container that it deletes, and from version 2.0 on only after a pod's sandbox, whose
    /// containers may be deleted later: so a shim without a pod ends with its last task.
    pub fn shut_down(&self) -> bool {
        let mut table = self.table();
        let is_pod = |slot: &Slot| matches!(slot, Slot::Full(task) if task.is_pod());
        let ends = !table.slots.values().any(is_pod);
        table.set_ends(ends);
        table.slots.is_empty()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Single insertions and removals: the table is valid after any panic.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Reservation<'_> {
    /// Puts the task into its place.
    pub fn fill(self, task: Arc<Task>) {
        self.tasks.table().slots.insert(self.id.to_owned(), Slot::Full(task));
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let mut table = self.tasks.table();
        if matches!(table.slots.get(self.id), Some(Slot::Taken)) {
            table.slots.remove(self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use slipway_sandbox_api::v1::{self, run_in};

    use super::*;
    use crate::daemon::Daemon;
    use crate::events::Events;
    use crate::io::Paths;
    use crate::process::Process;

    fn task(id: &str, kind: TaskKind) -> Arc<Task> {
        let first = run_in::Kind::Run(v1::RunSpec::default());
        Arc::new(Task {
            id: id.to_owned(),
            bundle: "/".into(),
            name: id.to_owned(),
            kind,
            daemon: Daemon::at(Path::new("/no/such/directory")),
            events: Arc::new(Events::new("ns", None)),
            init: Arc::new(Process::new(String::new(), Paths::default(), first)),
            execs: Mutex::default(),
            vmm: Default::default(),
            paused: Default::default(),
            private: None,
            copies: Mutex::default(),
            copied: 1,
            snapshot: Default::default(),
            message: None,
            kept: Default::default(),
            deleting: Default::default(),
        })
    }

    #[tokio::test]
    async fn a_place_is_taken_once_and_free_after_a_failure() {
        let tasks = Tasks::default();
        let place = tasks.reserve("one").unwrap();
        let code = |failed: Failure| failed.code;
        assert_eq!(tasks.reserve("one").map(drop).map_err(code), Err(Code::AlreadyExists));
        assert_eq!(tasks.find("one").map(drop).map_err(code), Err(Code::NotFound));
        drop(place);
        tasks.reserve("one").unwrap().fill(task("one", TaskKind::Alone));
        tasks.reserve("two").unwrap().fill(task("two", TaskKind::Alone));
        assert_eq!(tasks.find("two").unwrap().id, "two");
        assert_eq!(tasks.reserve("two").map(drop).map_err(code), Err(Code::AlreadyExists));
        let names: Vec<_> = (2..=MOST).map(|one| one.to_string()).collect();
        let places: Vec<_> = names.iter().filter_map(|name| tasks.reserve(name).ok()).collect();
        assert_eq!(places.len(), MOST - 2);
        assert_eq!(tasks.reserve("more").map(drop).map_err(code), Err(Code::ResourceExhausted));
    }

    #[tokio::test]
    async fn a_shim_with_a_pod_outlives_its_containers_and_ends_with_its_last_task() {
        let tasks = Tasks::default();
        let pod = task(
            "pod",
            TaskKind::Pod { network: String::new(), sandbox: None, empty_dirs: Arc::default() },
        );
        tasks.reserve("pod").unwrap().fill(Arc::clone(&pod));
        for id in ["one", "two"] {
            tasks.reserve(id).unwrap().fill(task(id, TaskKind::Member(Arc::clone(&pod))));
        }
        assert_eq!(["pod", "one"].map(|pod| tasks.copied(pod)), [2, 0]);
        // containerd 1.6 deletes a container, and asks the shim to end if it can.
        assert!(!tasks.remove("one") && !tasks.shut_down());
        assert!(!tasks.remove("two") && !tasks.shut_down());
        tasks.reserve("two").unwrap().fill(task("two", TaskKind::Member(Arc::clone(&pod))));
        // containerd 2 deletes the pod's sandbox, and may delete a container after that.
        assert!(!tasks.remove("pod") && !tasks.shut_down());
        assert!(tasks.remove("two"));
        assert!(Tasks::default().shut_down());
    }
}
