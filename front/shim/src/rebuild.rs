//! The tasks of a shim whose serving process was killed, as the next one finds them in the
//! [`store`](crate::store).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex};

use slipway_sandbox_api::v1::run_in;

use crate::args::Args;
use crate::copies::{Copy, RECORDS as COPIES};
use crate::daemon::Daemon;
use crate::events::Events;
use crate::io::Paths;
use crate::netns::Network;
use crate::process::{self, Phase, Process, ProcessExit};
use crate::session;
use crate::store::{RestartStore, name};
use crate::task::{self, KILLED, KindRecord, Task, TaskFiles, TaskKind};

/// The parts of the shim that a task needs.
struct Rebuilder<'a> {
    keep: &'a RestartStore,
    daemon: &'a Daemon,
    events: &'a Arc<Events>,
    args: &'a Args,
}

/// Returns the tasks that an earlier serving process has left, and goes on with them.
pub fn tasks(
    keep: &RestartStore,
    daemon: &Daemon,
    events: &Arc<Events>,
    args: &Args,
) -> Vec<Arc<Task>> {
    let rebuilder = Rebuilder { keep, daemon, events, args };
    let (pods, others): (Vec<_>, Vec<_>) = rebuilder
        .read::<task::Record>(task::RECORDS)
        .into_iter()
        .partition(|record| matches!(record.kind, KindRecord::Pod(..)));
    let mut processes = HashMap::<String, Vec<process::Record>>::new();
    for record in rebuilder.read::<process::Record>(process::RECORDS) {
        processes.entry(record.task.clone()).or_default().push(record);
    }
    let mut tasks: Vec<Arc<Task>> = Vec::new();
    for record in pods.into_iter().chain(others) {
        let its = processes.remove(&record.id).unwrap_or_default();
        tasks.extend(rebuilder.task(record, its, &tasks).map(Arc::new));
    }
    // Of tasks that were being removed, or created.
    processes.into_values().flatten().for_each(|record| record.forget(keep));
    for file in keep.store.names(COPIES) {
        if !tasks.iter().any(|task| file.starts_with(&Copy::files(&task.id))) {
            keep.store.remove(&file);
        }
    }
    for task in &tasks {
        session::resume(task, &task.init);
        let execs: Vec<_> = task.execs().values().cloned().collect();
        execs.iter().for_each(|process| session::resume(task, process));
    }
    tasks
}

impl Rebuilder<'_> {
    fn read<T: serde::de::DeserializeOwned>(&self, kind: &str) -> Vec<T> {
        let names = self.keep.store.names(&format!("{kind}-"));
        names.iter().filter_map(|name| self.keep.store.get_json(name)).collect()
    }

    /// Makes a task. Returns `None` after removing what is left of it if it has no first process:
    /// its Delete was under way.
    fn task(
        &self,
        record: task::Record,
        processes: Vec<process::Record>,
        before: &[Arc<Task>],
    ) -> Option<Task> {
        let (init, execs) = self.processes(processes);
        let Some(init) = init else {
            self.keep.store.remove(&name(task::RECORDS, &[&record.id]));
            execs.values().for_each(|process| process.forget());
            return None;
        };
        let (kind, events) = self.kind(record.kind, &record.name, before);
        let holder = self.keep.holder.as_ref();
        let message = holder.and_then(|holder| holder.take(&name("message", &[&record.id])));
        let task = Task {
            kind,
            events,
            bundle: record.bundle,
            init,
            execs: Mutex::new(execs),
            paused: AtomicBool::new(record.paused),
            private: record.private,
            copies: Mutex::new(self.copies(&record.id)),
            copied: record.copied,
            snapshot: Mutex::new(record.snapshot),
            message: message.as_ref().and_then(|spare| spare.copy().ok()),
            kept: TaskFiles::left(&self.keep.store, message),
            ..self.plain(record.id, record.name)
        };
        task.kept.network.fill(Network::left(self.keep, &task.id));
        Some(task)
    }

    /// Makes the processes of a task, the first one apart from the others, which have ids.
    fn processes(
        &self,
        records: Vec<process::Record>,
    ) -> (Option<Arc<Process>>, HashMap<String, Arc<Process>>) {
        let (mut init, mut execs) = (None, HashMap::new());
        for record in records {
            let process = Arc::new(Process::left(record, self.keep));
            match process.is_init() {
                true => init = Some(process),
                false => drop(execs.insert(process.exec_id.clone(), process)),
            }
        }
        (init, execs)
    }

    /// Returns the kind of the task `name`, whose pod is among the tasks `before`, and the events
    /// that it tells.
    fn kind(
        &self,
        record: KindRecord,
        name: &str,
        before: &[Arc<Task>],
    ) -> (TaskKind, Arc<Events>) {
        let events = match &record {
            // containerd hears of a sandbox by the answers to its calls.
            KindRecord::Pod(_, _, Some(_)) => Arc::new(Events::new(&self.args.namespace, None)),
            _ => Arc::clone(self.events),
        };
        let kind = match record {
            KindRecord::Alone => TaskKind::Alone,
            KindRecord::Pod(network, volumes, sandbox) => {
                let empty_dirs = Arc::new(serde_json::from_value(volumes).unwrap_or_default());
                TaskKind::Pod { network, empty_dirs, sandbox }
            }
            KindRecord::Member(pod) => {
                let its = before.iter().find(|task| task.id == pod);
                TaskKind::Member(its.map_or_else(|| Arc::new(self.gone(&pod, name)), Arc::clone))
            }
        };
        (kind, events)
    }

    /// Makes a task that has ended: a pod that was deleted before the last of its containers.
    fn gone(&self, pod: &str, member: &str) -> Task {
        let name = member.split('/').next().unwrap_or(member);
        self.plain(pod.to_owned(), name.to_owned())
    }

    /// Makes a container that has ended.
    fn plain(&self, id: String, name: String) -> Task {
        let none = run_in::Kind::StdinClosed(true);
        let init = Process::new(String::new(), Paths::default(), none);
        init.phase.send_replace(Phase::Stopped(ProcessExit::now(KILLED, "")));
        Task {
            id,
            bundle: "/".into(),
            name,
            kind: TaskKind::Alone,
            daemon: self.daemon.clone(),
            events: Arc::clone(self.events),
            init: Arc::new(init),
            execs: Mutex::default(),
            // The daemon is asked for it.
            vmm: AtomicU32::new(0),
            paused: AtomicBool::new(false),
            private: None,
            copies: Mutex::default(),
            copied: 0,
            snapshot: Mutex::default(),
            message: None,
            kept: TaskFiles::default(),
            deleting: tokio::sync::Mutex::default(),
        }
    }

    fn copies(&self, id: &str) -> Vec<Copy> {
        let names = self.keep.store.names(&Copy::files(id));
        names.iter().filter_map(|name| self.keep.store.get_json(name)).collect()
    }
}
