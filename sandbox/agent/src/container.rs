//! Containers and their processes.
//!
//! [`Container::create`] finds the container's block devices and describes its first process
//! (`plan`), makes what the container has in the guest beside processes (`holdings`), makes its
//! cgroup, and sets up the process, which waits to be started. A container that is there executes
//! further processes ([`Container::exec`]), takes files ([`Container::put_files`]), and is killed
//! and removed as one. `agent` holds containers by id and answers the host's requests with them.

mod holdings;
mod plan;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use slipway_agent_protocol::v1::{
    CreateContainerRequest, ExecRequest, ProcessSpec, PutFilesRequest, RejoinRequest, Resources,
};
use tonic::Status;

use self::holdings::Holdings;
use self::plan::{Plan, utf8};
use crate::cgroup::{Cgroup, Hierarchy};
use crate::file_dirs;
use crate::init::InitSpec;
use crate::log;
use crate::message::Message;
use crate::process::{Failure, Process};
use crate::reaper::Reaper;
use crate::sockets::Files;
use crate::table::{Refused, Reservation, Table};
use crate::{copies, rejoin, stdio};

/// The longest wait for other files that are being put into a container. The daemon waits for 30 s.
const COPYING: Duration = Duration::from_secs(20);

/// The time within which a killed process is gone, unless it hangs in a device.
const KILL: Duration = Duration::from_secs(10);

/// The time after which an exec ends that was not started. The daemon starts each as soon as it is
/// set up, or gives it up: it waits 30 s for each of both.
const LEFT: Duration = Duration::from_secs(120);
/// The number of ended execs at which those are dropped whose status was told. Until then, it can
/// be requested again.
const KEPT_EXECS: usize = 64;
/// The number of ended execs at which all of them are dropped. A daemon has at most 48 at once, so
/// nobody asks for most of these.
const MOST_ENDED: usize = 2 * KEPT_EXECS;

/// The paths of the agent's parts in the machine.
pub struct AgentPaths {
    /// The program of a process's first stage, which is this program.
    pub program: PathBuf,
    /// An existing directory on which containers build their roots, each in its own namespace.
    pub base: PathBuf,
    /// The path of sysfs.
    pub sysfs: PathBuf,
    /// The paths of the socket engine's files.
    pub sockets: Files,
    /// The directory on which the directories are mounted that containers share by name.
    pub empty_dirs: PathBuf,
    /// The directory of the mount points of containers' directories for the host's files.
    pub file_dirs: PathBuf,
    /// The cgroups; `None` if the kernel has no cgroup2.
    pub hierarchy: Option<Hierarchy>,
}

impl AgentPaths {
    /// Returns whether the kernel supports device policies. Without one, CAP_MKNOD would open every
    /// device, so containers do not get CAP_MKNOD.
    fn restricts_devices(&self) -> bool {
        self.hierarchy.as_ref().is_some_and(Hierarchy::restricts_devices)
    }
}

/// A created container.
pub struct Container {
    /// The container's first process.
    pub main: Arc<Process>,
    /// The container's cgroup; `None` if the kernel has no cgroup2.
    pub cgroup: Option<Cgroup>,
    /// Set if the container's sockets are devices.
    sockets: bool,
    /// The files, directories and huge pages that it has in the guest.
    holdings: Holdings,
    /// Held while files are put into the container or it is renamed: two requests would write the
    /// same files.
    copying: tokio::sync::Mutex<()>,
    /// The other processes, by exec id.
    execs: Table<Process>,
    /// The state of the container's zygote. Held while the zygote is started or forked.
    pub zygote: tokio::sync::Mutex<ZygoteState>,
    /// Set once the container was removed. Held while it is being removed: the second of two
    /// requests must not remove the cgroup of a container that has the same id by then.
    removed: tokio::sync::Mutex<bool>,
}

/// The state of a container's zygote, the process whose forks serve requests
/// ([`crate::zygote`] has its life).
#[derive(Default)]
pub enum ZygoteState {
    /// No request has asked for the zygote yet.
    #[default]
    NotStarted,
    /// The zygote has stopped itself, and can be forked.
    Ready {
        /// The zygote.
        zygote: Arc<Process>,
        /// The command, environment and rights that a request for a fork must have.
        key: Box<ExecRequest>,
    },
    /// The container's program cannot be forked, for this reason. No later request tries again.
    Refused(String),
}

impl Container {
    /// Builds the container with the kernel settings `sysctls` of its IPC namespace. Its first
    /// process waits for [`Process::start`]. The container shares the PID namespace of
    /// `processes_of`, or has one of its own.
    ///
    /// # Errors
    /// [`Failure`] of the first step that failed. Nothing of the container is left then.
    pub async fn create(
        places: &AgentPaths,
        reaper: &Arc<Reaper>,
        sysctls: BTreeMap<String, String>,
        mut request: CreateContainerRequest,
        processes_of: Option<Pid>,
    ) -> Result<Container, Failure> {
        let devices = plan::find_devices(places, &request).await?;
        let holdings = Holdings::make(places, &mut request).await?;
        let (id, limits) = (request.id.clone(), request.resources.unwrap_or_default());
        let memory_node = request.memory_node;
        let plan = Plan { request, devices, sysctls, processes_of };
        let mut spec = plan.spec(places, &holdings)?;
        // Last, since it has to be removed if the container cannot be created.
        let cgroup = make_cgroup(places, &id, &limits, spec.privileged)?;
        spec.cgroup = cgroup_path(cgroup.as_ref());
        let prepared = prepare(places, reaper, &spec, cgroup.as_ref().zip(memory_node)).await;
        let main = match prepared {
            Ok(main) => Arc::new(main),
            Err(failure) => {
                discard(cgroup).await;
                return Err(failure);
            }
        };
        let container = Container {
            main,
            cgroup,
            sockets: spec.sockets,
            holdings,
            copying: tokio::sync::Mutex::default(),
            execs: Table::default(),
            zygote: tokio::sync::Mutex::default(),
            removed: tokio::sync::Mutex::default(),
        };
        if let Err(error) = container.restrict_devices(places, &spec) {
            container.kill().await;
            discard(container.cgroup).await;
            return Err(anyhow!(error).context("restricting devices").into());
        }
        Ok(container)
    }

    /// Restricts the processes of a container that is not privileged to the devices of `spec`, if
    /// the kernel can do so. The first process has been prepared: it had to open those of its root.
    fn restrict_devices(&self, places: &AgentPaths, spec: &InitSpec) -> std::io::Result<()> {
        match (&self.cgroup, &spec.container) {
            (Some(cgroup), Some(container)) if !spec.privileged && places.restricts_devices() => {
                cgroup.restrict_devices(&container.volumes)
            }
            _ => Ok(()),
        }
    }

    /// Sets up another process, which waits for [`Process::start`].
    pub async fn exec(
        &self,
        places: &AgentPaths,
        reaper: &Arc<Reaper>,
        request: ExecRequest,
    ) -> Result<Process, Failure> {
        let spec = self.further(places, request)?;
        Process::prepare(&places.program, reaper, &spec).await
    }

    /// Returns the description of a further process of this container, for [`Process::prepare`].
    ///
    /// # Errors
    /// The container does not run.
    pub fn further(&self, places: &AgentPaths, request: ExecRequest) -> Result<InitSpec> {
        if !self.main.is_alive() {
            bail!("the container is not running");
        }
        Ok(InitSpec {
            process: Some(request.spec.context("no process given")?),
            privileged: request.privileged,
            drop_mknod: !places.restricts_devices(),
            cgroup: cgroup_path(self.cgroup.as_ref()),
            join: self.main.pid().as_raw_nonzero().get(),
            sockets: self.sockets,
            without_streams: request.detach,
            ..InitSpec::default()
        })
    }

    /// Puts files into the container's directories for them and its root, and removes others.
    pub async fn put_files(&self, request: PutFilesRequest) -> Result<()> {
        let (_copying, process) = self.begin_copying().await?;
        let (parts, rest) = self.holdings.file_dirs.divide(request);
        let put = file_dirs::put(parts).await;
        let replaced = match file_dirs::is_empty(&rest) {
            true => Ok(()),
            false => copies::replace(process, rest).await,
        };
        put.and(replaced)
    }

    /// Waits until no other files are put into the container. Returns a guard that keeps it so, and
    /// a pidfd of the first process.
    async fn begin_copying(&self) -> Result<(tokio::sync::MutexGuard<'_, ()>, OwnedFd)> {
        // A request that a hung file system of the guest's holds up is not waited for forever.
        let Ok(copying) = tokio::time::timeout(COPYING, self.copying.lock()).await else {
            bail!("other files are being put into the container");
        };
        // Before anything is waited for: the number of a process that has ended may be another's.
        Ok((copying, self.first_process()?))
    }

    /// Returns a pidfd of the first process.
    ///
    /// # Errors
    /// The container does not run.
    pub fn first_process(&self) -> Result<OwnedFd> {
        if !self.main.is_alive() {
            bail!("the container is not running");
        }
        Ok(pidfd_open(self.main.pid(), PidfdFlags::empty())?)
    }

    /// Gives the container the host name and the names of another sandbox.
    pub async fn rename(&self, request: &RejoinRequest) -> Result<()> {
        let (_copying, process) = self.begin_copying().await?;
        rejoin::rename(process, request.clone(), self.holdings.files.clone()).await
    }

    /// Drops the state that is shared with a host that is gone: output which that host has not
    /// recorded, input, and the streams of execs, whose processes go on without any. Returns the
    /// position of the next output of the first process.
    pub async fn forget_host(&self) -> Result<u64, Status> {
        let stopped = self.cgroup.as_ref().is_some_and(|cgroup| {
            // A container that has gone on already writes for the present host.
            cgroup.is_frozen().unwrap_or(false)
        });
        let position = stdio::forget(&self.main, stopped).await?;
        for (id, exec) in self.execs.take() {
            if stdio::abandon(&exec).await.is_err() {
                log!("the streams of {id} are in use");
            }
        }
        Ok(position)
    }

    /// Returns the process with this exec id, or the first process for "". Returns `None` if there
    /// is none.
    pub fn process(&self, exec_id: &str) -> Option<Arc<Process>> {
        match exec_id {
            "" => Some(self.main.clone()),
            id => self.execs.get(id).ok(),
        }
    }

    /// Reserves an exec id. Ends execs that the host has given up before it started them, and drops
    /// ended execs if there are too many. Several may run at once, so one that has ended is kept
    /// until its own host has the status.
    ///
    /// # Errors
    /// An exec has the id, or is being set up with it.
    pub fn reserve_exec(&self, id: &str) -> Result<Reservation<'_, Process>, Refused> {
        self.execs.all().iter().for_each(|exec| exec.end_if_left(LEFT));
        if self.ended_execs() >= KEPT_EXECS {
            self.execs.retain(|process| process.is_alive() || !process.is_told());
        }
        if self.ended_execs() >= MOST_ENDED {
            self.execs.retain(Process::is_alive);
        }
        self.execs.reserve(id)
    }

    fn ended_execs(&self) -> usize {
        self.execs.all().iter().filter(|process| !process.is_alive()).count()
    }

    /// Returns the container's termination message.
    pub fn message(&self) -> Vec<u8> {
        self.holdings.message.as_ref().map(Message::read).unwrap_or_default()
    }

    /// Sends `signal` to every process.
    pub fn signal_all(&self, signal: u32) -> std::io::Result<()> {
        match &self.cgroup {
            Some(cgroup) => cgroup.signal(signal),
            None => self.main.signal(signal),
        }
    }

    /// Returns the number of processes.
    pub fn processes(&self) -> usize {
        match &self.cgroup {
            Some(cgroup) => cgroup.processes().len(),
            None => usize::from(self.main.is_alive()),
        }
    }

    /// Kills every process. The first process ends only after the others, and with it the PID
    /// namespace, the mount namespace and every mount in it.
    pub async fn kill(&self) {
        if let Err(error) = self.signal_all(libc::SIGKILL as u32) {
            log!("killing a container's processes: {error}");
        }
        let _ = self.main.signal(libc::SIGKILL as u32);
        if tokio::time::timeout(KILL, self.main.ended()).await.is_err() {
            log!("process {} does not end", self.main.pid().as_raw_nonzero());
        }
    }

    /// Kills the remaining processes, removes the cgroup and gives huge pages back, unless another
    /// call has done so.
    pub async fn remove(&self) -> std::io::Result<()> {
        let mut removed = self.removed.lock().await;
        if *removed {
            return Ok(());
        }
        self.kill().await;
        if let Some(cgroup) = &self.cgroup {
            cgroup.remove().await?;
        }
        self.holdings.huge_pages.give_back().await;
        *removed = true;
        Ok(())
    }
}

/// Starts a process that holds a PID namespace, in which it is process 1, until it is killed.
pub async fn hold_processes(places: &AgentPaths, reaper: &Arc<Reaper>) -> Result<Process, Failure> {
    let spec = InitSpec { hold: utf8(&places.base)?, ..InitSpec::default() };
    let holder = Process::prepare(&places.program, reaper, &spec).await?;
    holder.start().await?;
    Ok(holder)
}

/// Makes the cgroup of a container that has these limits. Returns `None` if the kernel has no
/// cgroup2.
fn make_cgroup(
    places: &AgentPaths,
    id: &str,
    limits: &Resources,
    privileged: bool,
) -> Result<Option<Cgroup>> {
    let Some(hierarchy) = &places.hierarchy else { return Ok(None) };
    let cgroup = hierarchy.create(id, limits)?;
    if limits.huge_page_bytes == 0
        && !privileged
        && let Err(error) = cgroup.deny_huge_pages()
    {
        log!("denying huge pages to a container: {error:#}");
    }
    Ok(Some(cgroup))
}

/// Sets up the first process of a container, whose memory comes from a NUMA node if one is given
/// with the cgroup.
async fn prepare(
    places: &AgentPaths,
    reaper: &Arc<Reaper>,
    spec: &InitSpec,
    node: Option<(&Cgroup, u32)>,
) -> Result<Process, Failure> {
    if let Some((cgroup, node)) = node {
        cgroup.keep_to_node(node).await?;
    }
    Process::prepare(&places.program, reaper, spec).await
}

/// Removes the cgroup of a container that could not be created.
async fn discard(cgroup: Option<Cgroup>) {
    if let Some(cgroup) = cgroup {
        let _ = cgroup.kill();
        if let Err(error) = cgroup.remove().await {
            log!("removing a cgroup: {error}");
        }
    }
}

/// Returns the path of a cgroup, or an empty text without one.
fn cgroup_path(cgroup: Option<&Cgroup>) -> String {
    cgroup.map(|cgroup| cgroup.path().display().to_string()).unwrap_or_default()
}

/// Checks the parts of a process's description that can be refused before anything is created.
pub fn check_process(process: &ProcessSpec) -> Result<()> {
    if process.args.first().is_none_or(String::is_empty) {
        bail!("no command given");
    }
    Ok(())
}
