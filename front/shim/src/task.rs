//! A task: a container in a sandbox of its own or in a pod, with its processes, or a pod's sandbox,
//! which has none.

mod record;

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use slipway_sandbox_api::{stop, v1};
use tonic::{Code, Status};

use crate::containerd as cd;
use crate::copies::Copy;
use crate::daemon::{Daemon, failure, is_lost};
use crate::empty_dirs::Volumes;
use crate::events::{Event, Events};
use crate::process::{DELIVERY, Phase, Process, ProcessExit};
use crate::ttrpc::Failure;

pub use record::{KindRecord, RECORDS, Record, TaskFiles};

/// The number of SIGKILL.
pub const SIGKILL: u32 = 9;
/// The exit status of a process that SIGKILL ended.
pub const KILLED: u32 = 128 + SIGKILL;
/// The longest time that a container may take to end after SIGKILL; then its microVM is ended, or
/// its pod is told to end it.
const PATIENCE: Duration = Duration::from_secs(5);
/// The time between the stop signal for a pod's containers and SIGKILL, seconds, if the pod is not
/// killed at once.
const GRACE_S: u32 = 10;
/// The signals on which a pod's sandbox stops, as the process does that stands for it elsewhere:
/// SIGINT and SIGTERM.
const STOPS: [u32; 2] = [2, 15];
/// The longest time that the daemon may take to say which process a sandbox's VMM is.
pub const ANSWER: Duration = Duration::from_secs(5);
/// The longest time that a later question for that process may take: containerd waits 2 s for the
/// state of a task.
const LATER_ANSWER: Duration = Duration::from_secs(1);
/// The time between two attempts to reach a daemon.
const AGAIN: Duration = Duration::from_millis(200);
/// The file with the resolver's configuration, of containers and of the host.
pub const RESOLVER: &str = "/etc/resolv.conf";

/// A task.
pub struct Task {
    /// The container's id.
    pub id: String,
    /// The bundle's directory.
    pub bundle: PathBuf,
    /// The name by which the daemon knows it: the sandbox's, or the pod's and the container's.
    pub name: String,
    /// Its place.
    pub kind: TaskKind,
    /// The daemon.
    pub daemon: Daemon,
    /// containerd's events.
    pub events: Arc<Events>,
    /// The container's first process.
    pub init: Arc<Process>,
    /// Its further processes, by their ids.
    pub execs: Mutex<HashMap<String, Arc<Process>>>,
    /// The process of its sandbox's VMM; 0 as long as none is known, and for a container of a pod.
    pub vmm: AtomicU32,
    /// Set while its processes are stopped where they are.
    pub paused: AtomicBool,
    /// The name of the image that is this container's alone, if there is one.
    pub private: Option<String>,
    /// The files of the host that it has copies of, until it runs.
    pub copies: Mutex<Vec<Copy>>,
    /// The memory that its copies took of its guest when it was made, bytes.
    pub copied: usize,
    /// The name of the snapshot with which its sandbox begins, until that is removed.
    pub snapshot: Mutex<Option<String>>,
    /// The host's file for its termination message, if it can have one.
    pub message: Option<File>,
    /// The task's record for the next serving process.
    pub kept: TaskFiles,
    /// Locked while it is being deleted.
    pub deleting: tokio::sync::Mutex<()>,
}

/// The place of a task.
pub enum TaskKind {
    /// A container with a sandbox of its own.
    Alone,
    /// A pod's sandbox.
    Pod {
        /// The path of the network namespace that was made for it; empty if there is none.
        network: String,
        /// Its `emptyDir` volumes.
        empty_dirs: Arc<Volumes>,
        /// Set if containerd made it by its Sandbox API.
        sandbox: Option<Sandbox>,
    },
    /// A container of a pod.
    Member(Arc<Task>),
}

/// The part of a pod that containerd's Sandbox API leaves to the shim, and that containerd has for
/// a pause container.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sandbox {
    /// The time of its creation.
    pub created_at: cd::Timestamp,
    /// The content of [`RESOLVER`] in its containers.
    pub resolver: Vec<u8>,
}

impl Sandbox {
    /// Adds the pod's [`RESOLVER`] to the files of a container, unless the container has another
    /// one.
    pub fn add_resolver(&self, files: &mut Vec<v1::File>) {
        if files.iter().any(|file| file.path == RESOLVER) {
            return;
        }
        let (path, content) = (RESOLVER.to_owned(), self.resolver.clone());
        files.push(v1::File { path, content, mode: 0o644, ..v1::File::default() });
    }
}

impl Task {
    /// Returns the process that stands for the task on the host: the VMM of its sandbox, with which
    /// the task ends. Before the VMM runs, it is the shim. A container's own processes have numbers
    /// in their guest only.
    pub fn pid(&self) -> u32 {
        if let TaskKind::Member(pod) = &self.kind {
            return pod.pid();
        }
        match self.vmm.load(Ordering::Relaxed) {
            0 => std::process::id(),
            vmm => vmm,
        }
    }

    /// Returns the process that stands for the task, as [`pid`](Self::pid) does. Asks the daemon
    /// once more if it did not say which process that is when the sandbox started.
    pub async fn known_pid(&self) -> u32 {
        let owner: &Task = match &self.kind {
            TaskKind::Member(pod) => pod,
            TaskKind::Alone | TaskKind::Pod { .. } => self,
        };
        let is_unknown = owner.vmm.load(Ordering::Relaxed) == 0;
        if is_unknown && owner.init.phase() == Phase::Running {
            owner.learn_pid(LATER_ANSWER).await;
        }
        self.pid()
    }

    /// Asks the daemon for the process of the sandbox's VMM. Without an answer within `patience`
    /// the shim stands for the task.
    pub async fn learn_pid(&self, patience: Duration) {
        if matches!(self.kind, TaskKind::Member(_)) {
            return;
        }
        let asked = async {
            let mut client = self.daemon.connect().await.ok()?;
            let reply = client.inspect(v1::Name { name: self.name.clone() }).await.ok()?;
            reply.into_inner().sandbox
        };
        if let Ok(Some(sandbox)) = tokio::time::timeout(patience, asked).await {
            self.vmm.store(sandbox.vmm_pid, Ordering::Relaxed);
        }
    }

    /// Returns whether it is a pod's sandbox.
    pub fn is_pod(&self) -> bool {
        matches!(self.kind, TaskKind::Pod { .. })
    }

    /// Returns the part of a pod that containerd's Sandbox API leaves to the shim, if the task is a
    /// pod that was made by it.
    pub fn sandbox(&self) -> Option<&Sandbox> {
        match &self.kind {
            TaskKind::Pod { sandbox, .. } => sandbox.as_ref(),
            TaskKind::Alone | TaskKind::Member(_) => None,
        }
    }

    /// Returns the end of the pod that the container is in, once the pod has ended. A task that is
    /// in no pod waits for ever.
    pub async fn pod_ended(&self) -> ProcessExit {
        match &self.kind {
            TaskKind::Member(pod) => pod.init.ended().await,
            TaskKind::Alone | TaskKind::Pod { .. } => std::future::pending().await,
        }
    }

    /// Returns the further processes.
    pub fn execs(&self) -> std::sync::MutexGuard<'_, HashMap<String, Arc<Process>>> {
        // Single insertions and removals: the map is valid after any panic.
        self.execs.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Finds a process by its id; the empty id stands for the first one.
    ///
    /// # Errors
    /// [`Code::NotFound`].
    pub fn process(&self, exec_id: &str) -> Result<Arc<Process>, Failure> {
        if exec_id.is_empty() {
            return Ok(Arc::clone(&self.init));
        }
        self.execs().get(exec_id).cloned().ok_or_else(|| {
            Failure::new(Code::NotFound, format!("no process {exec_id} in container {}", self.id))
        })
    }

    /// Notes that a process runs now.
    pub fn running(&self, process: &Process) {
        if !process.step(&Phase::Starting, Phase::Running) {
            return;
        }
        let (container_id, pid) = (self.id.clone(), self.pid());
        self.events.publish(&if process.is_init() {
            Event::Start(cd::TaskStart { container_id, pid })
        } else {
            let exec_id = process.exec_id.clone();
            Event::ExecStarted(cd::TaskExecStarted { container_id, exec_id, pid })
        });
    }

    /// Notes that a process has ended, once.
    pub fn finish(&self, process: &Process, end: ProcessExit) {
        let exit = cd::TaskExit {
            container_id: self.id.clone(),
            id: if process.is_init() { self.id.clone() } else { process.exec_id.clone() },
            pid: self.pid(),
            exit_status: end.status,
            exited_at: Some(end.at),
        };
        if !end.reason.is_empty() {
            crate::log::warn(&format!("{} {}: {}", self.id, process.exec_id, end.reason));
        }
        let out_of_memory = end.out_of_memory;
        // The events are queued before anybody who waits for the process goes on.
        process.stop(end, |before| {
            if *before != Phase::Starting {
                // containerd takes the reason of an exit from the event before it.
                if out_of_memory {
                    let container_id = self.id.clone();
                    self.events.publish(&Event::OutOfMemory(cd::TaskOom { container_id }));
                }
                self.events.publish(&Event::Exit(exit));
            }
        });
    }

    /// Writes the container's termination message to the host's file for it. An end without a
    /// message leaves the file as it is.
    pub async fn tell(&self, process: &Process, message: &str) {
        let Some(file) = self.message.as_ref().filter(|_| process.is_init()) else { return };
        let (Ok(file), false) = (file.try_clone(), message.is_empty()) else { return };
        let message = message.to_owned();
        let written = tokio::task::spawn_blocking(move || write_over(&file, &message));
        // A file system that does not answer keeps nobody from hearing of the end.
        match tokio::time::timeout(DELIVERY, written).await {
            Ok(Ok(Ok(()))) => {}
            failed => crate::log::warn(&format!("{}: its message is lost: {failed:?}", self.id)),
        }
    }

    /// Sends a signal to a process.
    ///
    /// # Errors
    /// The process does not run, or the daemon refuses.
    pub async fn kill(self: &Arc<Self>, process: &Process, signal: u32) -> Result<(), Failure> {
        if signal == SIGKILL {
            process.killed.store(true, Ordering::Relaxed);
            process.keep();
            process.held.release_outputs();
        }
        match process.phase() {
            Phase::Stopped(_) => Err(Failure::new(Code::NotFound, "the process has ended")),
            Phase::Created if signal == SIGKILL => {
                self.finish(process, ProcessExit::now(KILLED, ""));
                Ok(())
            }
            Phase::Starting if signal == SIGKILL => {
                // A sandbox that does not exist yet is ended by the session once it exists.
                if process.is_init() {
                    self.stop(0);
                }
                Ok(())
            }
            Phase::Created | Phase::Starting => {
                Err(Failure::new(Code::FailedPrecondition, "the process does not run yet"))
            }
            Phase::Running if self.is_pod() => {
                self.signal_pod(signal);
                Ok(())
            }
            Phase::Running if process.is_init() => self.signal(signal).await,
            Phase::Running => process.signal(signal).await,
        }
    }

    /// Stops a pod on a signal that stops one. There is no process that could take another.
    fn signal_pod(self: &Arc<Self>, signal: u32) {
        if signal == SIGKILL {
            self.stop(0);
        } else if STOPS.contains(&signal) {
            self.stop(GRACE_S);
        }
    }

    /// Sends a signal to the container's first process. SIGKILL ends the microVM if the container
    /// does not end.
    async fn signal(self: &Arc<Self>, signal: u32) -> Result<(), Failure> {
        let request = v1::SignalRequest { name: self.name.clone(), signal };
        let sent = async {
            let mut client = self.daemon.connect().await?;
            client.signal(request).await.map_err(|status| failure(&status))
        };
        let sent = tokio::time::timeout(DELIVERY, sent).await;
        if signal == SIGKILL {
            let task = Arc::clone(self);
            tokio::spawn(async move {
                if tokio::time::timeout(PATIENCE, task.init.ended()).await.is_err() {
                    task.stop(0);
                }
            });
            return Ok(());
        }
        match sent {
            Ok(sent) => sent.map(drop),
            Err(_) => Err(Failure::new(Code::DeadlineExceeded, "the guest took no signal")),
        }
    }

    /// Stops the container or the pod in a task of its own: the stop signal, and after `timeout_s`
    /// seconds SIGKILL. Without a daemon, the next one is waited for.
    pub fn stop(self: &Arc<Self>, timeout_s: u32) {
        self.init.note_stop(timeout_s);
        let task = Arc::clone(self);
        tokio::spawn(async move {
            while !matches!(task.init.phase(), Phase::Stopped(_)) {
                if task.stop_by_daemon(timeout_s).await {
                    return;
                }
                tokio::time::sleep(AGAIN).await;
            }
        });
    }

    /// Has the daemon stop the container or the pod. Returns whether a daemon took care of that,
    /// or refused: there is no such sandbox yet, or none any more.
    async fn stop_by_daemon(self: &Arc<Self>, timeout_s: u32) -> bool {
        let Ok(mut client) = self.daemon.connect().await else { return false };
        let request = v1::StopRequest { name: self.name.clone(), timeout_s };
        let stopped = client.stop(request);
        let TaskKind::Member(pod) = &self.kind else {
            return !matches!(stopped.await, Err(status) if is_lost(&status));
        };
        let patience = stop::longest(Duration::from_secs(timeout_s.into()));
        let why = match tokio::time::timeout(patience, stopped).await {
            Ok(Ok(_)) => return true,
            Ok(Err(status)) if is_lost(&status) => return false,
            Ok(Err(status)) if status.code() == Code::NotFound => return true,
            Ok(Err(status)) => refusal(&status),
            Err(_) => format!(
                "the daemon has not answered for {} s: the guest does not answer, or the pod's \
                 memory goes to a file",
                patience.as_secs()
            ),
        };
        // A guest that ends no process cannot be asked to stop the others either. One whose memory
        // is in a file, or goes there, cannot be asked at all, and kubelet never has it come back.
        crate::log::warn(&format!("{}: its pod is ended: {why}", self.id));
        pod.stop(0);
        true
    }
}

/// Returns why the daemon did not end a container of a pod. It sends no signal to one whose pod's
/// memory is in a file, and says so with a code of its own.
fn refusal(status: &Status) -> String {
    let message = status.message();
    match status.code() {
        Code::FailedPrecondition => format!("no SIGKILL was sent: {message}"),
        _ => format!("SIGKILL failed: {message}"),
    }
}

/// Replaces the content of a file, whose offset may be that of a serving process before, which was
/// killed once it had written.
fn write_over(file: &File, content: &str) -> std::io::Result<()> {
    file.set_len(0)?;
    file.write_all_at(content.as_bytes(), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_is_written_once_more_begins_at_the_files_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("message");
        let file = File::create(&path).unwrap();
        // As a serving process that is killed may leave it.
        std::io::Write::write_all(&mut &file, b"said").unwrap();
        write_over(&file, "again").unwrap();
        write_over(&file, "said").unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap(), "said");
    }

    #[test]
    fn a_pod_is_said_to_end_for_want_of_an_end_or_of_a_signal() {
        let silent = refusal(&Status::internal("pod/one does not end"));
        assert_eq!(silent, "SIGKILL failed: pod/one does not end");
        let in_file = refusal(&Status::failed_precondition("its memory is in a file"));
        assert_eq!(in_file, "no SIGKILL was sent: its memory is in a file");
    }
}
