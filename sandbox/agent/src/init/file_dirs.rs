//! Directories of a container's own for files of the host.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, mount_remount};
use slipway_agent_protocol::v1::Share;

use super::{FileDirSpec, tree};

/// Flags of all mounts of directories.
pub const FLAGS: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

/// Returns the mount of a directory or file, detached and writable, and its place in the container.
/// Must be called before the sandbox's root is left.
pub fn open(dir: &FileDirSpec) -> Result<(Share, OwnedFd)> {
    let tree = tree::clone(Path::new(&dir.source))?;
    let (path, file) = (dir.path.clone(), dir.is_file);
    Ok((Share { path, file, ..Share::default() }, tree))
}

/// Write-protects a mount that was attached at `at`. Must be called in the container's root, with
/// /proc mounted.
pub fn protect(tree: &OwnedFd, at: &str) -> Result<()> {
    // By descriptor: another mount may be at the path by now.
    let mount = format!("/proc/self/fd/{}", tree.as_raw_fd());
    mount_remount(mount.as_str(), MountFlags::BIND | FLAGS | MountFlags::RDONLY, c"")
        .with_context(|| format!("write-protecting {at}"))
}
