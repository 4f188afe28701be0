//! containerd's task service, versions 2 and 3, and beside it its sandbox service ([`sandbox`]).

mod again;
mod delete;
mod figures;
mod sandbox;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use prost::Message;
use slipway_sandbox_api::v1::{self, run_in};
use tokio::sync::{Notify, Semaphore};
use tonic::Code;

use crate::args::Args;
use crate::containerd as cd;
use crate::create::TaskMaker;
use crate::daemon::{Daemon, failure};
use crate::events::{Event, Events};
use crate::io::Paths;
use crate::process::{Phase, Process};
use crate::reads::MOST_READS;
use crate::stats::Form;
use crate::store::RestartStore;
use crate::task::{SIGKILL, Task, TaskKind};
use crate::tasks::{Reservation, Tasks};
use crate::ttrpc::Failure;
use crate::ttrpc::server::Handler;
use crate::{checkpoint, hooks, rebuild, session, spec};

/// The service's name.
const SERVICE: &str = "containerd.task.v2.Task";
/// Its name in the later version of the protocol, which has the same messages.
const LATER: &str = "containerd.task.v3.Task";
/// The most further processes of a task at once.
const MOST_EXECS: usize = 256;

/// The least time between the Wait of a client that joins a process and its answer. When its CRI
/// plugin starts, containerd waits for a container before it has entered it into its table, and
/// forgets an exit that comes before that. A container whose output was held back ends just then.
const ENTERED: Duration = Duration::from_secs(1);

/// The service of one shim.
pub struct Service {
    args: Args,
    daemon: Daemon,
    events: Arc<Events>,
    tasks: Tasks,
    /// The records that the next serving process begins with.
    keep: RestartStore,
    /// The places of reads of the host's files for new containers.
    reads: Arc<Semaphore>,
    /// The form of a task's figures.
    form: Form,
    /// Notified when the shim is to end.
    pub end: Notify,
}

fn answer<M: Message>(message: Result<M, Failure>) -> Result<Vec<u8>, Failure> {
    message.map(|message| message.encode_to_vec())
}

fn request<M: Message + Default>(payload: &[u8]) -> Result<M, Failure> {
    M::decode(payload).map_err(|error| Failure::new(Code::InvalidArgument, error.to_string()))
}

impl Handler for Service {
    async fn call(
        self: Arc<Self>,
        service: String,
        method: String,
        payload: Vec<u8>,
    ) -> Result<Vec<u8>, Failure> {
        let is_sandbox = service == sandbox::SERVICE;
        if !is_sandbox && service != SERVICE && service != LATER {
            let message = format!("no service {service}: this shim serves {SERVICE}");
            return Err(Failure::new(Code::Unimplemented, message));
        }
        // A wait ends with its connection. The others are carried out also if containerd leaves.
        if method == "Wait" && !is_sandbox {
            return answer(self.wait(request(&payload)?).await);
        }
        if method == "WaitSandbox" && is_sandbox {
            return answer(self.wait_sandbox(&request(&payload)?).await);
        }
        let call = tokio::spawn(async move {
            match is_sandbox {
                true => self.change_sandbox(&method, &payload).await,
                false => self.change(&method, &payload).await,
            }
        });
        call.await.map_err(|error| Failure::new(Code::Internal, error.to_string()))?
    }

    async fn repeat(
        self: Arc<Self>,
        service: String,
        method: String,
        payload: Vec<u8>,
    ) -> Result<Vec<u8>, Failure> {
        if !again::CHANGES.contains(&method.as_str()) {
            return self.call(service, method, payload).await;
        }
        let call = tokio::spawn(async move { self.answer_again(&method, &payload).await });
        call.await.map_err(|error| Failure::new(Code::Internal, error.to_string()))?
    }
}

impl Service {
    /// Makes the service, whose next serving process finds it in `keep`.
    pub fn new(args: Args, events: Events, keep: RestartStore) -> Self {
        let daemon = Daemon::from_environment();
        let (events, tasks) = (Arc::new(events), Tasks::kept(keep.store.clone()));
        let reads = Arc::new(Semaphore::new(MOST_READS));
        let form = Form::of_host();
        Self { args, daemon, events, tasks, keep, reads, form, end: Notify::new() }
    }

    /// Goes on with what an earlier serving process has left.
    pub fn resume(&self) {
        self.tasks.fill(&rebuild::tasks(&self.keep, &self.daemon, &self.events, &self.args));
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
            "State" => answer(self.state(request(payload)?).await),
            "Kill" => answer(self.kill(request(payload)?).await),
            "Pids" => answer(self.pids(request(payload)?).await),
            "CloseIO" => answer(self.close_io(&request(payload)?)),
            "Update" => answer(self.update(request(payload)?).await),
            "Stats" => answer(self.stats(&request(payload)?).await),
            "Connect" => answer(Ok(self.connect(request(payload)?).await)),
            "Shutdown" => answer(Ok(self.shutdown())),
            "Pause" => answer(self.set_paused(request(payload)?, true).await),
            "Resume" => answer(self.set_paused(request(payload)?, false).await),
            "Checkpoint" => answer(self.checkpoint(request(payload)?).await),
            _ => Err(Failure::new(Code::Unimplemented, format!("no method {method}"))),
        }
    }

    async fn create(
        &self,
        request: cd::CreateTaskRequest,
    ) -> Result<cd::CreateTaskResponse, Failure> {
        let place = self.tasks.reserve(&request.id)?;
        let made = self.task_maker().make_task(&request).await;
        if made.is_err() {
            // containerd asks for no deletion of a container of a pod that was refused.
            self.remove_made(Path::new(&request.bundle)).await;
        }
        let task = made?;
        let pid = task.pid();
        self.enter(place, task).await?;
        self.events.publish(&Event::Create(cd::TaskCreate {
            container_id: request.id.clone(),
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

    /// Returns what makes tasks.
    fn task_maker(&self) -> TaskMaker<'_> {
        let Self { args, daemon, events, tasks, reads, .. } = self;
        TaskMaker { args, daemon, events, tasks, reads, holder: self.keep.holder.as_ref() }
    }

    /// Puts a new task into its place.
    ///
    /// # Errors
    /// It cannot be recorded. What was made of it is removed.
    async fn enter(&self, place: Reservation<'_>, task: Task) -> Result<(), Failure> {
        if let Err(error) = task.keep_in(&self.keep) {
            task.forget();
            self.remove_made(&task.bundle).await;
            hooks::ended(&task.id, &task.bundle, self.keep.holder.as_ref()).await;
            return Err(Failure::unrecorded(&format!("the container {}", task.id), &error));
        }
        if let TaskKind::Member(pod) = &task.kind {
            // It may have decided on volumes of the pod's.
            pod.keep();
        }
        place.fill(Arc::new(task));
        Ok(())
    }

    async fn start(&self, request: cd::ProcessRequest) -> Result<cd::StartResponse, Failure> {
        let task = self.tasks.find(&request.id)?;
        let process = task.process(&request.exec_id)?;
        session::start(&task, &process).await?;
        if process.is_init() {
            hooks::started(&task, self.keep.holder.as_ref()).await;
        }
        Ok(cd::StartResponse { pid: task.pid() })
    }

    fn exec(&self, request: cd::ExecProcessRequest) -> Result<cd::Empty, Failure> {
        let task = self.tasks.find(&request.id)?;
        if task.is_pod() {
            let message = "a pod's sandbox has no processes: name one of its containers";
            return Err(Failure::new(Code::FailedPrecondition, message));
        }
        let json = request.spec.map(|spec| spec.value).unwrap_or_default();
        let mut exec = spec::exec_spec(&json).map_err(Failure::invalid)?;
        exec.name = task.name.clone();
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
        if let Err(error) = process.keep_in(&self.keep, &task.id) {
            process.forget();
            return Err(Failure::unrecorded(&format!("the process {exec_id}"), &error));
        }
        execs.insert(exec_id.clone(), Arc::new(process));
        drop(execs);
        let container_id = task.id.clone();
        self.events.publish(&Event::ExecAdded(cd::TaskExecAdded { container_id, exec_id }));
        Ok(cd::Empty {})
    }

    fn resize(&self, request: &cd::ResizePtyRequest) -> Result<cd::Empty, Failure> {
        let process = self.tasks.find(&request.id)?.process(&request.exec_id)?;
        let size = v1::Size { rows: request.height, columns: request.width };
        process.resize(size);
        Ok(cd::Empty {})
    }

    async fn state(&self, request: cd::ProcessRequest) -> Result<cd::StateResponse, Failure> {
        let task = self.tasks.find(&request.id)?;
        let process = task.process(&request.exec_id)?;
        let pid = task.known_pid().await;
        let (status, end) = match process.phase() {
            Phase::Created | Phase::Starting => (cd::Status::Created, None),
            Phase::Running if task.paused.load(Ordering::Relaxed) => (cd::Status::Paused, None),
            Phase::Running => (cd::Status::Running, None),
            Phase::Stopped(end) => (cd::Status::Stopped, Some(end)),
        };
        let Paths { stdin, stdout, stderr, terminal } = process.paths.clone();
        Ok(cd::StateResponse {
            id: if process.is_init() { task.id.clone() } else { process.exec_id.clone() },
            bundle: task.bundle.to_string_lossy().into_owned(),
            pid,
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
        let task = self.tasks.find(&request.id)?;
        let process = task.process(&request.exec_id)?;
        task.kill(&process, request.signal).await?;
        Ok(cd::Empty {})
    }

    /// Stops the processes of a task where they are, or has them go on.
    async fn set_paused(
        &self,
        request: cd::ProcessRequest,
        paused: bool,
    ) -> Result<cd::Empty, Failure> {
        let task = self.tasks.find(&request.id)?;
        let (name, container_id) = (v1::Name { name: task.name.clone() }, task.id.clone());
        let mut client = self.daemon.connect().await?;
        let (done, event) = match paused {
            true => {
                (client.pause(name).await.map(drop), Event::Paused(cd::TaskPaused { container_id }))
            }
            false => {
                let resumed = client.resume(name).await.map(drop);
                (resumed, Event::Resumed(cd::TaskResumed { container_id }))
            }
        };
        done.map_err(|status| failure(&status))?;
        task.paused.store(paused, Ordering::Relaxed);
        task.keep();
        self.events.publish(&event);
        Ok(cd::Empty {})
    }

    /// Saves a container in a directory, and ends it if that is asked for.
    async fn checkpoint(&self, request: cd::CheckpointTaskRequest) -> Result<cd::Empty, Failure> {
        let task = self.tasks.find(&request.id)?;
        let exits = checkpoint::exits(request.options.as_ref()).map_err(Failure::invalid)?;
        checkpoint::save(&task, &request.path).await?;
        let (container_id, checkpoint) = (task.id.clone(), request.path);
        let event = cd::TaskCheckpointed { container_id, checkpoint };
        self.events.publish(&Event::Checkpointed(event));
        if exits && !matches!(task.init.phase(), Phase::Stopped(_)) {
            task.kill(&task.init, SIGKILL).await?;
        }
        Ok(cd::Empty {})
    }

    fn close_io(&self, request: &cd::CloseIoRequest) -> Result<cd::Empty, Failure> {
        let process = self.tasks.find(&request.id)?.process(&request.exec_id)?;
        if request.stdin {
            process.held.close_stdin();
            process.keep();
        }
        Ok(cd::Empty {})
    }

    async fn update(&self, request: cd::UpdateTaskRequest) -> Result<cd::Empty, Failure> {
        let task = self.tasks.find(&request.id)?;
        let json = request.resources.map(|any| any.value).unwrap_or_default();
        let name = task.name.clone();
        let request = match task.kind {
            TaskKind::Member(_) => {
                let update = spec::member_update(&json);
                let (limits, placement) = update.map_err(Failure::invalid)?;
                let resources = Some(limits).filter(|limits| *limits != v1::Resources::default());
                if resources.is_none() && placement.is_none() {
                    return Ok(cd::Empty {});
                }
                v1::UpdateRequest { name, resources, placement, ..Default::default() }
            }
            TaskKind::Alone | TaskKind::Pod { .. } => {
                let update = match task.kind {
                    TaskKind::Pod { .. } => spec::pod_update(&json),
                    _ => spec::update(&json),
                };
                let spec::Update { cpus, memory_bytes, placement, resources } = update?;
                v1::UpdateRequest { name, cpus, memory_bytes, placement, resources }
            }
        };
        let mut client = self.daemon.connect().await?;
        client.update(request).await.map_err(|status| failure(&status))?;
        Ok(cd::Empty {})
    }

    async fn wait(&self, request: cd::ProcessRequest) -> Result<cd::WaitResponse, Failure> {
        let process = self.tasks.find(&request.id)?.process(&request.exec_id)?;
        let entered = tokio::time::Instant::now() + ENTERED;
        let joins = !matches!(process.phase(), Phase::Created | Phase::Starting);
        let end = process.ended().await;
        if joins {
            tokio::time::sleep_until(entered).await;
        }
        Ok(cd::WaitResponse { exit_status: end.status, exited_at: Some(end.at) })
    }

    async fn pids(&self, request: cd::ProcessRequest) -> Result<cd::PidsResponse, Failure> {
        let task = self.tasks.find(&request.id)?;
        let listed = match task.init.phase() {
            Phase::Running if !task.is_pod() => self.guest_pids(&task.name).await?,
            _ => None,
        };
        let pids = match listed {
            Some(pids) => pids,
            None => vec![task.known_pid().await],
        };
        let processes = pids.into_iter().map(|pid| cd::ProcessInfo { pid }).collect();
        Ok(cd::PidsResponse { processes })
    }

    /// Returns the processes of a container that runs, as its guest numbers them, or `None` if the
    /// daemon or the agent in the guest is of an earlier version.
    async fn guest_pids(&self, name: &str) -> Result<Option<Vec<u32>>, Failure> {
        let mut client = self.daemon.connect().await?;
        match client.pids(v1::Name { name: name.to_owned() }).await {
            Ok(reply) => Ok(Some(reply.into_inner().pids)),
            Err(status) if status.code() == Code::Unimplemented => Ok(None),
            Err(status) => Err(failure(&status)),
        }
    }

    async fn connect(&self, request: cd::ProcessRequest) -> cd::ConnectResponse {
        let task_pid = match self.tasks.find(&request.id) {
            Ok(task) => task.known_pid().await,
            Err(_) => 0,
        };
        cd::ConnectResponse { shim_pid: std::process::id(), task_pid, version: String::new() }
    }

    fn shutdown(&self) -> cd::Empty {
        if self.tasks.shut_down() {
            self.end.notify_one();
        }
        cd::Empty {}
    }
}

#[cfg(test)]
#[path = "tests/service.rs"]
mod tests;

#[cfg(test)]
#[path = "tests/again.rs"]
mod killed;

#[cfg(test)]
#[path = "tests/fake.rs"]
pub(crate) mod fake;

#[cfg(test)]
#[path = "tests/calls.rs"]
mod calls;

#[cfg(test)]
#[path = "tests/checkpoint.rs"]
mod checkpoints;

#[cfg(test)]
#[path = "tests/pods.rs"]
mod pods;

#[cfg(test)]
#[path = "tests/sandbox.rs"]
mod sandboxes;
