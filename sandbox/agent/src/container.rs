//! Containers and their processes.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use slipway_agent_protocol::v1::{
    BlockDevice, CreateContainerRequest, ExecRequest, ProcessSpec, PutFilesRequest, Volume,
};

use crate::cgroup::{Cgroup, Hierarchy};
use crate::init::{ContainerSpec, Device, InitSpec, VolumeSpec};
use crate::log;
use crate::message::Message;
use crate::process::{Failure, Process};
use crate::reaper::Reaper;
use crate::shares::{self, Held};
use crate::sockets::Files;
use crate::{copies, machine, nvme, pmem};

/// The longest wait for other files that are being put into a container. The daemon waits for 30 s.
const COPYING: Duration = Duration::from_secs(20);

/// The time within which a killed process is gone, unless it hangs in a device.
const KILL: Duration = Duration::from_secs(10);

/// The number of ended execs at which all ended ones are dropped. Until then, their status can be
/// requested.
const KEPT_EXECS: usize = 64;

/// The paths of the agent's parts in the machine.
pub struct Places {
    /// The program of a process's first stage, which is this program.
    pub program: PathBuf,
    /// An existing directory on which containers build their roots, each in its own namespace.
    pub base: PathBuf,
    /// The path of sysfs.
    pub sysfs: PathBuf,
    /// The paths of the socket engine's files.
    pub sockets: Files,
    /// The cgroups; `None` if the kernel has no cgroup2.
    pub hierarchy: Option<Hierarchy>,
}

impl Places {
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
    /// The container's termination message.
    message: Option<Message>,
    /// Held while files are put into the container: two requests would write the same ones.
    copying: tokio::sync::Mutex<()>,
    execs: Mutex<HashMap<String, Arc<Process>>>,
}

impl Container {
    /// Builds the container with the kernel settings `sysctls` of its IPC namespace. Its first
    /// process waits for [`Process::start`]. The container shares the PID namespace of
    /// `processes_of`, or has one of its own.
    pub async fn create(
        places: &Places,
        reaper: &Arc<Reaper>,
        sysctls: BTreeMap<String, String>,
        request: CreateContainerRequest,
        processes_of: Option<Pid>,
    ) -> Result<Container, Failure> {
        let devices = find_devices(places, &request).await?;
        let shares = shares::hold(&request.shares).await?;
        let message = match request.termination_message_path.as_str() {
            "" => None,
            _ => Some(Message::make(&request.id)?),
        };
        let (id, limits) = (request.id.clone(), request.resources.unwrap_or_default());
        let plan = Plan { request, devices, sysctls, processes_of, message: message.as_ref() };
        let mut spec = plan.spec(places)?;
        // Last, since it has to be removed if the container cannot be created.
        let cgroup = places.hierarchy.as_ref();
        let cgroup = cgroup.map(|hierarchy| hierarchy.create(&id, &limits)).transpose()?;
        spec.cgroup = cgroup_path(cgroup.as_ref());
        let main = match Process::prepare(&places.program, reaper, &spec).await {
            Ok(main) => Arc::new(main),
            Err(failure) => {
                discard(cgroup).await;
                return Err(failure);
            }
        };
        let (execs, copying) = (Mutex::default(), tokio::sync::Mutex::default());
        let sockets = spec.sockets;
        let container =
            Container { main, cgroup, sockets, _shares: shares, message, copying, execs };
        if let Err(error) = container.restrict_devices(places, &spec) {
            container.kill().await;
            discard(container.cgroup).await;
            return Err(anyhow!(error).context("restricting devices").into());
        }
        Ok(container)
    }

    /// Restricts the processes of a container that is not privileged to the devices of `spec`, if
    /// the kernel can do so. The first process has been prepared: it had to open those of its root.
    fn restrict_devices(&self, places: &Places, spec: &InitSpec) -> std::io::Result<()> {
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
        places: &Places,
        reaper: &Arc<Reaper>,
        request: ExecRequest,
    ) -> Result<Process, Failure> {
        if !self.main.is_alive() {
            return Err(anyhow!("the container is not running").into());
        }
        let spec = InitSpec {
            process: Some(request.spec.context("no process given")?),
            privileged: request.privileged,
            drop_mknod: !places.restricts_devices(),
            cgroup: cgroup_path(self.cgroup.as_ref()),
            container: None,
            join: self.main.pid().as_raw_nonzero().get(),
            sockets: self.sockets,
            hold: String::new(),
        };
        Process::prepare(&places.program, reaper, &spec).await
    }

    /// Puts files into the container's root, and removes others.
    pub async fn put_files(&self, request: PutFilesRequest) -> Result<()> {
        // A request that a hung file system of the guest's holds up is not waited for forever.
        let Ok(_copying) = tokio::time::timeout(COPYING, self.copying.lock()).await else {
            bail!("other files are being put into the container");
        };
        if !self.main.is_alive() {
            bail!("the container is not running");
        }
        // Before anything is waited for: the number of a process that has ended may be another's.
        let process = pidfd_open(self.main.pid(), PidfdFlags::empty())?;
        copies::replace(process, request).await
    }

    /// Returns the process with this exec id, or the first process for "". Returns `None` if there
    /// is none.
    pub fn process(&self, exec_id: &str) -> Option<Arc<Process>> {
        match exec_id {
            "" => Some(self.main.clone()),
            id => self.execs().get(id).cloned(),
        }
    }

    /// Returns whether there is an exec with this id.
    pub fn has_exec(&self, id: &str) -> bool {
        self.execs().contains_key(id)
    }

    /// Registers an exec. Drops the ended ones if there are too many.
    pub fn add_exec(&self, id: String, process: Arc<Process>) {
        let mut execs = self.execs();
        if execs.values().filter(|process| !process.is_alive()).count() >= KEPT_EXECS {
            execs.retain(|_, process| process.is_alive());
        }
        execs.insert(id, process);
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

    /// Kills the remaining processes and removes the cgroup.
    pub async fn remove(&self) -> std::io::Result<()> {
        self.kill().await;
        match &self.cgroup {
            Some(cgroup) => cgroup.remove().await,
            None => Ok(()),
        }
    }

    fn execs(&self) -> MutexGuard<'_, HashMap<String, Arc<Process>>> {
        self.execs.lock().unwrap_or_else(PoisonError::into_inner)
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
async fn find_devices(places: &Places, request: &CreateContainerRequest) -> Result<Devices> {
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
    fn spec(self, places: &Places) -> Result<InitSpec> {
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
pub async fn hold_processes(places: &Places, reaper: &Arc<Reaper>) -> Result<Process, Failure> {
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

async fn volumes(places: &Places, volumes: &[Volume]) -> Result<Vec<VolumeSpec>> {
    let mut specs: Vec<VolumeSpec> = Vec::with_capacity(volumes.len());
    for volume in volumes {
        check_name(&volume.name).context("volume")?;
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

/// Checks a name, since names become file names: at most 128 letters, digits, `_`, `.` and `-`,
/// beginning with a letter or a digit.
pub fn check_name(name: &str) -> Result<()> {
    let ordinary = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    let starts = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if !starts || name.len() > 128 || !name.bytes().all(ordinary) {
        bail!("{name:?} is not a name");
    }
    Ok(())
}

/// Checks the parts of a process's description that can be refused before anything is created.
pub fn check_process(process: &ProcessSpec) -> Result<()> {
    if process.args.first().is_none_or(String::is_empty) {
        bail!("no command given");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_file_names() {
        for name in ["a", "web-1", "0_x.y", &"a".repeat(128)] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        for name in ["", ".", "..", "a/b", "-a", "a b", "ä", &"a".repeat(129)] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }
}
