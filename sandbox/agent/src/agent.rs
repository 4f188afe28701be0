//! The agent's state: containers by id, and operations on the whole sandbox.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use anyhow::{Context, anyhow};
use rustix::process::Pid;
use slipway_agent_protocol::v1::{
    ConfigureRequest, CreateContainerRequest, ExecReply, ExecRequest, PrepareRequest, ProcessRef,
    PutFilesRequest, RejoinRequest, StatsReply, UpdateContainerRequest,
};
use tokio::task::JoinSet;
use tonic::Status;

use crate::cgroup::Cgroup;
use crate::container::{AgentPaths, Container, check_process, hold_processes};
use crate::lock::lock;
use crate::process::{Failure, Process};
use crate::reaper::Reaper;
use crate::stages::Stages;
use crate::statuses::{internal, invalid, precondition, refusal, status};
use crate::table::{Missing, Refused, Table};
use crate::zygote::{ContainerContext, PreparedProcess};
use crate::{log, name};

/// The time that containers have to end when the sandbox does. The daemon waits longer for the
/// reply to `Shutdown`: the rest is for writing back data.
const ENDING: Duration = Duration::from_secs(5);

/// The most processes of a container that are listed.
const MOST_PROCESSES: usize = 4096;

/// The function that ends the sandbox after a shutdown was answered.
pub type PowerOff = Box<dyn Fn() + Send + Sync>;

/// The agent.
pub struct Agent {
    pub places: AgentPaths,
    pub stages: Arc<Stages>,
    reaper: Arc<Reaper>,
    power_off: PowerOff,
    /// Set once the socket engine serves.
    sockets: tokio::sync::Mutex<bool>,
    /// The kernel settings of containers' IPC namespaces.
    sysctls: Mutex<BTreeMap<String, String>>,
    /// Containers by id. The id is reserved while a container is being created.
    containers: Table<Container>,
    /// Process 1 of the PID namespace that containers share, once one does.
    holder: tokio::sync::Mutex<Option<Process>>,
}

impl Agent {
    /// Makes an agent. `power_off` is called a moment after a shutdown was answered.
    pub fn new(
        places: AgentPaths,
        stages: Arc<Stages>,
        reaper: Arc<Reaper>,
        power_off: PowerOff,
    ) -> Self {
        let (sockets, containers) = (tokio::sync::Mutex::default(), Table::default());
        let (sysctls, holder) = (Mutex::default(), tokio::sync::Mutex::default());
        Agent { places, stages, reaper, power_off, sockets, sysctls, containers, holder }
    }

    /// Waits until drivers are in place: of NVMe controllers and of network interfaces, as many as
    /// `request` says. A fork of the machine has nothing of that left to do.
    pub async fn prepare(&self, request: &PrepareRequest) -> Result<(), Status> {
        self.stages.modules_loaded().await;
        if request.interfaces > 0 {
            let there = crate::network::await_interfaces(&self.places.sysfs, request.interfaces);
            there.await.map_err(internal)?;
        }
        let ready = crate::nvme::await_ready(&self.places.sysfs, request.nvme_controllers);
        ready.await.map_err(internal)?;
        self.stages.prepare();
        Ok(())
    }

    /// Keeps the settings of the sandbox that its containers get each.
    pub fn configured(&self, request: ConfigureRequest) {
        *lock(&self.sysctls) = crate::sysctl::of_ipc(request.sysctls);
    }

    /// Creates a container. After an error, the id is free again. A container whose sandbox ends
    /// meanwhile is removed.
    pub async fn create(&self, request: CreateContainerRequest) -> Result<(), Status> {
        name::check(&request.id).map_err(invalid)?;
        let process = request.process.as_ref().context("no process given").map_err(invalid)?;
        check_process(process).map_err(invalid)?;
        let id = request.id.clone();
        let reserved = self.containers.reserve(&id);
        let reserved = reserved.map_err(|refused| refusal(refused, "container", &id))?;
        self.stages.modules_loaded().await;
        let container = self.build(request).await.map_err(|failure| status(&failure))?;
        if let Err(container) = reserved.fill(Arc::new(container)) {
            end(&id, &container).await;
            return Err(refusal(Refused::Closed, "container", &id));
        }
        Ok(())
    }

    /// Configures the network interface once it exists. Returns its name.
    pub async fn network(
        &self,
        wanted: crate::network::InterfaceSettings,
    ) -> Result<String, Status> {
        self.stages.network_begins();
        self.stages.modules_loaded().await;
        let interface = crate::network::configure(wanted).await;
        let interface = interface.map_err(internal)?;
        self.stages.network_ends();
        Ok(interface)
    }

    async fn build(&self, request: CreateContainerRequest) -> Result<Container, Failure> {
        let processes_of = match request.processes_of.as_str() {
            _ if !request.in_pod => None,
            "" if !request.shares_processes => None,
            "" => Some(self.shared_processes().await?),
            target => Some(self.processes_of(target)?),
        };
        let sysctls = lock(&self.sysctls).clone();
        Container::create(&self.places, &self.reaper, sysctls, request, processes_of).await
    }

    /// Returns process 1 of the PID namespace that containers share. Starts it for the first one.
    async fn shared_processes(&self) -> Result<Pid, Failure> {
        let mut holder = self.holder.lock().await;
        match &*holder {
            Some(process) if process.is_alive() => Ok(process.pid()),
            _ => {
                let process = hold_processes(&self.places, &self.reaper).await?;
                Ok(holder.insert(process).pid())
            }
        }
    }

    /// Returns the first process of the container `target`, whose PID namespace another one is to
    /// share.
    fn processes_of(&self, target: &str) -> Result<Pid, Failure> {
        let main = self.containers.get(target).map(|container| Arc::clone(&container.main));
        match main {
            Ok(main) if main.is_alive() => Ok(main.pid()),
            _ => {
                let why = format!("container {target} does not run: its processes are not shared");
                Err(anyhow!(why).into())
            }
        }
    }

    /// Starts the socket engine, unless it was started before.
    pub async fn start_sockets(&self) -> Result<(), Status> {
        let mut serves = self.sockets.lock().await;
        if *serves {
            return Ok(());
        }
        self.stages.modules_loaded().await;
        crate::machine::load_sockets_modules();
        let started = crate::sockets::start(&self.places.sockets, &self.reaper).await;
        *serves = started.is_ok();
        started.map_err(precondition)
    }

    /// Runs a container's first process.
    pub async fn start(&self, id: &str) -> Result<u32, Status> {
        let container = self.container(id)?;
        if !container.main.start().await.map_err(|failure| status(&failure))? {
            return Err(Status::failed_precondition(format!("container {id} was started before")));
        }
        Ok(pid(&container.main))
    }

    /// Kills and removes a container. Waits for one that is being created: the host that asked for
    /// it may be gone, and the next one removes what it does not know to be there. After an error,
    /// the container keeps its id, so that it can be removed later.
    pub async fn remove(&self, id: &str) -> Result<(), Status> {
        let container = self.containers.settled(id).await.ok_or_else(|| unknown(id))?;
        let removed = container.remove().await;
        removed.map_err(|error| {
            internal(anyhow!(error).context(format!("removing container {id}")))
        })?;
        self.containers.remove_if_same(id, &container);
        Ok(())
    }

    /// Sets up another process in a container, or only its zygote. A detached one begins, if the
    /// host's `call` still waits for it. Returns its process id.
    pub async fn exec(&self, request: ExecRequest, call: &Weak<()>) -> Result<ExecReply, Status> {
        let process = request.process.clone().unwrap_or_default();
        let container = self.container(&process.container_id)?;
        name::check(&process.exec_id).map_err(invalid)?;
        let spec = request.spec.as_ref().context("no process given").map_err(invalid)?;
        check_process(spec).map_err(invalid)?;
        if request.zygote.is_some() && spec.terminal {
            return Err(Status::invalid_argument("a fork has no terminal"));
        }
        let detached = request.detach;
        if detached && (spec.terminal || spec.stdin || request.zygote.is_some()) {
            let why = "a detached process has no streams and no zygote";
            return Err(Status::invalid_argument(why));
        }
        let (places, reaper) = (&self.places, &self.reaper);
        let context = ContainerContext { container: &container, places, reaper };
        if let Some(asked) = request.zygote.as_ref().filter(|asked| asked.prepare) {
            let refused = context.ensure_zygote(&request, asked).await.unwrap_or_default();
            return Ok(ExecReply { refused, ..ExecReply::default() });
        }
        let reserved = container.reserve_exec(&process.exec_id);
        let reserved = reserved.map_err(|refused| refusal(refused, "exec", &process.exec_id))?;
        let prepared = context.prepare_process(request).await;
        let prepared = prepared.map_err(|failure| status(&failure))?;
        let PreparedProcess { process: exec, forked, not_forked } = prepared;
        let reply = ExecReply { pid: pid(&exec), forked, refused: not_forked };
        let begins = Arc::clone(&exec);
        if let Err(exec) = reserved.fill(exec) {
            let _ = exec.signal(libc::SIGKILL as u32);
            return Err(refusal(Refused::Closed, "exec", &process.exec_id));
        }
        if detached {
            begins.start_detached(call).await.map_err(|failure| status(&failure))?;
        }
        Ok(reply)
    }

    /// Returns the container `id`. Fails while the container is being created.
    pub fn container(&self, id: &str) -> Result<Arc<Container>, Status> {
        self.containers.get(id).map_err(|missing| match missing {
            Missing::Reserved => Status::unavailable(format!("container {id} is being made")),
            Missing::Unknown => unknown(id),
        })
    }

    /// Returns the process that `reference` names.
    pub fn process(&self, reference: &ProcessRef) -> Result<Arc<Process>, Status> {
        let container = self.container(&reference.container_id)?;
        container.process(&reference.exec_id).ok_or_else(|| {
            Status::not_found(format!(
                "no exec {:?} in container {}",
                reference.exec_id, reference.container_id
            ))
        })
    }

    /// Changes the limits of a container.
    pub fn update(&self, request: &UpdateContainerRequest) -> Result<(), Status> {
        let container = self.container(&request.id)?;
        let cgroup = cgroup_of(&container)?;
        let limited = cgroup.limit(&request.resources.unwrap_or_default());
        limited.map_err(precondition)
    }

    /// Stops all processes of a container where they are, or has them go on.
    pub async fn freeze(&self, id: &str, frozen: bool) -> Result<(), Status> {
        let container = self.container(id)?;
        let cgroup = cgroup_of(&container)?;
        let stopped = cgroup.freeze(frozen).await;
        let what = if frozen { "stop" } else { "go on" };
        stopped
            .map_err(|error| precondition(anyhow!(error).context(format!("{id} does not {what}"))))
    }

    /// Has a container of a machine that was saved go on as that of another sandbox. Returns the
    /// position of the next output of its first process.
    pub async fn rejoin(&self, request: RejoinRequest) -> Result<u64, Status> {
        let container = self.container(&request.id)?;
        container.rename(&request).await.map_err(precondition)?;
        let position = container.forget_host().await?;
        if !request.frozen && container.cgroup.is_some() {
            self.freeze(&request.id, false).await?;
        }
        Ok(position)
    }

    /// Puts files into a container that runs, and removes others.
    pub async fn put_files(&self, request: PutFilesRequest) -> Result<(), Status> {
        let put = self.container(&request.id)?.put_files(request).await;
        put.map_err(precondition)
    }

    /// Returns statistics of a container, or of the sandbox for "".
    pub fn stats(&self, id: &str) -> Result<StatsReply, Status> {
        if id.is_empty() {
            return Ok(self.all_stats());
        }
        let container = self.container(id)?;
        let cgroup = cgroup_of(&container)?;
        Ok(crate::stats::of_container(cgroup))
    }

    /// Returns the processes of a container, at most [`MOST_PROCESSES`].
    pub fn processes(&self, id: &str) -> Result<Vec<u32>, Status> {
        let container = self.container(id)?;
        let pids = cgroup_of(&container)?.processes().into_iter();
        Ok(pids.filter_map(|pid| u32::try_from(pid).ok()).take(MOST_PROCESSES).collect())
    }

    fn all_stats(&self) -> StatsReply {
        let containers = self.containers.all();
        let processes: usize = containers.iter().map(|container| container.processes()).sum();
        StatsReply { processes: processes as u32, ..crate::stats::collect(&self.places.sysfs) }
    }

    /// Ends all containers, which unmounts their file systems, and writes back all data. A process
    /// that hangs does not keep the data of others from being written back before the daemon gives
    /// up: all data is written back at once, while the containers end, and again when they have.
    /// No container is created any more; [`Agent::create`] removes one that is being created.
    pub async fn shutdown(&self) {
        let all = self.containers.close();
        tokio::task::spawn_blocking(rustix::fs::sync);
        let mut ending = JoinSet::new();
        for (id, container) in all {
            ending.spawn(async move { end(&id, &container).await });
        }
        let ended = async { while ending.join_next().await.is_some() {} };
        if tokio::time::timeout(ENDING, ended).await.is_err() {
            log!("{} containers do not end", ending.len());
        }
        let _ = tokio::task::spawn_blocking(rustix::fs::sync).await;
    }

    /// Ends the sandbox.
    pub fn power_off(&self) {
        (self.power_off)();
    }
}

/// Removes a container of a sandbox that ends. Logs an error.
async fn end(id: &str, container: &Container) {
    if let Err(error) = container.remove().await {
        log!("removing container {id}: {error}");
    }
}

fn unknown(id: &str) -> Status {
    Status::not_found(format!("no container {id:?}"))
}

fn pid(process: &Process) -> u32 {
    process.pid().as_raw_nonzero().get().unsigned_abs()
}

/// Returns a container's control group, which there is where the kernel has cgroup2.
fn cgroup_of(container: &Container) -> Result<&Cgroup, Status> {
    let cgroup = container.cgroup.as_ref();
    cgroup.ok_or_else(|| Status::unavailable("the kernel has no cgroup2"))
}
