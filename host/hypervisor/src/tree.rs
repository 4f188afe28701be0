//! Directories and files of the host in the mount namespace of a helper.
//!
//! A [`Tree`] is a clone of a part of the host's mounts that is mounted nowhere (open_tree(2)).
//! [`HelperFiles`] mounts it in the namespace of a helper that runs and has no right to mount
//! anything itself. A thread of its own enters the namespace for each change, and ends with it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree, unmount};

use crate::mounts::{Attributes, enter};

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

/// A directory or a regular file of the host that can be mounted in a helper's namespace.
#[derive(Debug)]
pub struct Tree {
    mount: OwnedFd,
    is_file: bool,
    identity: (u64, u64, u64),
}

impl Tree {
    /// Clones what is at `path`. Links on the way are followed, one at its end is not. Blocks on
    /// the path's file systems.
    ///
    /// # Errors
    /// The kernel's refusal; [`io::ErrorKind::Unsupported`] if it is neither a directory nor a
    /// regular file.
    pub fn open(path: &Path, access: Access) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let source = rustix::fs::open(path, flags, Mode::empty())?;
        let asked = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::MNT_ID;
        let stat = rustix::fs::statx(&source, c"", AtFlags::EMPTY_PATH, asked)?;
        let device = u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor);
        let identity = (stat.stx_mnt_id, device, stat.stx_ino);
        let is_file = match FileType::from_raw_mode(stat.stx_mode.into()) {
            FileType::Directory => false,
            FileType::RegularFile => true,
            _ => return Err(io::ErrorKind::Unsupported.into()),
        };
        let mut flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_EMPTY_PATH;
        if access.below {
            flags |= OpenTreeFlags::AT_RECURSIVE;
        }
        let mount = open_tree(&source, c"", flags)?;
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

    /// Returns the identity of the directory or file, as long as its mount is there: the mount's
    /// identifier, and device and inode number.
    pub fn identity(&self) -> (u64, u64, u64) {
        self.identity
    }
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
        for place in [at.join(ENTRY), at] {
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
mod tests {
    use std::process::{Child, Command, Stdio};

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    /// A process in a mount namespace of its own, with a read-only file system at `base`.
    struct Namespace {
        process: Child,
        files: HelperFiles,
    }

    impl Namespace {
        fn new(base: &Path) -> Self {
            use std::io::{BufRead, BufReader};
            let script =
                "mount -t tmpfs none $0 && mount -o remount,bind,ro $0 && echo && exec cat";
            let mut process = Command::new("unshare")
                .args(["--mount", "sh", "-c", script])
                .arg(base)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut line = String::new();
            BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
            assert_eq!(line, "\n");
            let pid = Pid::from_child(&process);
            let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
            Self { process, files: HelperFiles::new(pidfd, base) }
        }

        /// Runs a command in the namespace. Returns its output.
        fn sh(&self, command: &str) -> String {
            let pid = self.process.id().to_string();
            let output = Command::new("nsenter")
                .args(["--mount", "--target", &pid, "sh", "-c", command])
                .output()
                .unwrap();
            String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
        }
    }

    impl Drop for Namespace {
        fn drop(&mut self) {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }

    /// Mounts a file system at `path` while it lives.
    struct Mounted(PathBuf);

    impl Mounted {
        fn new(path: PathBuf) -> Self {
            std::fs::create_dir(&path).unwrap();
            let mounted = Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&path).status();
            assert!(mounted.unwrap().success());
            Self(path)
        }
    }

    impl Drop for Mounted {
        fn drop(&mut self) {
            let _ = unmount(&self.0, UnmountFlags::DETACH);
        }
    }

    fn as_root(test: &str) -> bool {
        let root = rustix::process::geteuid().is_root();
        if !root {
            println!("SKIPPED: {test}: needs root");
        }
        root
    }

    #[test]
    fn trees_come_to_a_helper_that_cannot_mount() {
        if !as_root("trees_come_to_a_helper_that_cannot_mount") {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for name in ["base", "d"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        std::fs::write(at("d/f"), "one").unwrap();
        let below = Mounted::new(at("d/below"));
        std::fs::write(below.0.join("g"), "two").unwrap();
        let namespace = Namespace::new(&at("base"));
        let all = Access { below: true, ..Access::default() };
        let fixed = Access { read_only: true, ..all };
        let frozen = Access { below_read_only: true, ..fixed };
        for (number, access) in [(0, Access::default()), (1, all), (2, fixed), (3, frozen)] {
            let tree = Tree::open(&at("d"), access).unwrap();
            namespace.files.attach(number, &tree).unwrap();
        }
        namespace.files.attach(4, &Tree::open(&at("d/f"), frozen).unwrap()).unwrap();
        let sh = |command: &str| namespace.sh(&format!("cd {}; {command}", at("base").display()));
        assert_eq!(sh("cat */f */file"), "one".repeat(5));
        assert_eq!(sh("ls -A 0/below; cat 1/below/g"), "two");
        let writable = "for d in */ */below/; do touch $d/new 2>/dev/null && echo $d; done; true";
        assert_eq!(sh(writable), "0/\n1/\n0/below/\n1/below/\n2/below/\n");
        assert_eq!(sh("echo x 2>&1 >4/file").matches("Read-only").count(), 1);
        assert!(sh("mkdir new").contains("Read-only"));
        // Another takes its place, and all go.
        namespace.files.attach(4, &Tree::open(&at("d"), all).unwrap()).unwrap();
        assert_eq!(sh("cat 4/f 4/below/g"), "onetwo");
        for number in 0..6 {
            namespace.files.detach(number).unwrap();
        }
        assert_eq!(sh("ls -A; grep -c below /proc/self/mounts"), "1\n");
        assert_eq!(std::fs::read(at("d/f")).unwrap(), b"one");
    }

    #[test]
    fn what_cannot_be_mounted_is_refused() {
        if !as_root("what_cannot_be_mounted_is_refused") {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let refused = |path: &Path| Tree::open(path, Access::default()).unwrap_err().kind();
        assert_eq!(refused(&directory.path().join("no")), io::ErrorKind::NotFound);
        assert_eq!(refused(Path::new("/dev/null")), io::ErrorKind::Unsupported);
        let tree = Tree::open(directory.path(), Access::default()).unwrap();
        let mut namespace = Namespace::new(directory.path());
        namespace.process.kill().unwrap();
        namespace.process.wait().unwrap();
        let ended = namespace.files.attach(0, &tree).unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::NotFound);
    }
}
