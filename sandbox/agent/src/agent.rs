//! The agent's state: containers by id, and operations on the whole sandbox.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use rustix::process::Pid;
use slipway_agent_protocol::EXIT_STATUS_METADATA;
use slipway_agent_protocol::v1::{
    ConfigureRequest, CreateContainerRequest, ExecRequest, PrepareRequest, ProcessRef,
    PutFilesRequest, StatsReply, UpdateContainerRequest,
};
use tokio::task::JoinSet;
use tonic::{Code, Status};

use crate::cgroup::Cgroup;
use crate::container::{Container, Places, check_name, check_process, hold_processes};
use crate::log;
use crate::process::{Failure, Process};
use crate::reaper::Reaper;
use crate::stages::Stages;

/// The time that containers have to end when the sandbox does: half of the time that the daemon
/// waits for the reply to `Shutdown`. The other half is for writing back data.
const ENDING: Duration = Duration::from_secs(5);

/// The function that ends the sandbox after a shutdown was answered.
pub type PowerOff = Box<dyn Fn() + Send + Sync>;

/// The agent.
pub struct Agent {
    pub places: Places,
    pub stages: Arc<Stages>,
    reaper: Arc<Reaper>,
    power_off: PowerOff,
    /// Set once the socket engine was started.
    sockets: AtomicBool,
    /// The kernel settings of containers' IPC namespaces.
    sysctls: Mutex<BTreeMap<String, String>>,
    /// Containers by id; `None` while a container is being created.
    containers: Mutex<HashMap<String, Option<Arc<Container>>>>,
    /// Process 1 of the PID namespace that containers share, once one does.
    holder: tokio::sync::Mutex<Option<Process>>,
}

impl Agent {
    /// Makes an agent. `power_off` is called a moment after a shutdown was answered.
    pub fn new(
        places: Places,
        stages: Arc<Stages>,
        reaper: Arc<Reaper>,
        power_off: PowerOff,
    ) -> Self {
        let (sockets, containers) = (AtomicBool::new(false), Mutex::default());
        let (sysctls, holder) = (Mutex::default(), tokio::sync::Mutex::default());
        Agent { places, stages, reaper, power_off, sockets, sysctls, containers, holder }
    }

    /// Waits until drivers are in place: of NVMe controllers and of network interfaces, as many as
    /// `request` says. A fork of the machine has nothing of that left to do.
    pub async fn prepare(&self, request: &PrepareRequest) -> Result<(), Status> {
        self.stages.modules_loaded().await;
        let failed = |error: anyhow::Error| Status::internal(format!("{error:#}"));
        if request.interfaces > 0 {
            let there = crate::network::await_interfaces(&self.places.sysfs, request.interfaces);
            there.await.map_err(failed)?;
        }
        let ready = crate::nvme::await_ready(&self.places.sysfs, request.nvme_controllers);
        ready.await.map_err(failed)?;
        self.stages.prepare();
        Ok(())
    }

    /// Keeps the settings of the sandbox that its containers get each.
    pub fn configured(&self, request: ConfigureRequest) {
        *lock(&self.sysctls) = crate::sysctl::of_ipc(request.sysctls);
    }

    /// Creates a container. After an error, the id is free again.
    pub async fn create(&self, request: CreateContainerRequest) -> Result<(), Status> {
        check_name(&request.id).map_err(invalid)?;
        let process = request.process.as_ref().context("no process given").map_err(invalid)?;
        check_process(process).map_err(invalid)?;
        let id = request.id.clone();
        match self.containers().entry(id.clone()) {
            Entry::Occupied(_) => {
                return Err(Status::already_exists(format!("container {id} exists")));
            }
            Entry::Vacant(entry) => {
                entry.insert(None);
            }
        }
        self.stages.modules_loaded().await;
        let created = self.build(request).await;
        let mut containers = self.containers();
        match created {
            Ok(container) => {
                containers.insert(id, Some(Arc::new(container)));
                Ok(())
            }
            Err(failure) => {
                containers.remove(&id);
                Err(status(&failure))
            }
        }
    }

    /// Configures the network interface once it exists. Returns its name.
    pub async fn network(&self, wanted: crate::network::Wanted) -> Result<String, Status> {
        self.stages.network_begins();
        self.stages.modules_loaded().await;
        let interface = crate::network::configure(wanted).await;
        let interface = interface.map_err(|error| Status::internal(format!("{error:#}")))?;
        self.stages.network_ends();
        Ok(interface)
    }

    async fn build(&self, request: CreateContainerRequest) -> Result<Container, Failure> {
        let shares = request.in_pod && request.shares_processes;
        let processes_of = if shares { Some(self.shared_processes().await?) } else { None };
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

    /// Starts the socket engine.
    pub async fn start_sockets(&self) -> Result<(), Status> {
        if self.sockets.swap(true, Ordering::Relaxed) {
            return Err(Status::already_exists("the socket engine was started before"));
        }
        self.stages.modules_loaded().await;
        crate::machine::load_sockets_modules();
        let started = crate::sockets::start(&self.places.sockets, &self.reaper).await;
        started.map_err(|error| {
            self.sockets.store(false, Ordering::Relaxed);
            Status::failed_precondition(format!("{error:#}"))
        })
    }

    /// Runs a container's first process.
    pub async fn start(&self, id: &str) -> Result<u32, Status> {
        let container = self.container(id)?;
        if !container.main.start().await.map_err(|failure| status(&failure))? {
            return Err(Status::failed_precondition(format!("container {id} was started before")));
        }
        Ok(pid(&container.main))
    }

    /// Kills and removes a container.
    pub async fn remove(&self, id: &str) -> Result<(), Status> {
        let container = self.container(id)?;
        let removed = container.remove().await;
        self.containers().remove(id);
        removed.map_err(|error| Status::internal(format!("removing container {id}: {error}")))
    }

    /// Sets up another process in a container. Returns its process id.
    pub async fn exec(&self, request: ExecRequest) -> Result<u32, Status> {
        let process = request.process.clone().unwrap_or_default();
        let container = self.container(&process.container_id)?;
        check_name(&process.exec_id).map_err(invalid)?;
        let spec = request.spec.as_ref().context("no process given").map_err(invalid)?;
        check_process(spec).map_err(invalid)?;
        if container.has_exec(&process.exec_id) {
            return Err(Status::already_exists(format!("exec {} exists", process.exec_id)));
        }
        let exec = container.exec(&self.places, &self.reaper, request).await;
        let exec = Arc::new(exec.map_err(|failure| status(&failure))?);
        let pid = pid(&exec);
        container.add_exec(process.exec_id, exec);
        Ok(pid)
    }

    /// Returns the container `id`. Fails while the container is being created.
    pub fn container(&self, id: &str) -> Result<Arc<Container>, Status> {
        match self.containers().get(id) {
            Some(Some(container)) => Ok(container.clone()),
            Some(None) => Err(Status::unavailable(format!("container {id} is being made"))),
            None => Err(Status::not_found(format!("no container {id:?}"))),
        }
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
        limited.map_err(|error| Status::failed_precondition(format!("{error:#}")))
    }

    /// Stops all processes of a container where they are, or has them go on.
    pub async fn freeze(&self, id: &str, frozen: bool) -> Result<(), Status> {
        let container = self.container(id)?;
        let cgroup = cgroup_of(&container)?;
        let stopped = cgroup.freeze(frozen).await;
        let what = if frozen { "stop" } else { "go on" };
        stopped
            .map_err(|error| Status::failed_precondition(format!("{id} does not {what}: {error}")))
    }

    /// Puts files into a container that runs, and removes others.
    pub async fn put_files(&self, request: PutFilesRequest) -> Result<(), Status> {
        let put = self.container(&request.id)?.put_files(request).await;
        put.map_err(|error| Status::failed_precondition(format!("{error:#}")))
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

    fn all_stats(&self) -> StatsReply {
        let containers = self.containers();
        let processes = containers.values().flatten().map(|container| container.processes()).sum();
        let processes: usize = processes;
        StatsReply { processes: processes as u32, ..crate::stats::collect(&self.places.sysfs) }
    }

    /// Ends all containers, which unmounts their file systems, and writes back all data. A process
    /// that hangs does not keep the data of others from being written back before the daemon gives
    /// up: all data is written back at once, while the containers end, and again when they have.
    pub async fn shutdown(&self) {
        let all: Vec<_> = self.containers().drain().collect();
        tokio::task::spawn_blocking(rustix::fs::sync);
        let mut ending = JoinSet::new();
        for (id, container) in all {
            let Some(container) = container else { continue };
            ending.spawn(async move {
                if let Err(error) = container.remove().await {
                    log!("removing container {id}: {error}");
                }
            });
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

    fn containers(&self) -> MutexGuard<'_, HashMap<String, Option<Arc<Container>>>> {
        lock(&self.containers)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn pid(process: &Process) -> u32 {
    process.pid().as_raw_nonzero().get().unsigned_abs()
}

fn invalid(error: anyhow::Error) -> Status {
    Status::invalid_argument(format!("{error:#}"))
}

/// Returns a container's control group, which there is where the kernel has cgroup2.
fn cgroup_of(container: &Container) -> Result<&Cgroup, Status> {
    let cgroup = container.cgroup.as_ref();
    cgroup.ok_or_else(|| Status::unavailable("the kernel has no cgroup2"))
}

/// Converts a failure to a gRPC status. A failure of the program itself carries
/// [`EXIT_STATUS_METADATA`].
pub fn status(failure: &Failure) -> Status {
    let code = match failure.exit_status {
        crate::init::NOT_FOUND => Code::NotFound,
        0 => Code::FailedPrecondition,
        _ => Code::PermissionDenied,
    };
    let mut status = Status::new(code, failure.message.clone());
    if failure.exit_status != 0 {
        let value = tonic::metadata::MetadataValue::from(failure.exit_status);
        status.metadata_mut().insert(EXIT_STATUS_METADATA, value);
    }
    status
}
