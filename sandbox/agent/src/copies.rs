//! Files that a container has in place of its image's: copies of the host's. They are put there
//! before the container's program begins, and again while it runs, when the host's have changed.
//!
//! Every path is resolved in the container's root, or in that of the container's `file_dirs` in
//! which it is, so that a link of the image, or one that the container has made, leads at most to
//! another place in the same container. A program of the container sees the old file or the new
//! one: each is made aside and renamed.

use std::fs::{File as OpenFile, Permissions};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, OpenTreeFlags, mount_change, mount_remount, open_tree,
};
use rustix::process::{Gid, Uid};
use rustix::thread::{ThreadNameSpaceType, UnshareFlags, move_into_thread_name_spaces};
use slipway_agent_protocol::v1::{File, PutFilesRequest};

/// The name of a file that is not in its place yet, in the directory of that place.
const ASIDE: &str = ".slipway-new";
/// The beginning of the names of directories that hold a version of a volume's files, as Kubernetes
/// makes them.
const VERSION: &str = "..";

/// Puts files into the root of a container that runs, and removes files from it. `process` is a
/// pidfd of one of the container's.
///
/// # Errors
/// The first failure. All files that could be put into their places are there, and all that could
/// be removed are removed: a container that keeps one from its place does not hold up the others.
pub async fn replace(process: OwnedFd, request: PutFilesRequest) -> Result<()> {
    within(move || writable_root(&process).and_then(|root| apply(root.as_fd(), &request))).await
}

/// Runs `work` on a thread of its own: one that has entered a namespace of a container stays there
/// until it ends.
///
/// # Errors
/// The error of `work`; no thread can be started.
pub async fn within<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    std::thread::Builder::new().name("copies".to_owned()).spawn(move || {
        // Without a receiver nobody asks any more.
        let _ = sender.send(work());
    })?;
    receiver.await.context("the files' thread ended")?
}

/// Puts the files of a request below `root`, and then removes files. The umask must be empty.
///
/// # Errors
/// The first failure. All others were done.
pub fn apply(root: BorrowedFd<'_>, request: &PutFilesRequest) -> Result<()> {
    let put = request.files.iter().map(|file| put(root, file));
    let removed = request.removed.iter().map(|path| remove(root, path));
    // All are tried before the first failure is returned.
    put.chain(removed).fold(Ok(()), Result::and)
}

/// Returns the root of a process's container, without what is mounted on it, and writable even if
/// the container's own is not. The calling thread is in a copy of the container's mount namespace
/// from then on.
pub fn writable_root(process: &OwnedFd) -> Result<OwnedFd> {
    empty_umask()?;
    move_into_thread_name_spaces(process.as_fd(), ThreadNameSpaceType::MOUNT)
        .context("joining the container's mount namespace")?;
    // SAFETY: only this thread's mount namespace changes. In a copy, the changes below leave the
    // container's own mounts as they are.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }.context("unshare")?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .context("making mounts private")?;
    mount_remount("/", MountFlags::BIND | MountFlags::NODEV, c"").context("the root")?;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    open_tree(CWD, "/", flags).context("cloning the mount of the root")
}

/// Gives the calling thread an empty umask, and a working directory and root of its own.
pub fn empty_umask() -> Result<()> {
    // SAFETY: only this thread's working directory, root and umask become its own; it uses none of
    // another thread's.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }.context("unshare")?;
    rustix::process::umask(Mode::empty());
    Ok(())
}

/// Puts a file in the place of what is at its path, and makes the directories that it needs. A link
/// at the path itself is replaced, too; a directory there is an error. The umask must be empty.
pub fn put(root: BorrowedFd<'_>, file: &File) -> Result<()> {
    let failed = || format!("writing {}", file.path);
    let (directory, name) = split(&file.path)?;
    let directory = make_directory(root, directory).with_context(failed)?;
    // An earlier attempt may have left one.
    let _ = rustix::fs::unlinkat(&directory, ASIDE, AtFlags::empty());
    let made = if file.link.is_empty() {
        make_file(directory.as_fd(), file)
    } else {
        make_link(directory.as_fd(), file)
    };
    let placed = made.and_then(|()| Ok(rustix::fs::renameat(&directory, ASIDE, &directory, name)?));
    if placed.is_err() {
        let _ = rustix::fs::unlinkat(&directory, ASIDE, AtFlags::empty());
    }
    placed.with_context(failed)
}

/// Writes a file in place, as the file `name` of a directory. Processes that have the file open see
/// the change.
pub fn fill(directory: BorrowedFd<'_>, name: &str, file: &File) -> Result<()> {
    write(directory, name, OFlags::TRUNC, file).with_context(|| format!("writing {}", file.path))
}

fn make_file(directory: BorrowedFd<'_>, file: &File) -> Result<()> {
    write(directory, ASIDE, OFlags::EXCL, file)
}

fn write(directory: BorrowedFd<'_>, name: &str, how: OFlags, file: &File) -> Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | how;
    let open = rustix::fs::openat(directory, name, flags, Mode::from_raw_mode(0o600))?;
    let mut open = OpenFile::from(open);
    open.write_all(&file.content)?;
    let owner = (Uid::from_raw(file.uid), Gid::from_raw(file.gid));
    rustix::fs::fchown(&open, Some(owner.0), Some(owner.1))?;
    // Exactly these bits, whatever the umask is; after the owner, with whom some bits go.
    Ok(open.set_permissions(Permissions::from_mode(file.mode & 0o777))?)
}

fn make_link(directory: BorrowedFd<'_>, file: &File) -> Result<()> {
    // Its owner stays root: a change by name could reach a file that the container moved there.
    Ok(rustix::fs::symlinkat(file.link.as_str(), directory, ASIDE)?)
}

/// Removes a file if it is there, and then the directories of a volume's version that are empty.
fn remove(root: BorrowedFd<'_>, path: &str) -> Result<()> {
    let (directory, name) = split(path)?;
    let removed = open_directory(root, directory)
        .and_then(|open| rustix::fs::unlinkat(open, name, AtFlags::empty()));
    match removed {
        Ok(()) | Err(Errno::NOENT) => remove_version(root, directory),
        Err(error) if is_containers(error) => {}
        Err(error) => return Err(error).with_context(|| format!("removing {path}")),
    }
    Ok(())
}

/// Returns whether an error says that the container has put something else in a file's place, or
/// protects it. That must not fail every later change of its other files.
fn is_containers(error: Errno) -> bool {
    matches!(error, Errno::ISDIR | Errno::NOTDIR | Errno::LOOP | Errno::BUSY | Errno::PERM)
}

/// Removes `directory` and those above it up to the one that holds a version, as far as they are
/// empty.
fn remove_version(root: BorrowedFd<'_>, directory: &str) {
    let is_version = |one: &Path| {
        one.file_name().is_some_and(|name| name.as_bytes().starts_with(VERSION.as_bytes()))
    };
    let path = Path::new(directory);
    if !path.ancestors().any(is_version) {
        return;
    }
    for one in path.ancestors() {
        let (Some(above), Some(name)) = (one.parent().and_then(Path::to_str), one.file_name())
        else {
            return;
        };
        let removed = open_directory(root, above)
            .and_then(|above| rustix::fs::unlinkat(above, name, AtFlags::REMOVEDIR));
        if removed.is_err() || is_version(one) {
            return;
        }
    }
}

/// Splits an absolute path into its directory, relative to the root, and its name.
pub fn split(path: &str) -> Result<(&str, &str)> {
    let parts = path.strip_prefix('/').and_then(|path| match path.rsplit_once('/') {
        None => Some(("", path)),
        parts => parts,
    });
    let parts = parts.filter(|(_, name)| !name.is_empty());
    parts.with_context(|| format!("{path:?} is no file's path"))
}

/// Opens a directory by its path relative to `root`; the empty path is the root.
pub fn open_directory(root: BorrowedFd<'_>, path: &str) -> Result<OwnedFd, Errno> {
    slipway_tar_tree::open_directory(root, Path::new(path))
}

/// Opens a directory, and makes it and those above it if they are missing.
fn make_directory(root: BorrowedFd<'_>, path: &str) -> Result<OwnedFd> {
    match open_directory(root, path) {
        Err(Errno::NOENT) => {}
        opened => return Ok(opened?),
    }
    let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
    let above = make_directory(root, above)?;
    match rustix::fs::mkdirat(&above, name, Mode::from_raw_mode(0o755)) {
        // Made meanwhile; a link that leads nowhere is told by the next call.
        Ok(()) | Err(Errno::EXIST) => Ok(open_directory(root, path)?),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    struct Root(tempfile::TempDir);

    impl Root {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn open(&self) -> OwnedFd {
            let flags = OFlags::PATH | OFlags::DIRECTORY;
            rustix::fs::open(self.0.path(), flags, Mode::empty()).unwrap()
        }

        fn at(&self, name: &str) -> std::path::PathBuf {
            self.0.path().join(name)
        }

        fn read(&self, name: &str) -> String {
            std::fs::read_to_string(self.at(name)).unwrap()
        }

        fn apply(&self, files: &[File], removed: &[&str]) -> Result<()> {
            let removed = removed.iter().map(|&path| path.to_owned()).collect();
            let request = PutFilesRequest { id: String::new(), files: files.to_vec(), removed };
            apply(self.open().as_fd(), &request)
        }
    }

    /// A file of the user who runs the test.
    fn file(path: &str, content: &str) -> File {
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let (path, content) = (path.to_owned(), content.as_bytes().to_vec());
        File { path, content, mode: 0o4640, uid, gid, link: String::new() }
    }

    fn link(path: &str, to: &str) -> File {
        File { link: to.to_owned(), ..file(path, "") }
    }

    #[test]
    fn a_file_takes_the_place_of_the_images() {
        let root = Root::new();
        std::fs::write(root.at("target"), "old").unwrap();
        symlink("target", root.at("link")).unwrap();
        for path in ["/link", "/a/b/fresh", "/a/b/fresh"] {
            root.apply(&[file(path, "new")], &[]).unwrap();
            assert_eq!(root.read(&path[1..]), "new");
            let metadata = std::fs::symlink_metadata(root.at(&path[1..])).unwrap();
            assert!(metadata.is_file());
            assert_eq!(metadata.permissions().mode() & 0o7777, 0o640);
        }
        assert_eq!(root.read("target"), "old");
        assert!(
            format!("{:#}", root.apply(&[file("/a/b", "x")], &[]).unwrap_err()).contains("/a/b")
        );
        assert_eq!(std::fs::read_dir(root.at("a")).unwrap().count(), 1);
        assert!(root.apply(&[file("x/y", "x")], &[]).is_err());
        assert!(root.apply(&[File::default()], &[]).is_err());
    }

    #[test]
    fn one_file_that_has_no_place_does_not_hold_up_the_others() {
        let root = Root::new();
        for path in ["taken", "second"] {
            std::fs::create_dir(root.at(path)).unwrap();
        }
        std::fs::write(root.at("old"), "old").unwrap();
        let files = [file("/taken", "x"), file("/second", "x"), file("/fresh", "new")];
        let error = root.apply(&files, &["no path", "/old"]).unwrap_err();
        assert!(format!("{error:#}").contains("/taken"), "the first failure: {error:#}");
        assert_eq!(root.read("fresh"), "new");
        assert!(!root.at("old").exists());
        assert!(root.apply(&[], &["no path", "/fresh"]).is_err());
        assert!(!root.at("fresh").exists());
    }

    #[test]
    fn links_of_the_container_lead_nowhere_else() {
        let (root, other) = (Root::new(), Root::new());
        symlink(other.0.path(), root.at("out")).unwrap();
        symlink("../../..", root.at("up")).unwrap();
        // An absolute link is one into the container's own root, where the path does not exist.
        assert!(root.apply(&[file("/out/a", "x")], &[]).is_err());
        root.apply(&[file("/up/a", "x")], &[]).unwrap();
        assert_eq!(root.read("a"), "x");
        assert_eq!(std::fs::read_dir(other.0.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_new_version_of_a_volume_takes_the_place_of_the_old_one() {
        let root = Root::new();
        let version = |number: u32, content| {
            let data = format!("..{number}");
            [
                file(&format!("/v/{data}/deep/x"), content),
                link("/v/..data", &data),
                link("/v/deep", "..data/deep"),
            ]
        };
        root.apply(&version(1, "one"), &[]).unwrap();
        assert_eq!(root.read("v/deep/x"), "one");
        std::fs::write(root.at("v/own"), "kept").unwrap();
        root.apply(&version(2, "two"), &["/v/..1/deep/x", "/v/gone", "/no/such"]).unwrap();
        assert_eq!(root.read("v/deep/x"), "two");
        let mut names: Vec<_> = std::fs::read_dir(root.at("v")).unwrap().flatten().collect();
        names.sort_by_key(std::fs::DirEntry::file_name);
        let names: Vec<_> = names.iter().map(|entry| entry.file_name()).collect();
        assert_eq!(names, ["..2", "..data", "deep", "own"]);
        // A directory that the container has made in a file's place stays.
        std::fs::create_dir(root.at("v/gone")).unwrap();
        root.apply(&[], &["/v/gone", "/v/own/below"]).unwrap();
        std::fs::remove_dir(root.at("v/gone")).unwrap();
        // The directory of a volume stays even if nothing is left in it.
        root.apply(&[], &["/v/..2/deep/x", "/v/..data", "/v/deep", "/v/own"]).unwrap();
        assert_eq!(std::fs::read_dir(root.at("v")).unwrap().count(), 0);
    }
}
