//! Files below a folder of an untrusted owner, read by a process with more rights.
//!
//! The owner may swap a folder for a symbolic link between any two accesses. So nothing is looked
//! up twice. [`Beneath::look`] opens a name once, from the folder's own descriptor, with a lookup
//! that the kernel keeps below that folder and off every link (`openat2(2)`), and with `O_PATH`,
//! which neither waits for a FIFO nor wakes a device. Type, attributes, names and content are then
//! read through that descriptor.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, CString, OsStr, OsString};
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::root::read::is_kept;
use crate::root::tree::check_attributes;

/// The most links on the way to a folder, as in the kernel (path_resolution(7)).
const MAX_LINKS: usize = 40;
/// The most bytes of an extended attribute's value, and of the list of names (xattr(7)).
const MAX_XATTR: usize = 64 << 10;
/// The mode bits by which others than the owner may write, and by which only owners may remove
/// files of a folder (inode(7)).
const WRITABLE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// A folder and the files below it.
pub(super) struct Beneath {
    root: OwnedFd,
}

impl Beneath {
    /// Opens the folder at `path`. A symbolic link on the way is followed if it belongs to root or
    /// to the caller. Another user's link is refused: it could lead to files that only the caller
    /// may read.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let found = find(path, FolderPolicy::Any)?;
        match found.meta.is_dir() {
            true => Ok(Self { root: found.file.into() }),
            false => Err(io::Error::other("is no folder")),
        }
    }

    /// Opens the file at `path`, relative to the folder; `.` is the folder itself. Symbolic links
    /// are not followed, neither on the way nor at the end, where the link itself is opened.
    pub(super) fn look(&self, path: &Path) -> io::Result<OpenedFile> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        match rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve) {
            Ok(found) => OpenedFile::new(found),
            // The name was listed a moment ago, and the way to it had no link.
            Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR | Errno::XDEV | Errno::AGAIN) => {
                Err(changed())
            }
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Returns the error for a file that changed while it was read.
pub(super) fn changed() -> io::Error {
    io::Error::other("changed while it was read")
}

/// One file of any type, opened with `O_PATH`.
pub(super) struct OpenedFile {
    file: File,
    /// The metadata of the open file.
    pub(super) meta: Metadata,
}

impl OpenedFile {
    fn new(place: OwnedFd) -> io::Result<Self> {
        let file = File::from(place);
        let meta = file.metadata()?;
        Ok(Self { file, meta })
    }

    /// Refuses a folder in which another user than root and the caller may put another file in the
    /// place of one of theirs. With the sticky bit nobody else can.
    fn check_folder(&self) -> io::Result<()> {
        let mode = self.meta.mode();
        if is_ours(&self.meta) && (mode & WRITABLE == 0 || mode & STICKY != 0) {
            return Ok(());
        }
        let place = std::fs::read_link(self.path()).unwrap_or_default();
        Err(io::Error::other(format!(
            "the folder '{}' on the way to it has owner {} and mode {:o}, so another user may \
             change what is there: give a copy in a folder that you alone may write to",
            place.display(),
            self.meta.uid(),
            mode & 0o7777
        )))
    }

    /// Returns a path to exactly this file, for calls that do not accept an `O_PATH` descriptor.
    fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }

    /// Opens a regular file or a folder for reading. Does not follow the file's name again.
    pub(super) fn read(&self) -> io::Result<File> {
        // With `O_NONBLOCK`, a file under another process's lease is an error instead of a wait.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(rustix::fs::open(self.path(), flags, Mode::empty())?.into())
    }

    /// Returns the names in a folder, sorted, since the same folder must make the same digest.
    /// Calls `may_take` with the length of each name before memory is taken for it, and returns
    /// `None` if that returns `false`.
    pub(super) fn names(
        &self,
        mut may_take: impl FnMut(usize) -> bool,
    ) -> io::Result<Option<Vec<OsString>>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::new(self.read()?)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            if !may_take(name.len()) {
                return Ok(None);
            }
            names.push(OsStr::from_bytes(name).to_owned());
        }
        names.sort_unstable();
        Ok(Some(names))
    }

    /// Returns the target of a symbolic link.
    pub(super) fn target(&self) -> io::Result<Vec<u8>> {
        target(&self.file)
    }

    /// Returns the value of an extended attribute of at most 16 bytes. Returns `None` without one.
    pub(super) fn xattr(&self, name: &CStr) -> io::Result<Option<Vec<u8>>> {
        let mut value = [0; 16];
        match rustix::fs::getxattr(self.path(), name, &mut value[..]) {
            Ok(len) => Ok(Some(value[..len].to_vec())),
            // A longer value is there, and is none of those that are looked for.
            Err(Errno::RANGE) => Ok(Some(Vec::new())),
            Err(Errno::NODATA | Errno::NOTSUP) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns the extended attributes that an image keeps. Too many of them are an error.
    pub(super) fn xattrs(&self) -> io::Result<BTreeMap<Vec<u8>, Vec<u8>>> {
        let (path, mut found) = (self.path(), BTreeMap::new());
        let mut names = vec![0; MAX_XATTR];
        let len = match rustix::fs::listxattr(&path, &mut names[..]) {
            Ok(len) => len,
            Err(Errno::NOTSUP) => return Ok(found),
            Err(errno) => return Err(errno.into()),
        };
        let mut value = vec![0; MAX_XATTR];
        for name in names[..len].split(|&b| b == 0).filter(|name| is_kept(name)) {
            // The list was split at NULs, so a name contains none.
            let Ok(c_name) = CString::new(name) else { continue };
            match rustix::fs::getxattr(&path, &c_name, &mut value[..]) {
                Ok(len) => {
                    found.insert(name.to_vec(), value[..len].to_vec());
                    check_attributes(found.len()).map_err(io::Error::other)?;
                }
                Err(Errno::NODATA) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(found)
    }
}

fn target(link: impl AsFd) -> io::Result<Vec<u8>> {
    Ok(rustix::fs::readlinkat(link, c"", Vec::new())?.into_bytes())
}

/// The folders through which [`find`] goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FolderPolicy {
    Any,
    /// Folders in which no other user than root and the caller may put another file in the place of
    /// the next name.
    Unchangeable,
}

/// Opens the file of any type at `path` step by step. A symbolic link, on the way or at the end, is
/// followed with the checks of [`Beneath::open`].
pub(super) fn find(path: &Path, through: FolderPolicy) -> io::Result<OpenedFile> {
    let start = || {
        let root = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        OpenedFile::new(root?)
    };
    let mut at = start()?;
    let mut way = parts(&std::path::absolute(path)?);
    let mut links = 0;
    while let Some(name) = way.pop_front() {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if through == FolderPolicy::Unchangeable {
            at.check_folder()?;
        }
        let next = OpenedFile::new(rustix::fs::openat(&at.file, &name, flags, Mode::empty())?)?;
        if !next.meta.is_symlink() {
            at = next;
            continue;
        }
        links += 1;
        check_link(&next.meta, links)?;
        let target = PathBuf::from(OsString::from(OsStr::from_bytes(&next.target()?)));
        if target.is_absolute() {
            at = start()?;
        }
        for name in parts(&target).into_iter().rev() {
            way.push_front(name);
        }
    }
    Ok(at)
}

/// Refuses a file that another user than root and the caller may change.
pub(super) fn check_unchangeable(file: &Metadata) -> io::Result<()> {
    if is_ours(file) && file.mode() & WRITABLE == 0 {
        return Ok(());
    }
    let (uid, mode) = (file.uid(), file.mode() & 0o777);
    let why = "another user may change it: give a copy that you alone may write to";
    Err(io::Error::other(format!("owner {uid}, mode {mode:o}: {why}")))
}

fn is_ours(file: &Metadata) -> bool {
    [0, rustix::process::geteuid().as_raw()].contains(&file.uid())
}

fn check_link(link: &Metadata, count: usize) -> io::Result<()> {
    if !is_ours(link) {
        let owner = link.uid();
        let text = format!("the way there is a link of user {owner}: name what it leads to");
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    match count > MAX_LINKS {
        true => Err(Errno::LOOP.into()),
        false => Ok(()),
    }
}

/// Returns the names on a path, in order.
fn parts(path: &Path) -> VecDeque<OsString> {
    let names = path.components().filter(|part| !matches!(part, Component::RootDir));
    names.map(|part| part.as_os_str().to_owned()).collect()
}
