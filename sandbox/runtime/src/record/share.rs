//! The record of what a sandbox has of the host's files.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use slipway_hypervisor::Access;
use slipway_plane_api::v1 as plane_v1;

use super::Record;

impl Record {
    /// Returns whether the sandbox has, or may get, a process that serves shares.
    pub fn may_share(&self) -> bool {
        self.pod || !self.shares.is_empty()
    }

    /// Returns whether the sandbox's function of shares is there from its start.
    pub fn begins_with_shares(&self) -> bool {
        !self.shares.is_empty() && self.template.is_none()
    }

    /// Returns whether the sandbox is given its function of shares once its guest goes on, as its
    /// template has no such function.
    pub fn forks_with_shares(&self) -> bool {
        !self.shares.is_empty() && self.template.is_some()
    }
}

/// A directory or regular file of the host in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The path on the host, without symbolic links.
    pub source: PathBuf,
    /// The path in the container.
    pub path: String,
    /// Set if the container cannot change the source itself.
    pub read_only: bool,
    /// Set if the container has what is mounted below the source, too.
    pub below: bool,
    /// Set if the container cannot change what is mounted below the source.
    pub below_read_only: bool,
    /// Set if the container has what the host mounts below the source later, too.
    pub later: bool,
    /// Set if the source is a regular file.
    pub is_file: bool,
    /// The tree that the container has of the source, while it is mounted.
    pub tree: Option<MountedTree>,
}

impl Share {
    /// Returns what the container may do.
    pub fn access(&self) -> Access {
        let Self { read_only, below, below_read_only, later, .. } = *self;
        Access { read_only, below, below_read_only, later }
    }

    /// Returns whether everything in the container at the path is read-only.
    pub fn all_read_only(&self) -> bool {
        self.read_only && (self.below_read_only || !self.below)
    }
}

/// A tree of the host that is mounted for containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountedTree {
    /// Its number in the server's directory.
    pub number: u32,
    /// The identity of its root on the host.
    pub identity: TreeIdentity,
}

/// The identity of a directory or file of the host with its mounts ([`Tree::identity`]): a
/// fingerprint of these, and the device and inode number.
///
/// [`Tree::identity`]: slipway_hypervisor::Tree::identity
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeIdentity(pub u64, pub u64, pub u64);

/// The process that serves files of the host to a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShareServer {
    /// There is none, and was none.
    #[default]
    None,
    /// It is being started: a process that is found does not serve the guest.
    Starting,
    /// The guest has its function.
    Serving,
}

/// The memory of a guest, as the servers of its functions know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientMemory {
    /// The most memory that the VMM may map, in bytes.
    pub limit_bytes: u64,
    /// The device and inode number of the memory's file.
    pub file: (u64, u64),
    /// The device and inode number of the file of the pages that the guest shares with others;
    /// zeros if it shares none.
    pub shared: (u64, u64),
}

impl From<&plane_v1::ClientMemory> for ClientMemory {
    fn from(memory: &plane_v1::ClientMemory) -> Self {
        Self {
            limit_bytes: memory.limit_bytes,
            file: (memory.device, memory.inode),
            shared: (memory.shared_device, memory.shared_inode),
        }
    }
}

impl From<ClientMemory> for plane_v1::ClientMemory {
    fn from(ClientMemory { limit_bytes, file, shared }: ClientMemory) -> Self {
        Self {
            limit_bytes,
            device: file.0,
            inode: file.1,
            shared_device: shared.0,
            shared_inode: shared.1,
        }
    }
}
