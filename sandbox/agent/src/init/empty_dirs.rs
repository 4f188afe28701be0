//! Directories of the sandbox in a container.
//!
//! Containers that have a directory can change all that is in it, also while another one is being
//! made. So a path below a directory is walked name by name, from descriptor to descriptor, and no
//! link is followed: it would lead into the sandbox's own files.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};
use slipway_agent_protocol::v1::{EmptyDir, Share};

use crate::empty_dirs;

/// The bits of a directory's mode that directories below it are made with. A group's bit
/// (set-group-ID) is inherited.
const INHERITED: Mode = Mode::from_raw_mode(0o1777);

/// Returns each directory as a detached mount, and its place in the container. Must be called
/// before the sandbox's root is left, with an empty umask.
pub fn open_all(at: &Path, dirs: &[EmptyDir]) -> Result<Vec<(Share, OwnedFd)>> {
    let open = |dir: &EmptyDir| {
        open(at, dir).with_context(|| format!("the directory {} for {}", dir.name, dir.path))
    };
    dirs.iter().map(open).collect()
}

fn open(at: &Path, dir: &EmptyDir) -> Result<(Share, OwnedFd)> {
    let path = empty_dirs::path(at, &dir.name).context("it was not made")?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, &path, flags, Mode::empty())?;
    let found = walk(root, &dir.sub_path).with_context(|| format!("{:?}", dir.sub_path))?;
    let file = match FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) {
        FileType::Directory => false,
        FileType::RegularFile => true,
        _ => bail!("{:?} is neither a directory nor a regular file", dir.sub_path),
    };
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    let tree = open_tree(&found, "", flags).context("cloning its mount")?;
    let (path, read_only) = (dir.path.clone(), dir.read_only);
    Ok((Share { path, read_only, file, ..Share::default() }, tree))
}

/// Opens what is at `path` below the directory `root`. Directories that are missing are made.
fn walk(root: OwnedFd, path: &str) -> Result<OwnedFd> {
    let mode = Mode::from_raw_mode(rustix::fs::fstat(&root)?.st_mode) & INHERITED;
    let mut names = path.split('/').filter(|name| !name.is_empty());
    names.try_fold(root, |at, name| step(&at, name, mode))
}

fn step(at: &OwnedFd, name: &str, mode: Mode) -> Result<OwnedFd> {
    let open = || {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        rustix::fs::openat2(at.as_fd(), name, flags, Mode::empty(), within)
    };
    match open() {
        Err(Errno::NOENT) => {}
        Err(Errno::LOOP) => bail!("{name:?} is a symbolic link, which is not followed"),
        opened => return Ok(opened?),
    }
    match rustix::fs::mkdirat(at, name, mode) {
        // Another container has made something there meanwhile.
        Err(Errno::EXIST) => {}
        made => made?,
    }
    Ok(open()?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_path_below_a_directory_leads_nowhere_else() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let (root, outside) = (at("root"), at("outside"));
        for made in [&root, &outside] {
            std::fs::create_dir(made).unwrap();
        }
        std::fs::write(root.join("file"), "x").unwrap();
        symlink(&outside, root.join("link")).unwrap();
        symlink("../outside", root.join("up")).unwrap();
        let walk = |path: &str| {
            let flags = OFlags::PATH | OFlags::DIRECTORY;
            super::walk(rustix::fs::open(&root, flags, Mode::empty()).unwrap(), path)
        };
        for path in ["link", "link/new", "up", "up/new", "file/new", "..", "../outside"] {
            assert!(walk(path).is_err(), "{path}");
        }
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
        let inode = |fd: OwnedFd| rustix::fs::fstat(&fd).unwrap().st_ino;
        assert_eq!(inode(walk("").unwrap()), std::fs::metadata(&root).unwrap().ino());
        let made = inode(walk("a//b").unwrap());
        assert_eq!(made, std::fs::metadata(root.join("a/b")).unwrap().ino());
        assert_eq!(inode(walk("a/b").unwrap()), made);
        let file = walk("file").unwrap();
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&file).unwrap().st_mode);
        assert_eq!(kind, FileType::RegularFile);
    }

    #[test]
    fn a_directory_that_is_made_has_the_mode_of_the_one_above() {
        let dir = tempfile::tempdir().unwrap();
        let permissions = std::fs::Permissions::from_mode(0o1755);
        std::fs::set_permissions(dir.path(), permissions).unwrap();
        let root = rustix::fs::open(dir.path(), OFlags::PATH, Mode::empty()).unwrap();
        walk(root, "a").unwrap();
        let mode = std::fs::metadata(dir.path().join("a")).unwrap().permissions().mode();
        // The umask of the tests leaves these bits.
        assert_eq!(mode & 0o1700, 0o1700);
    }
}
