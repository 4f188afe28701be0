//! Detached mounts: clones of mounts of the sandbox's root, which are attached in the container's.
//!
//! Their sources can be reached only from the sandbox's root. Their targets must be resolved in the
//! container's root, where no link of an image leads out.

use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

/// Clones the mount of `path`. Must be called before the sandbox's root is left.
pub fn clone(path: &Path) -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    open_tree(CWD, path, flags).with_context(|| format!("cloning the mount of {}", path.display()))
}

/// Attaches a clone at the existing path `at`. Must be called in the container's root.
pub fn attach(tree: &OwnedFd, at: &str) -> Result<()> {
    move_mount(tree, "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .with_context(|| format!("mounting {at}"))
}
