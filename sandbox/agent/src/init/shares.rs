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
    // A link at the end is the host's, and would lead into the guest's own files.
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
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
    // A link of the image leads into the image.
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
    move_mount(tree, "", CWD, at.as_str(), flags)
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
    use rustix::mount::MountPropagationFlags;
    use rustix::thread::UnshareFlags;

    use super::*;

    #[test]
    fn a_share_is_mounted_where_a_link_of_the_image_leads() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: a_share_is_mounted_where_a_link_of_the_image_leads: needs root");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        for name in ["run", "source"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        std::fs::write(at("source/f"), "shared").unwrap();
        std::os::unix::fs::symlink("run", at("link")).unwrap();
        std::os::unix::fs::symlink("run/f", at("linked")).unwrap();
        let in_namespace = || {
            // SAFETY: nothing that a descriptor of this thread stands for changes.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }
                .unwrap();
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            rustix::mount::mount_change("/", private).unwrap();
            for (source, path, file) in [("source", "link", false), ("source/f", "linked", true)] {
                let tree = open_tree(CWD, at(source), OpenTreeFlags::OPEN_TREE_CLONE).unwrap();
                let share = Share { path: at(path), file, read_only: true, ..Share::default() };
                attach(&share, &tree).unwrap();
            }
            let read = |name| std::fs::read_to_string(at(name)).unwrap();
            assert_eq!(["run/f", "link/f", "linked"].map(read), ["shared"; 3]);
            std::fs::write(at("run/f"), "").unwrap_err()
        };
        let error = std::thread::scope(|scope| scope.spawn(in_namespace).join().unwrap());
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
        assert_eq!(std::fs::read_dir(at("run")).unwrap().count(), 0);
    }

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
