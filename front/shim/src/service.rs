//! containerd's task service, version 2.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use prost::Message;
use slipway_sandbox_api::v1::{self, run_in};
use tokio::sync::Notify;
use tonic::Code;

use crate::args::Args;
use crate::containerd as cd;
use crate::daemon::{Daemon, failure};
use crate::events::{Event, Events};
use crate::io::Paths;
use crate::process::{End, Phase, Process};
use crate::spec::{self, Oci};
use crate::task::Task;
use crate::ttrpc::Failure;
use crate::ttrpc::server::Handler;
use crate::{names, rootfs, session, stats};

/// The service's name.
const SERVICE: &str = "containerd.task.v2.Task";
/// The most further processes of a task at once.
const MOST_EXECS: usize = 256;
/// The longest time that a deleted process's output may take to be written.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The service of one shim.
pub struct Service {
    args: Args,
    daemon: Daemon,
    events: Arc<Events>,
    task: Mutex<Slot>,
    /// Notified when the shim is to end.
    pub end: Notify,
}

/// The only task of a shim.
#[derive(Default)]
enum Slot {
    #[default]
    Empty,
    /// A Create is at work.
    Taken,
    Full(Arc<Task>),
}

fn answer<M: Message>(message: Result<M, Failure>) -> Result<Vec<u8>, Failure> {
    message.map(|message| message.encode_to_vec())
}

fn request<M: Message + Default>(payload: &[u8]) -> Result<M, Failure> {
    M::decode(payload).map_err(|error| Failure::new(Code::InvalidArgument, error.to_string()))
}

fn invalid(reason: String) -> Failure {
    Failure::new(Code::InvalidArgument, reason)
}

impl Handler for Service {
    async fn call(
        self: Arc<Self>,
        service: String,
        method: String,
        payload: Vec<u8>,
    ) -> Result<Vec<u8>, Failure> {
        if service != SERVICE {
            let message = format!("no service {service}: this shim serves {SERVICE}");
            return Err(Failure::new(Code::Unimplemented, message));
        }
        // A wait ends with its connection. The others are carried out also if containerd leaves.
        if method == "Wait" {
            return answer(self.wait(request(&payload)?).await);
        }
        let call = tokio::spawn(async move { self.change(&method, &payload).await });
        call.await.map_err(|error| Failure::new(Code::Internal, error.to_string()))?
    }
}

impl Service {
    /// Makes the service.
    pub fn new(args: Args, events: Events) -> Self {
        let daemon = Daemon::from_environment();
        let (events, task) = (Arc::new(events), Mutex::default());
        Self { args, daemon, events, task, end: Notify::new() }
    }

    /// Returns the events.
    pub fn events(&self) -> &Events {
        &self.events
    }

    async fn change(&self, method: &str, payload: &[u8]) -> Result<Vec<u8>, Failure> {
        match method {
            "Create" => answer(self.create(request(payload)?).await),
            "Start" => answer(self.start(request(payload)?).await),
            "Delete" => answer(self.delete(request(payload)?).await),
            "Exec" => answer(self.exec(request(payload)?)),
            "ResizePty" => answer(self.resize(&request(payload)?)),
            "State" => answer(self.state(&request(payload)?)),
            "Kill" => answer(self.kill(request(payload)?).await),
            "Pids" => answer(self.task().map(|_| cd::PidsResponse {
                processes: vec![cd::ProcessInfo { pid: Task::pid() }],
            })),
            "CloseIO" => answer(self.close_io(&request(payload)?)),
            "Update" => answer(self.update(request(payload)?).await),
            "Stats" => answer(self.stats().await),
            "Connect" => answer(Ok(self.connect())),
            "Shutdown" => answer(Ok(self.shutdown(&request(payload)?))),
            "Pause" | "Resume" => Err(Failure::unimplemented("pausing")),
            "Checkpoint" => Err(Failure::unimplemented("checkpoint")),
            _ => Err(Failure::new(Code::Unimplemented, format!("no method {method}"))),
        }
    }

    fn slot(&self) -> std::sync::MutexGuard<'_, Slot> {
        self.task.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn task(&self) -> Result<Arc<Task>, Failure> {
        match &*self.slot() {
            Slot::Full(task) => Ok(Arc::clone(task)),
            _ => Err(Failure::new(Code::NotFound, format!("no container {}", self.args.id))),
        }
    }

    async fn create(
        &self,
        request: cd::CreateTaskRequest,
    ) -> Result<cd::CreateTaskResponse, Failure> {
        {
            let mut slot = self.slot();
            if !matches!(*slot, Slot::Empty) {
                let message = format!("container {} exists already", self.args.id);
                return Err(Failure::new(Code::AlreadyExists, message));
            }
            *slot = Slot::Taken;
        }
        let made = self.make(&request).await;
        let mut slot = self.slot();
        let task = match made {
            Ok(task) => Arc::new(task),
            Err(failed) => {
                *slot = Slot::Empty;
                return Err(failed);
            }
        };
        *slot = Slot::Full(task);
        let pid = Task::pid();
        self.events.publish(&Event::Create(cd::TaskCreate {
            container_id: request.id,
            bundle: request.bundle,
            rootfs: request.rootfs,
            io: Some(cd::TaskIo {
                stdin: request.stdin,
                stdout: request.stdout,
                stderr: request.stderr,
                terminal: request.terminal,
            }),
            checkpoint: request.checkpoint,
            pid,
        }));
        Ok(cd::CreateTaskResponse { pid })
    }

    async fn make(&self, request: &cd::CreateTaskRequest) -> Result<Task, Failure> {
        if request.id != self.args.id {
            let message = format!("this shim is for one container, {}: no pods yet", self.args.id);
            return Err(Failure::new(Code::Unimplemented, message));
        }
        if !request.checkpoint.is_empty() {
            return Err(Failure::unimplemented("restore from a checkpoint"));
        }
        let bundle = PathBuf::from(&request.bundle);
        let oci = Oci::load(&bundle).map_err(invalid)?;
        let paths = Paths {
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
        };
        let sandbox = names::sandbox(&self.args);
        let mut run = spec::run_spec(&oci).map_err(invalid)?;
        run.name = sandbox.clone();
        run.terminal = request.terminal;
        run.stdin = !paths.stdin.is_empty();
        run.labels = spec::labels(&self.args.namespace, &self.args.id);
        let mounts = oci.mounts.clone();
        let files = tokio::task::spawn_blocking(move || spec::files(&mounts));
        run.files = files.await.map_err(|error| error.to_string())?.map_err(invalid)?;
        let root = rootfs::Wanted {
            mounts: &request.rootfs,
            path: oci.root_path(),
            bundle: &bundle,
            owner: &sandbox,
        };
        let root = rootfs::prepare(&self.daemon, &root).await?;
        run.image = root.image.clone();
        run.image_digest = root.digest;
        let init = Process::new(String::new(), paths, run_in::Kind::Run(run));
        Ok(Task {
            id: request.id.clone(),
            bundle,
            sandbox,
            daemon: self.daemon.clone(),
            events: Arc::clone(&self.events),
            init: Arc::new(init),
            execs: Mutex::new(HashMap::new()),
            private: root.is_private.then_some(root.image),
        })
    }

    async fn start(&self, request: cd::ProcessRequest) -> Result<cd::StartResponse, Failure> {
        let task = self.task()?;
        let process = task.process(&request.exec_id)?;
        session::start(&task, &process).await?;
        Ok(cd::StartResponse { pid: Task::pid() })
    }

    async fn delete(&self, request: cd::ProcessRequest) -> Result<cd::DeleteResponse, Failure> {
        let task = self.task()?;
        let process = task.process(&request.exec_id)?;
        let (status, at) = match process.phase() {
            // From here on it cannot be started.
            Phase::Created if process.step(&Phase::Created, Phase::Stopped(End::now(0, ""))) => {
                (0, None)
            }
            Phase::Stopped(end) => (end.status, Some(end.at)),
            _ => {
                let message = "the process runs: kill it first";
                return Err(Failure::new(Code::FailedPrecondition, message));
            }
        };
        process.finish_output(LAST_WORDS).await;
        if process.is_init() {
            self.daemon.remove(&task.sandbox).await?;
            if let Some(private) = &task.private {
                rootfs::remove_private(&self.daemon, private).await?;
            }
            *self.slot() = Slot::Empty;
        } else {
            task.execs().remove(&request.exec_id);
        }
        let pid = Task::pid();
        if process.is_init() {
            self.events.publish(&Event::Delete(cd::TaskDelete {
                container_id: task.id.clone(),
                pid,
                exit_status: status,
                exited_at: at,
                id: String::new(),
            }));
        }
        Ok(cd::DeleteResponse { pid, exit_status: status, exited_at: at })
    }

    fn exec(&self, request: cd::ExecProcessRequest) -> Result<cd::Empty, Failure> {
        let task = self.task()?;
        let json = request.spec.map(|spec| spec.value).unwrap_or_default();
        let mut exec = spec::exec_spec(&json).map_err(invalid)?;
        exec.name = task.sandbox.clone();
        exec.terminal = request.terminal;
        exec.stdin = !request.stdin.is_empty();
        let paths = Paths {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            terminal: request.terminal,
        };
        let exec_id = request.exec_id;
        let mut execs = task.execs();
        if exec_id.is_empty() || execs.contains_key(&exec_id) {
            let message = format!("process {exec_id} exists already");
            return Err(Failure::new(Code::AlreadyExists, message));
        }
        if execs.len() >= MOST_EXECS {
            let message = format!("the container has {MOST_EXECS} further processes already");
            return Err(Failure::new(Code::ResourceExhausted, message));
        }
        let process = Process::new(exec_id.clone(), paths, run_in::Kind::Exec(exec));
        execs.insert(exec_id.clone(), Arc::new(process));
        drop(execs);
        let container_id = task.id.clone();
        self.events.publish(&Event::ExecAdded(cd::TaskExecAdded { container_id, exec_id }));
        Ok(cd::Empty {})
    }

    fn resize(&self, request: &cd::ResizePtyRequest) -> Result<cd::Empty, Failure> {
        let process = self.task()?.process(&request.exec_id)?;
        let size = v1::Size { rows: request.height, columns: request.width };
        process.resize(size);
        Ok(cd::Empty {})
    }

    fn state(&self, request: &cd::ProcessRequest) -> Result<cd::StateResponse, Failure> {
        let task = self.task()?;
        let process = task.process(&request.exec_id)?;
        let (status, end) = match process.phase() {
            Phase::Created | Phase::Starting => (cd::Status::Created, None),
            Phase::Running => (cd::Status::Running, None),
            Phase::Stopped(end) => (cd::Status::Stopped, Some(end)),
        };
        let Paths { stdin, stdout, stderr, terminal } = process.paths.clone();
        Ok(cd::StateResponse {
            id: if process.is_init() { task.id.clone() } else { process.exec_id.clone() },
            bundle: task.bundle.to_string_lossy().into_owned(),
            pid: Task::pid(),
            status: status.into(),
            stdin,
            stdout,
            stderr,
            terminal,
            exit_status: end.as_ref().map_or(0, |end| end.status),
            exited_at: end.map(|end| end.at),
            exec_id: process.exec_id.clone(),
        })
    }

    async fn kill(&self, request: cd::KillRequest) -> Result<cd::Empty, Failure> {
        let task = self.task()?;
        let process = task.process(&request.exec_id)?;
        task.kill(&process, request.signal).await?;
        Ok(cd::Empty {})
    }

    fn close_io(&self, request: &cd::CloseIoRequest) -> Result<cd::Empty, Failure> {
        let process = self.task()?.process(&request.exec_id)?;
        if request.stdin {
            process.held.close_stdin();
        }
        Ok(cd::Empty {})
    }

    async fn update(&self, request: cd::UpdateTaskRequest) -> Result<cd::Empty, Failure> {
        let task = self.task()?;
        let json = request.resources.map(|any| any.value).unwrap_or_default();
        let cpus = spec::update(&json)?;
        let request = v1::UpdateRequest { name: task.sandbox.clone(), cpus, resources: None };
        let mut client = self.daemon.connect().await?;
        client.update(request).await.map_err(|status| failure(&status))?;
        Ok(cd::Empty {})
    }

    async fn wait(&self, request: cd::ProcessRequest) -> Result<cd::WaitResponse, Failure> {
        let process = self.task()?.process(&request.exec_id)?;
        let end = process.ended().await;
        Ok(cd::WaitResponse { exit_status: end.status, exited_at: Some(end.at) })
    }

    async fn stats(&self) -> Result<cd::StatsResponse, Failure> {
        let task = self.task()?;
        let request = v1::Name { name: task.sandbox.clone() };
        let mut client = self.daemon.connect().await?;
        let stats = client.stats(request).await.map_err(|status| failure(&status))?;
        Ok(cd::StatsResponse { stats: Some(stats::metrics(stats.get_ref())) })
    }

    fn connect(&self) -> cd::ConnectResponse {
        let pid = Task::pid();
        cd::ConnectResponse { shim_pid: pid, task_pid: pid, version: String::new() }
    }

    fn shutdown(&self, request: &cd::ShutdownRequest) -> cd::Empty {
        if request.now || matches!(*self.slot(), Slot::Empty) {
            self.end.notify_one();
        }
        cd::Empty {}
    }
}

#[cfg(test)]
#[path = "tests/service.rs"]
mod tests;
