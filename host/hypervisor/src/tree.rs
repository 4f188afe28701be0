//! Directories and files of the host in the mount namespace of a helper.
//!
//! A [`Tree`] is a clone of a part of the host's mounts that is mounted nowhere (open_tree(2)).
//! [`HelperFiles`] mounts it in the namespace of a helper that runs and has no right to mount
//! anything itself. A thread of its own enters the namespace for each change, and ends with it.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags, openat2};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree, unmount};

use crate::mounts::{Attributes, enter, fingerprint};

/// The name of a file that is mounted alone, in the directory of its number.
pub const ENTRY: &str = "file";

/// The part of a directory that a helper sees, and its rights there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Nothing can be changed through the directory itself.
    pub read_only: bool,
    /// The directory has what is mounted below it on the host.
    pub below: bool,
    /// With `below`: nothing can be changed through that either.
    pub below_read_only: bool,
    /// With `below`: what is mounted there on the host later appears too, if the host's mount is
    /// one that shares such changes.
    pub later: bool,
}

/// Most attempts to clone mounts that change meanwhile.
const ATTEMPTS: usize = 16;

/// A directory or a regular file of the host that can be mounted in a helper's namespace.
#[derive(Debug)]
pub struct Tree {
    mount: OwnedFd,
    is_file: bool,
    identity: (u64, u64, u64),
}

impl Tree {
    /// Clones what is at `path`, a path without symbolic links: one that has come into it since it
    /// was resolved leads elsewhere. Blocks on the path's file systems.
    ///
    /// # Errors
    /// The kernel's refusal; [`io::ErrorKind::Unsupported`] if it is neither a directory nor a
    /// regular file.
    pub fn open(path: &Path, access: Access) -> io::Result<Self> {
        let (flags, links) = (OFlags::PATH | OFlags::CLOEXEC, ResolveFlags::NO_SYMLINKS);
        let source = openat2(CWD, path, flags, Mode::empty(), links)?;
        let asked = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::MNT_ID;
        let stat = rustix::fs::statx(&source, c"", AtFlags::EMPTY_PATH, asked)?;
        let device = u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor);
        let is_file = match FileType::from_raw_mode(stat.stx_mode.into()) {
            FileType::Directory => false,
            FileType::RegularFile => true,
            _ => return Err(io::ErrorKind::Unsupported.into()),
        };
        let (mount, mounts) = clone(&source, stat.stx_mnt_id, access.below)?;
        let identity = (mounts, device, stat.stx_ino);
        // A helper runs no program of the host's, and opens no device.
        let safe = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
        let propagation = if access.later { libc::MS_SLAVE } else { libc::MS_PRIVATE };
        let all = Attributes { set: safe, propagation, ..Attributes::default() };
        all.apply(&mount, libc::AT_RECURSIVE)?;
        if access.read_only {
            let below = if access.below_read_only { libc::AT_RECURSIVE } else { 0 };
            Attributes::read_only().apply(&mount, below)?;
        }
        Ok(Self { mount, is_file, identity })
    }

    /// Returns the identity of what was cloned, as long as this is mounted: a fingerprint of the
    /// host's mount and of those below it, as they are now, and the device and inode number. Two
    /// trees with the same identity and access show the same.
    pub fn identity(&self) -> (u64, u64, u64) {
        self.identity
    }

    /// Returns whether it is a regular file.
    pub fn is_file(&self) -> bool {
        self.is_file
    }
}

/// Clones `source`, in the host's mount `id`, with the mounts below it if `below` is set. Returns
/// the clone and the fingerprint of the mounts that were cloned.
fn clone(source: &OwnedFd, id: u64, below: bool) -> io::Result<(OwnedFd, u64)> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    if below {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    let path = std::fs::read_link(format!("/proc/self/fd/{}", source.as_raw_fd()))?;
    let mounts = || fingerprint(id, below.then_some(&*path));
    for _ in 0..ATTEMPTS {
        let before = mounts()?;
        let clone = open_tree(source, c"", flags)?;
        if mounts()? == before {
            return Ok((clone, before));
        }
    }
    Err(io::Error::other("what is mounted there changes all the time"))
}

/// The directory in a helper's mount namespace where trees are mounted, each under its number.
#[derive(Debug)]
pub struct HelperFiles {
    process: OwnedFd,
    base: PathBuf,
}

impl HelperFiles {
    /// Names the directory `base` in the mount namespace of `process`, a pidfd. It may be on a
    /// file system that is mounted read-only.
    pub fn new(process: OwnedFd, base: impl Into<PathBuf>) -> Self {
        Self { process, base: base.into() }
    }

    /// Mounts a tree as `NUMBER`, or a file as `NUMBER/file`. Takes the place of what was there.
    ///
    /// # Errors
    /// The kernel's refusal. Nothing is mounted then. [`io::ErrorKind::NotFound`]: the helper has
    /// ended.
    pub fn attach(&self, number: u32, tree: &Tree) -> io::Result<()> {
        self.run(|| {
            self.remove(number)?;
            let at = self.make(number, tree.is_file)?;
            let moved =
                move_mount(&tree.mount, c"", CWD, &at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH);
            moved.map_err(|error| {
                let _ = self.remove(number);
                error.into()
            })
        })
    }

    /// Unmounts what is mounted as `number`. That nothing is there is no error.
    ///
    /// # Errors
    /// The kernel's refusal. [`io::ErrorKind::NotFound`]: the helper has ended.
    pub fn detach(&self, number: u32) -> io::Result<()> {
        self.run(|| self.remove(number))
    }

    /// Runs `work` on a new thread in the helper's mount namespace.
    fn run<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        let enter = || match enter(&self.process) {
            Err(Errno::SRCH) => Err(io::ErrorKind::NotFound.into()),
            entered => Ok(entered?),
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("helper-files".into());
            let thread = thread.spawn_scoped(scope, || enter().and_then(|()| work()))?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Opens the base directory for changes, through a mount of its own that goes when this is
    /// dropped.
    fn writable(&self) -> io::Result<OwnedFd> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let base = open_tree(CWD, &self.base, flags)?;
        let writable = Attributes { clear: libc::MOUNT_ATTR_RDONLY, ..Attributes::default() };
        writable.apply(&base, 0)?;
        Ok(base)
    }

    /// Makes the place of a tree, and returns its path.
    fn make(&self, number: u32, is_file: bool) -> io::Result<PathBuf> {
        let (base, name) = (self.writable()?, number.to_string());
        let at = self.base.join(&name);
        rustix::fs::mkdirat(&base, &name, Mode::from_raw_mode(0o755))?;
        if !is_file {
            return Ok(at);
        }
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        rustix::fs::openat(&base, format!("{name}/{ENTRY}"), flags, Mode::from_raw_mode(0o600))?;
        Ok(at.join(ENTRY))
    }

    fn remove(&self, number: u32) -> io::Result<()> {
        let at = self.base.join(number.to_string());
        // The directory first: what is mounted there may have a file of the second name, and its
        // file system, which would be asked, may never answer.
        for place in [at.clone(), at.join(ENTRY)] {
            match unmount(&place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
                // Nothing is there, or nothing is mounted there.
                Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::INVAL) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let (base, name) = (self.writable()?, number.to_string());
        for (path, flags) in
            [(format!("{name}/{ENTRY}"), AtFlags::empty()), (name, AtFlags::REMOVEDIR)]
        {
            match rustix::fs::unlinkat(&base, path, flags) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
