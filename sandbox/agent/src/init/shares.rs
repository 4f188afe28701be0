//! Directories and files of the host, mounted in the container.

use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::CWD;
use rustix::mount::{
    MountFlags, MoveMountFlags, OpenTreeFlags, mount_remount, move_mount, open_tree,
};
use slipway_agent_protocol::v1::Share;

use super::files;
use crate::shares::{FLAGS, path};

/// Returns each share as a detached mount: the paths of their places in the container must be
/// resolved in the container's root.
pub fn open_all(shares: &[Share]) -> Result<Vec<OwnedFd>> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let open = |share: &Share| {
        open_tree(CWD, path(share), flags)
            .with_context(|| format!("opening the host's files for {}", share.path))
    };
    shares.iter().map(open).collect()
}

/// Attaches a mount in the container, at a directory or a file that is made if it is missing. Must
/// be called in the container's root.
pub fn attach(share: &Share, tree: &OwnedFd) -> Result<()> {
    let at = &share.path;
    let made = if share.file { place(at) } else { files::create_directory(at) };
    made.with_context(|| format!("a place for the host's files at {at}"))?;
    move_mount(tree, "", CWD, at.as_str(), MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .with_context(|| format!("mounting the host's files on {at}"))?;
    if share.read_only {
        mount_remount(at.as_str(), MountFlags::BIND | FLAGS | MountFlags::RDONLY, c"")
            .with_context(|| format!("write-protecting {at}"))?;
    }
    Ok(())
}

/// Makes the file `path` to mount on, if it is missing, and the directories that it needs.
fn place(path: &str) -> Result<()> {
    let parent = Path::new(path).parent().and_then(Path::to_str).context("no file's path")?;
    files::create_directory(parent)?;
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => bail!("the image has a directory there"),
        Ok(_) => Ok(()),
        Err(_) => Ok(std::fs::write(path, "")?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_mounted_on_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        place(&at("a/b/c")).unwrap();
        std::fs::write(at("a/b/c"), "kept").unwrap();
        place(&at("a/b/c")).unwrap();
        assert_eq!(std::fs::read_to_string(at("a/b/c")).unwrap(), "kept");
        assert!(place(&at("a/b")).unwrap_err().to_string().contains("directory"));
        assert!(place("c").is_err());
    }
}
