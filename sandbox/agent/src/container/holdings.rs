//! The things that a container has in the guest beside its processes and its cgroup.

use anyhow::Result;
use rustix::fs::makedev;
use slipway_agent_protocol::v1::CreateContainerRequest;

use super::AgentPaths;
use crate::file_dirs::FileDirs;
use crate::huge_pages::HugePages;
use crate::init::Device;
use crate::message::Message;
use crate::shares::{self, Held};
use crate::{empty_dirs, nvme};

/// The files, directories and huge pages of a container. They go when this is dropped.
pub struct Holdings {
    /// The host's files that the container has.
    _shares: Held,
    /// The container's directories for copies of the host's files.
    pub file_dirs: FileDirs,
    /// The huge pages that the kernel has for the container's limit.
    pub huge_pages: HugePages,
    /// The container's termination message.
    pub message: Option<Message>,
    /// The paths of the files that the host has given the container.
    pub files: Vec<String>,
}

impl Holdings {
    /// Makes what `request` asks for, and the directories of the sandbox that the container shares
    /// by name. Takes out of `request` the files for the container's own directories: the others
    /// are written into its root, which is not there yet.
    ///
    /// # Errors
    /// The error of the first step that failed. The container has nothing then.
    pub async fn make(places: &AgentPaths, request: &mut CreateContainerRequest) -> Result<Self> {
        let shares = shares::hold(&request.shares).await?;
        make_empty_dirs(places, request).await?;
        let message = match request.termination_message_path.as_str() {
            "" => None,
            _ => Some(Message::make(&request.id)?),
        };
        let bytes = request.resources.map_or(0, |limits| limits.huge_page_bytes);
        let huge_pages = HugePages::add(&places.sysfs, bytes).await?;
        let files = request.files.iter().map(|file| file.path.clone()).collect();
        let file_dirs = FileDirs::make(&places.file_dirs, &request.file_dirs).await?;
        request.files = file_dirs.fill(std::mem::take(&mut request.files)).await?;
        Ok(Self { _shares: shares, file_dirs, huge_pages, message, files })
    }
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
