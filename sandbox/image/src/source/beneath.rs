//! Files below a folder whose owner nobody trusts, read by somebody with more rights.
//!
//! The owner may swap a folder for a symbolic link between any two looks at it. So nothing is looked up
//! twice: [`Beneath::look`] opens a name once, from the folder's own descriptor, with a lookup that the
//! kernel keeps below that folder and off every link (`openat2(2)`), and with `O_PATH`, which neither
//! waits for a FIFO nor wakes a device. What it is, its attributes, its names and its content are then
//! asked of that descriptor.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CString, OsStr, OsString};
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::root::read::is_kept;

/// Links on the way to a folder, as the kernel allows (path_resolution(7)).
const MAX_LINKS: usize = 40;
/// Longest value of an extended attribute, and of their list (xattr(7)).
const MAX_XATTR: usize = 64 << 10;

/// A folder, and what is in it.
pub(super) struct Beneath {
    root: OwnedFd,
}

impl Beneath {
    /// Opens the folder at `path`. A symbolic link on the way is followed if it is root's or the
    /// caller's own: another user's link could lead to what only the caller may read.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { root: walk(path)? })
    }

    /// What is at `path`, relative to the folder; `.` is the folder itself. Neither `path` nor any
    /// folder on the way is followed if it is a link, and `path` may be one.
    pub(super) fn look(&self, path: &Path) -> io::Result<Found> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        match rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve) {
            Ok(found) => Found::new(found),
            // It was listed a moment ago, and the way there had no link.
            Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR | Errno::XDEV | Errno::AGAIN) => {
                Err(changed())
            }
            Err(errno) => Err(errno.into()),
        }
    }
}

/// The error for what is not any more what it was.
pub(super) fn changed() -> io::Error {
    io::Error::other("changed while it was read")
}

/// One file of whatever type, open as a place only.
pub(super) struct Found {
    file: File,
    /// What the descriptor says.
    pub(super) meta: Metadata,
}

impl Found {
    fn new(place: OwnedFd) -> io::Result<Self> {
        let file = File::from(place);
        let meta = file.metadata()?;
        Ok(Self { file, meta })
    }

    /// This very file by a path, for calls that take no descriptor that is a place only.
    fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }

    /// The content of a regular file, or the folder, for reading.
    pub(super) fn read(&self) -> io::Result<File> {
        // A file under another process's lease is an error and no wait.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(rustix::fs::open(self.path(), flags, Mode::empty())?.into())
    }

    /// The names in a folder, sorted: the same folder must give the same digest. Returns `None` if
    /// there are more than `most`.
    pub(super) fn names(&self, most: usize) -> io::Result<Option<Vec<OsString>>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::new(self.read()?)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            if names.len() == most {
                return Ok(None);
            }
            names.push(OsStr::from_bytes(name).to_owned());
        }
        names.sort_unstable();
        Ok(Some(names))
    }

    /// Where a symbolic link leads.
    pub(super) fn target(&self) -> io::Result<Vec<u8>> {
        target(&self.file)
    }

    /// The extended attributes that an image keeps.
    pub(super) fn xattrs(&self) -> io::Result<BTreeMap<Vec<u8>, Vec<u8>>> {
        let (path, mut found) = (self.path(), BTreeMap::new());
        let mut names = vec![0; MAX_XATTR];
        let len = match rustix::fs::listxattr(&path, &mut names[..]) {
            Ok(len) => len,
            Err(Errno::NOTSUP) => return Ok(found),
            Err(errno) => return Err(errno.into()),
        };
        for name in names[..len].split(|&b| b == 0).filter(|name| is_kept(name)) {
            // Split at NULs, so there is none inside.
            let Ok(c_name) = CString::new(name) else { continue };
            let mut value = vec![0; MAX_XATTR];
            match rustix::fs::getxattr(&path, &c_name, &mut value[..]) {
                Ok(len) => {
                    value.truncate(len);
                    found.insert(name.to_vec(), value);
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

/// Opens the folder at `path` step by step, see [`Beneath::open`].
fn walk(path: &Path) -> io::Result<OwnedFd> {
    let start = || rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let mut at = start()?;
    let mut way = parts(&std::path::absolute(path)?);
    let mut links = 0;
    while let Some(name) = way.pop_front() {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let next = Found::new(rustix::fs::openat(&at, &name, flags, Mode::empty())?)?;
        if !next.meta.is_symlink() {
            at = next.file.into();
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
    let found = Found::new(at)?;
    match found.meta.is_dir() {
        true => Ok(found.file.into()),
        false => Err(io::Error::other("is no folder")),
    }
}

fn check_link(link: &Metadata, count: usize) -> io::Result<()> {
    let me = rustix::process::geteuid().as_raw();
    if link.uid() != 0 && link.uid() != me {
        let owner = link.uid();
        let text =
            format!("the way there is a link of user {owner}: name the folder that is meant");
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    match count > MAX_LINKS {
        true => Err(Errno::LOOP.into()),
        false => Ok(()),
    }
}

/// The names on a path, one after the other.
fn parts(path: &Path) -> VecDeque<OsString> {
    let names = path.components().filter(|part| !matches!(part, Component::RootDir));
    names.map(|part| part.as_os_str().to_owned()).collect()
}
