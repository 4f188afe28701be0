//! The description of a container and its first process, which that process follows (`init`).

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::process::Pid;
use slipway_agent_protocol::v1::{BlockDevice, CreateContainerRequest, Volume};

use super::AgentPaths;
use super::holdings::Holdings;
use crate::init::{ContainerSpec, Device, InitSpec, VolumeSpec};
use crate::{machine, name, nvme, pmem};

/// The block devices of a container.
pub struct Devices {
    /// The read-only image.
    image: Device,
    /// The overlay's upper layer; `None` for a tmpfs.
    volatile: Option<Device>,
    volumes: Vec<VolumeSpec>,
}

/// Finds the block devices that `request` names. Waits for those that are not there yet.
///
/// # Errors
/// A device does not come, or a volume's name is no name or another volume's.
pub async fn find_devices(
    places: &AgentPaths,
    request: &CreateContainerRequest,
) -> Result<Devices> {
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

/// The parts of a container that is to be created.
pub struct Plan {
    pub request: CreateContainerRequest,
    pub devices: Devices,
    /// The kernel settings of the container's IPC namespace.
    pub sysctls: BTreeMap<String, String>,
    /// The process whose PID namespace the container shares; `None`: it has its own.
    pub processes_of: Option<Pid>,
}

impl Plan {
    /// Returns the description of the container and its first process for that process. It has no
    /// cgroup yet.
    ///
    /// # Errors
    /// No process is given, or a path is not UTF-8.
    pub fn spec(self, places: &AgentPaths, holdings: &Holdings) -> Result<InitSpec> {
        let Self { request, devices, sysctls, processes_of } = self;
        let root = request.root.unwrap_or_default();
        let shared_memory = if request.in_pod { machine::shared_memory()? } else { "" };
        let message = holdings.message.as_ref().map(|one| utf8(one.path())).transpose()?;
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
            file_dirs: holdings.file_dirs.specs()?,
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

/// Returns `path` as text.
///
/// # Errors
/// It is not UTF-8.
pub fn utf8(path: &Path) -> Result<String> {
    Ok(path.to_str().context("a path that is not UTF-8")?.to_owned())
}
