//! The record of directories of a pod's guest that its containers share by name.

use serde::{Deserialize, Serialize};
use slipway_agent_protocol::v1 as agent_v1;

/// A directory of a pod's guest in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmptyDir {
    /// The directory's name.
    pub name: String,
    /// The path in the container.
    pub path: String,
    /// The relative path of the part of the directory that the container has; empty: all of it.
    pub sub_path: String,
    /// Set if the container cannot change it.
    pub read_only: bool,
    /// Set if the directory is in the guest's memory; otherwise it is on the pod's disk.
    pub in_memory: bool,
    /// The most bytes of a directory in memory; 0: half of the guest's memory.
    pub size_bytes: u64,
    /// The mode of a directory that is made: permission bits and the three above.
    pub mode: u32,
    /// The user id of its owner.
    pub uid: u32,
    /// The id of its group.
    pub gid: u32,
    /// Set if the directory in memory is a hugetlbfs with pages of 2 MiB.
    #[serde(default)]
    pub huge_pages: bool,
}

impl From<EmptyDir> for agent_v1::EmptyDir {
    fn from(dir: EmptyDir) -> Self {
        Self {
            name: dir.name,
            path: dir.path,
            sub_path: dir.sub_path,
            read_only: dir.read_only,
            in_memory: dir.in_memory,
            size_bytes: dir.size_bytes,
            mode: dir.mode,
            uid: dir.uid,
            gid: dir.gid,
            huge_pages: dir.huge_pages,
        }
    }
}

/// The directories of a pod's guest that its containers share by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmptyDirs {
    /// The names of those that were made, or would have been. They stay until the pod ends.
    pub names: Vec<String>,
    /// The namespace of the pod's first NVMe function with the disk of those that are not in
    /// memory, from before it is attached; `None`: no container has asked for one.
    pub disk: Option<u32>,
}
