//! Containers and their processes.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rustix::fs::makedev;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use slipway_agent_protocol::v1::{
    BlockDevice, CreateContainerRequest, ExecRequest, ProcessSpec, PutFilesRequest, RejoinRequest,
    Volume,
};
use tonic::Status;

use crate::cgroup::{Cgroup, Hierarchy};
use crate::file_dirs::{self, FileDirs};
use crate::huge_pages::HugePages;
use crate::init::{ContainerSpec, Device, InitSpec, VolumeSpec};
use crate::log;
use crate::message::Message;
use crate::process::{Failure, Process};
use crate::reaper::Reaper;
use crate::shares::{self, Held};
use crate::sockets::Files;
use crate::table::{Refused, Reservation, Table};
use crate::{copies, empty_dirs, machine, name, nvme, pmem, rejoin, stdio};

/// The longest wait for other files that are being put into a container. The daemon waits for 30 s.
const COPYING: Duration = Duration::from_secs(20);

/// The time within which a killed process is gone, unless it hangs in a device.
const KILL: Duration = Duration::from_secs(10);

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
    /// The host's files that the container has.
    _shares: Held,
    /// The container's directories for copies of the host's files.
    file_dirs: FileDirs,
    /// The huge pages that the kernel has for the container's limit.
    huge_pages: HugePages,
    /// The container's termination message.
    message: Option<Message>,
    /// The paths of the files that the host has given the container.
    files: Vec<String>,
    /// Held while files are put into the container: two requests would write the same ones.
    copying: tokio::sync::Mutex<()>,
    /// The other processes, by exec id.
    execs: Table<Process>,
    /// The process of which others are forks.
    pub zygote: tokio::sync::Mutex<Zygote>,
    /// Set once the container was removed. Held while it is being removed: the second of two
    /// requests must not remove the cgroup of a container that has the same id by then.
    removed: tokio::sync::Mutex<bool>,
}

/// The process of a container of which others are forks.
#[derive(Default)]
pub enum Zygote {
    /// It was not asked for.
    #[default]
    Absent,
    /// It has stopped itself. Requests for forks are as this one was.
    Stands(Arc<Process>, Box<ExecRequest>),
    /// The container has none, for this reason.
    Refused(String),
}

impl Container {
    /// Builds the container with the kernel settings `sysctls` of its IPC namespace. Its first
    /// process waits for [`Process::start`]. The container shares the PID namespace of
    /// `processes_of`, or has one of its own.
    pub async fn create(
        places: &AgentPaths,
        reaper: &Arc<Reaper>,
        sysctls: BTreeMap<String, String>,
        mut request: CreateContainerRequest,
        processes_of: Option<Pid>,
    ) -> Result<Container, Failure> {
        let devices = find_devices(places, &request).await?;
        let shares = shares::hold(&request.shares).await?;
        make_empty_dirs(places, &request).await?;
        let message = match request.termination_message_path.as_str() {
            "" => None,
            _ => Some(Message::make(&request.id)?),
        };
        let (id, limits) = (request.id.clone(), request.resources.unwrap_or_default());
        let memory_node = request.memory_node;
        let huge_pages = HugePages::add(&places.sysfs, limits.huge_page_bytes).await?;
        let files = request.files.iter().map(|file| file.path.clone()).collect();
        let file_dirs = FileDirs::make(&places.file_dirs, &request.file_dirs).await?;
        request.files = file_dirs.fill(std::mem::take(&mut request.files)).await?;
        let plan = Plan { request, devices, sysctls, processes_of, message: message.as_ref() };
        let mut spec = plan.spec(places, &file_dirs)?;
        // Last, since it has to be removed if the container cannot be created.
        let cgroup = places.hierarchy.as_ref();
        let cgroup = cgroup.map(|hierarchy| hierarchy.create(&id, &limits)).transpose()?;
        if let Some(cgroup) = cgroup.as_ref()
            && limits.huge_page_bytes == 0
            && !spec.privileged
            && let Err(error) = cgroup.deny_huge_pages()
        {
            log!("{error:#}");
        }
        spec.cgroup = cgroup_path(cgroup.as_ref());
        let prepared = async {
            if let (Some(cgroup), Some(node)) = (&cgroup, memory_node) {
                cgroup.keep_to_node(node).await?;
            }
            Process::prepare(&places.program, reaper, &spec).await
        }
        .await;
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
            _shares: shares,
            file_dirs,
            huge_pages,
            message,
            files,
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

    /// Returns the description of another process for it.
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
            ..InitSpec::default()
        })
    }

    /// Puts files into the container's directories for them and its root, and removes others.
    pub async fn put_files(&self, request: PutFilesRequest) -> Result<()> {
        let (_copying, process) = self.begin_copying().await?;
        let (parts, rest) = self.file_dirs.divide(request);
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
        if !self.main.is_alive() {
            bail!("the container is not running");
        }
        // Before anything is waited for: the number of a process that has ended may be another's.
        let process = pidfd_open(self.main.pid(), PidfdFlags::empty())?;
        Ok((copying, process))
    }

    /// Gives the container the host name and the names of another sandbox.
    pub async fn rename(&self, request: &RejoinRequest) -> Result<()> {
        let (_copying, process) = self.begin_copying().await?;
        rejoin::rename(process, request.clone(), self.files.clone()).await
    }

    /// Forgets what is between the container's processes and a host that is gone: output that it
    /// has not recorded, input, processes beside the first one, which go on alone. Returns the
    /// position of the next output of the first process.
    pub async fn forget_host(&self) -> Result<u64, Status> {
        let stopped = self.cgroup.as_ref().is_some_and(|cgroup| {
            // Output of a container that has gone on is another host's.
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

    /// Reserves an exec id. Drops ended execs if there are too many. Several may run at once, so
    /// one that has ended is kept until its own host has the status.
    ///
    /// # Errors
    /// An exec has the id, or is being set up with it.
    pub fn reserve_exec(&self, id: &str) -> Result<Reservation<'_, Process>, Refused> {
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
        self.message.as_ref().map(Message::read).unwrap_or_default()
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
        self.huge_pages.give_back().await;
        *removed = true;
        Ok(())
    }
}

/// The block devices of a container.
struct Devices {
    /// The read-only image.
    image: Device,
    /// The overlay's upper layer; `None` for a tmpfs.
    volatile: Option<Device>,
    volumes: Vec<VolumeSpec>,
}

/// Finds the block devices that `request` names. Waits for those that are not there yet.
async fn find_devices(places: &AgentPaths, request: &CreateContainerRequest) -> Result<Devices> {
    let root = request.root.as_ref().context("no root file system given")?;
    let volumes = volumes(places, &request.volumes).await?;
    let volatile = match &root.volatile_layer {
        Some(device) => Some(nvme::find(&places.sysfs, device).await?),
        None => None,
    };
    let image = match &root.image {
        Some(device) => nvme::find(&places.sysfs, device).await?,
        None if root.shared_image => pmem::find(&places.sysfs).await?,
        None => bail!("no image given"),
    };
    Ok(Devices { image, volatile, volumes })
}

/// Makes the directories of the sandbox that the container shares with others, as far as they are
/// not there yet. Waits for their disk.
async fn make_empty_dirs(places: &AgentPaths, request: &CreateContainerRequest) -> Result<()> {
    let disk = match &request.empty_dirs_disk {
        Some(device) => Some(nvme::find(&places.sysfs, device).await?),
        None => None,
    };
    let disk = disk.map(|Device { major, minor }| makedev(major, minor));
    empty_dirs::make(&places.empty_dirs, disk, &request.empty_dirs).await
}

/// The parts of a container that is to be created.
struct Plan<'a> {
    request: CreateContainerRequest,
    devices: Devices,
    /// The kernel settings of the container's IPC namespace.
    sysctls: BTreeMap<String, String>,
    /// The process whose PID namespace the container shares; `None`: it has its own.
    processes_of: Option<Pid>,
    /// The container's termination message.
    message: Option<&'a Message>,
}

impl Plan<'_> {
    /// Returns the description of the container and its first process for that process. It has no
    /// cgroup yet.
    fn spec(self, places: &AgentPaths, file_dirs: &FileDirs) -> Result<InitSpec> {
        let Self { request, devices, sysctls, processes_of, message } = self;
        let root = request.root.unwrap_or_default();
        let shared_memory = if request.in_pod { machine::shared_memory()? } else { "" };
        let message = message.map(|one| utf8(one.path())).transpose()?;
        let container = ContainerSpec {
            base: utf8(&places.base)?,
            image: Some(devices.image),
            shared_image: root.image.is_none(),
            volatile: devices.volatile,
            read_only: root.read_only,
            volumes: devices.volumes,
            hostname: request.hostname,
            names: request.names,
            sockets: request.sockets.then(|| places.sockets.spec()).transpose()?,
            files: request.files,
            shared_memory: shared_memory.to_owned(),
            processes_of: processes_of.map_or(0, |pid| pid.as_raw_nonzero().get()),
            masked: request.masked,
            read_only_paths: request.read_only_paths,
            sysctls,
            shares: request.shares,
            empty_dirs: request.empty_dirs,
            empty_dirs_at: utf8(&places.empty_dirs)?,
            file_dirs: file_dirs.specs()?,
            message: message.unwrap_or_default(),
            message_path: request.termination_message_path,
        };
        Ok(InitSpec {
            process: Some(request.process.context("no process given")?),
            privileged: request.privileged,
            drop_mknod: !places.restricts_devices(),
            container: Some(container),
            sockets: request.sockets,
            ..InitSpec::default()
        })
    }
}

/// Starts a process that holds a PID namespace, in which it is process 1, until it is killed.
pub async fn hold_processes(places: &AgentPaths, reaper: &Arc<Reaper>) -> Result<Process, Failure> {
    let spec = InitSpec { hold: utf8(&places.base)?, ..InitSpec::default() };
    let holder = Process::prepare(&places.program, reaper, &spec).await?;
    holder.start().await?;
    Ok(holder)
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

fn cgroup_path(cgroup: Option<&Cgroup>) -> String {
    cgroup.map(|cgroup| cgroup.path().display().to_string()).unwrap_or_default()
}

fn utf8(path: &std::path::Path) -> Result<String> {
    Ok(path.to_str().context("a path that is not UTF-8")?.to_owned())
}

async fn volumes(places: &AgentPaths, volumes: &[Volume]) -> Result<Vec<VolumeSpec>> {
    let mut specs: Vec<VolumeSpec> = Vec::with_capacity(volumes.len());
    for volume in volumes {
        name::check(&volume.name).context("volume")?;
        if specs.iter().any(|other| other.name == volume.name) {
            bail!("two volumes are named {}", volume.name);
        }
        let device: &BlockDevice = volume
            .device
            .as_ref()
            .with_context(|| format!("volume {}: no device given", volume.name))?;
        let device = nvme::find(&places.sysfs, device)
            .await
            .with_context(|| format!("volume {}", volume.name))?;
        specs.push(VolumeSpec {
            name: volume.name.clone(),
            device: Some(device),
            read_only: volume.read_only,
            mount_point: volume.mount_point.clone(),
            device_path: volume.device_path.clone(),
        });
    }
    Ok(specs)
}

/// Checks the parts of a process's description that can be refused before anything is created.
pub fn check_process(process: &ProcessSpec) -> Result<()> {
    if process.args.first().is_none_or(String::is_empty) {
        bail!("no command given");
    }
    Ok(())
}
