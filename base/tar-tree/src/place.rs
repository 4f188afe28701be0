//! Paths of sources and of places, by docker's rules, resolved within a root.

use std::ffi::{OsStr, OsString};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::Error;

/// The times that a path is resolved while renames disturb it. Others may rename all the time, so
/// there is an end.
const ATTEMPTS: u32 = 32;
/// The most symbolic links at the end of a path, as in path_resolution(7).
const LINKS: u32 = 40;

/// Opens a directory by its path within `root`, which links and `..` do not lead out of. The path
/// may be absolute; the empty path is the root.
///
/// # Errors
/// The errors of openat2(2).
pub fn open_directory(root: BorrowedFd<'_>, path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let within = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    again(|| rustix::fs::openat2(root, path, flags, Mode::empty(), within))
}

/// Repeats a call, up to [`ATTEMPTS`] times, that a rename anywhere on the machine may have
/// disturbed while it resolved a path: the kernel then cannot tell that `..` stays in the root
/// (openat2(2), `EAGAIN`).
pub(crate) fn again<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    let mut attempts = 1..ATTEMPTS;
    loop {
        match call() {
            Err(Errno::AGAIN) if attempts.next().is_some() => {}
            outcome => return outcome,
        }
    }
}

/// A file or directory that is to be packed.
pub struct Found {
    /// The directory that has it.
    pub(crate) directory: OwnedFd,
    /// Its name there; `.` is the directory itself.
    pub(crate) name: OsString,
    is_directory: bool,
}

impl Found {
    /// Returns whether it is a directory.
    pub fn is_directory(&self) -> bool {
        self.is_directory
    }
}

/// Finds what is at the absolute path `path` within `root`. A symbolic link at the end is the
/// source itself unless `follow` is set or the path ends with a slash.
///
/// # Errors
/// [`Error::File`] if nothing is there; [`Error::Refused`] if it is a device, a pipe or a socket.
pub fn find(root: BorrowedFd<'_>, path: &Path, follow: bool) -> Result<Found, Error> {
    let failed = |errno: Errno| Error::file(path, errno);
    let (directory, name) = match ends_as_directory(path) || follow {
        true => last(root, path).map_err(failed)?,
        false => {
            let (above, name) = split(path);
            (open_directory(root, above).map_err(failed)?, name.to_owned())
        }
    };
    let stat = rustix::fs::statat(&directory, name.as_os_str(), AtFlags::SYMLINK_NOFOLLOW);
    let kind = FileType::from_raw_mode(stat.map_err(failed)?.st_mode);
    match kind {
        FileType::Directory | FileType::RegularFile | FileType::Symlink => {
            Ok(Found { directory, name, is_directory: kind == FileType::Directory })
        }
        _ => Err(Error::refused(path, "it is a device, a pipe or a socket, which is not copied")),
    }
}

/// A file or directory that is to be copied, as far as that decides on its place.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// It is a directory.
    pub is_directory: bool,
    /// Only what is in the directory is copied ([`is_contents`]).
    pub is_contents: bool,
    /// Its name, which it keeps in a directory that is there.
    pub name: &'a OsStr,
}

/// Returns whether the path of a source stands for what is in the directory, in place of the
/// directory: it ends with `/.`, or is `.` or the root.
pub fn is_contents(path: &Path) -> bool {
    let bytes = path.as_os_str().as_bytes();
    bytes == b"." || bytes.ends_with(b"/.") || bytes.iter().all(|byte| *byte == b'/')
}

/// The place at which an archive is unpacked.
pub struct Place {
    /// The directory below which all of it is.
    pub(crate) directory: OwnedFd,
    pub(crate) top: Top,
}

/// The meaning of the first names of an archive's entries.
pub(crate) enum Top {
    /// Each entry has its own path below the directory.
    Entries,
    /// All entries are [`crate::TOP`] and what is in it.
    Tree {
        /// The name of that in the directory; `None`: it is the directory.
        name: Option<OsString>,
        is_directory: bool,
    },
}

/// Decides where a source is to be that is copied to the absolute path `path` within `root`. A
/// directory that is there gets the source under its own name; otherwise the source gets the name
/// that the path ends with, for which the directory above must be there. An archive without a
/// source, whose entries keep their paths, needs a directory that is there.
///
/// # Errors
/// [`Error::File`], [`Error::Refused`]: there is no such place.
pub fn place(
    root: BorrowedFd<'_>,
    path: &Path,
    source: Option<Source<'_>>,
) -> Result<Place, Error> {
    let opened = open_directory(root, path);
    let Some(source) = source else {
        let directory = opened.map_err(|errno| Error::file(path, errno))?;
        return Ok(Place { directory, top: Top::Entries });
    };
    place_of(opened, path, source, |path| last(root, path))
}

/// Decides where a source is to be, as [`place`] does, without following a symbolic link at the end
/// of `path`, unless the path ends as that of a directory and the link leads to one.
///
/// # Errors
/// The errors of [`place`]; [`Error::Refused`] if a link is there.
pub fn place_itself(root: BorrowedFd<'_>, path: &Path, source: Source<'_>) -> Result<Place, Error> {
    let itself = |path: &Path| -> Result<(OwnedFd, OsString), Errno> {
        let (above, name) = split(path);
        Ok((open_directory(root, above)?, name.to_owned()))
    };
    if ends_as_directory(path) {
        return place_of(open_directory(root, path), path, source, itself);
    }
    let opened = itself(path).and_then(|(directory, name)| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let alone = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let name = name.as_os_str();
        again(|| rustix::fs::openat2(&directory, name, flags, Mode::empty(), alone))
    });
    if let Err(Errno::LOOP) = opened {
        return Err(Error::refused(path, "a symbolic link is there, which is not followed"));
    }
    place_of(opened, path, source, itself)
}

/// Decides where a source is to be by the outcome of opening `path` as a directory. `missing` finds
/// the directory and the name there of what is not there yet, or is no directory.
fn place_of(
    opened: Result<OwnedFd, Errno>,
    path: &Path,
    source: Source<'_>,
    missing: impl FnOnce(&Path) -> Result<(OwnedFd, OsString), Errno>,
) -> Result<Place, Error> {
    let Source { is_directory, is_contents, name } = source;
    let tree = |name| Top::Tree { name, is_directory };
    match opened {
        Ok(directory) if is_contents && is_directory => Ok(Place { directory, top: tree(None) }),
        Ok(directory) => {
            let name = plain(name)
                .ok_or_else(|| Error::refused(Path::new(name), "the source has no name"))?;
            Ok(Place { directory, top: tree(Some(name.to_owned())) })
        }
        Err(Errno::NOTDIR) if is_directory => {
            Err(Error::refused(path, "a directory cannot be copied to what is no directory"))
        }
        Err(Errno::NOENT | Errno::NOTDIR) if !is_directory && ends_as_directory(path) => {
            Err(Error::refused(path, "there is no such directory"))
        }
        Err(Errno::NOENT | Errno::NOTDIR) => {
            let (directory, name) =
                missing(without_slashes(path)).map_err(|errno| Error::file(path, errno))?;
            let name = plain(&name).ok_or_else(|| Error::refused(path, "no file can be there"))?;
            Ok(Place { directory, top: tree(Some(name.to_owned())) })
        }
        Err(errno) => Err(Error::file(path, errno)),
    }
}

/// Returns a name if it is one that a file can have.
fn plain(name: &OsStr) -> Option<&OsStr> {
    let bytes = name.as_bytes();
    let is_none = matches!(bytes, b"" | b"." | b"..") || bytes.contains(&b'/');
    (!is_none).then_some(name)
}

/// Returns whether a path can only be that of a directory: it ends with a slash, `.` or `..`.
pub fn ends_as_directory(path: &Path) -> bool {
    let bytes = path.as_os_str().as_bytes();
    let last = bytes.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    matches!(last, b"" | b"." | b"..")
}

fn without_slashes(path: &Path) -> &Path {
    let mut bytes = path.as_os_str().as_bytes();
    while let [rest @ .., b'/'] = bytes {
        bytes = rest;
    }
    Path::new(OsStr::from_bytes(bytes))
}

/// Splits a path into that of the directory and the name behind the last slash.
fn split(path: &Path) -> (&Path, &OsStr) {
    let bytes = path.as_os_str().as_bytes();
    let name = bytes.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let above = &bytes[..bytes.len() - name.len()];
    (Path::new(OsStr::from_bytes(above)), OsStr::from_bytes(name))
}

/// Follows the symbolic links at the end of a path. Returns the directory and the name there of
/// what they lead to, which need not exist; `.` for a path that can only be a directory's.
fn last(root: BorrowedFd<'_>, path: &Path) -> Result<(OwnedFd, OsString), Errno> {
    let mut path = path.to_owned();
    for _ in 0..LINKS {
        if ends_as_directory(&path) {
            return Ok((open_directory(root, &path)?, OsString::from(".")));
        }
        let (above, name) = split(&path);
        let directory = open_directory(root, above)?;
        let link = match rustix::fs::readlinkat(&directory, name, Vec::<u8>::new()) {
            Err(Errno::INVAL | Errno::NOENT) => return Ok((directory, name.to_owned())),
            link => PathBuf::from(OsString::from_vec(link?.into_bytes())),
        };
        // An absolute link is one from the root.
        path = above.join(link);
    }
    Err(Errno::LOOP)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::symlink;

    use super::*;

    struct Root(tempfile::TempDir);

    impl Root {
        fn new() -> Self {
            let root = Self(tempfile::tempdir().unwrap());
            std::fs::create_dir_all(root.at("there/in")).unwrap();
            std::fs::write(root.at("file"), "x").unwrap();
            symlink("/there", root.at("link")).unwrap();
            symlink("../../../new", root.at("up")).unwrap();
            symlink("loop", root.at("loop")).unwrap();
            root
        }

        fn at(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn open(&self) -> OwnedFd {
            rustix::fs::open(self.0.path(), OFlags::PATH, Mode::empty()).unwrap()
        }

        /// Returns the directory's inode and the name of a place.
        fn place(&self, path: &str, source: Source<'_>) -> Result<(u64, Option<String>), Error> {
            let place = place(self.open().as_fd(), Path::new(path), Some(source))?;
            let Top::Tree { name, .. } = place.top else { panic!("no tree") };
            let name = name.map(|name| name.into_string().unwrap());
            Ok((rustix::fs::fstat(&place.directory).unwrap().st_ino, name))
        }

        fn inode(&self, name: &str) -> u64 {
            std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(self.at(name)).unwrap())
        }
    }

    fn source(is_directory: bool, is_contents: bool) -> Source<'static> {
        Source { is_directory, is_contents, name: OsStr::new("src") }
    }

    #[test]
    fn a_link_at_the_place_itself_is_not_followed() {
        let root = Root::new();
        let at = |path: &str, is_directory| {
            let place =
                place_itself(root.open().as_fd(), Path::new(path), source(is_directory, false))?;
            let Top::Tree { name, .. } = place.top else { panic!("no tree") };
            let name = name.map(|name| name.into_string().unwrap());
            Ok::<_, Error>((rustix::fs::fstat(&place.directory).unwrap().st_ino, name))
        };
        for path in ["/link", "/up", "/loop"] {
            for is_directory in [false, true] {
                let refused = at(path, is_directory).unwrap_err().to_string();
                assert!(refused.contains("a symbolic link is there"), "{path}: {refused}");
            }
        }
        let named = |name: &str| Some(name.to_owned());
        let (top, there) = (root.inode("."), root.inode("there"));
        assert_eq!(at("/link/", false).unwrap(), (there, named("src")));
        assert_eq!(at("/link/new", false).unwrap(), (there, named("new")));
        assert_eq!(at("/there", true).unwrap(), (there, named("src")));
        assert_eq!(at("/file", false).unwrap(), (top, named("file")));
        assert_eq!(at("/new", true).unwrap(), (top, named("new")));
        // No directory is made elsewhere: a link is there, which no directory replaces.
        assert_eq!(at("/up/", true).unwrap(), (top, named("up")));
        assert!(at("/new/", false).is_err() && at("/file", true).is_err());
    }

    #[test]
    fn a_file_is_put_where_docker_puts_it() {
        let root = Root::new();
        let put = |path| root.place(path, source(false, false));
        let (top, there) = (root.inode("."), root.inode("there"));
        for (path, directory, name) in [
            ("/there", there, "src"),
            ("/there/", there, "src"),
            ("/link", there, "src"),
            ("/", top, "src"),
            ("/there/new", there, "new"),
            ("/link/new", there, "new"),
            ("/file", top, "file"),
            // A link that leads nowhere, and not out of the root.
            ("/up", top, "new"),
            ("/there/../../../new", top, "new"),
        ] {
            assert_eq!(put(path).unwrap(), (directory, Some(name.to_owned())), "{path}");
        }
        for path in ["/new/", "/no/new", "/file/", "/file/new", "/loop", "/there/new/."] {
            assert!(put(path).is_err(), "{path}");
        }
    }

    #[test]
    fn a_directory_is_put_where_docker_puts_it() {
        let root = Root::new();
        let (top, there) = (root.inode("."), root.inode("there"));
        let named = |name: &str| Some(name.to_owned());
        for (path, is_contents, expected) in [
            ("/there", false, (there, named("src"))),
            ("/there", true, (there, None)),
            ("/link/", true, (there, None)),
            ("/new", false, (top, named("new"))),
            ("/new/", false, (top, named("new"))),
            ("/new", true, (top, named("new"))),
        ] {
            let put = root.place(path, source(true, is_contents)).unwrap();
            assert_eq!(put, expected, "{path} {is_contents}");
        }
        for path in ["/file", "/no/new", "/file/new", ""] {
            let put = root.place(path, source(true, false));
            assert_eq!(put.is_ok(), path.is_empty(), "{path}");
        }
        let root = root.open();
        assert!(place(root.as_fd(), Path::new("/there"), None).is_ok());
        assert!(place(root.as_fd(), Path::new("/new"), None).is_err());
    }

    #[test]
    fn a_link_is_the_source_unless_it_is_followed() {
        let root = Root::new();
        let kind = |path: &str, follow| {
            let found = find(root.open().as_fd(), Path::new(path), follow)?;
            Ok::<_, Error>((found.is_directory(), found.name.into_string().unwrap()))
        };
        let found = |is_directory, name: &str| (is_directory, name.to_owned());
        assert_eq!(kind("/link", false).unwrap(), found(false, "link"));
        assert_eq!(kind("/link", true).unwrap(), found(true, "there"));
        assert_eq!(kind("/link/", false).unwrap(), found(true, "."));
        assert_eq!(kind("/there/.", false).unwrap(), found(true, "."));
        assert_eq!(kind("/file", true).unwrap(), found(false, "file"));
        assert_eq!(kind("/there/../../../file", false).unwrap(), found(false, "file"));
        for path in ["/no", "/file/", "/loop/", "/no/file"] {
            assert!(kind(path, false).is_err(), "{path}");
        }
        assert!(kind("/up", true).is_err() && kind("/loop", true).is_err());
    }

    #[test]
    fn a_path_is_resolved_again_while_renames_disturb_it() {
        let mut calls = 0;
        let disturbed = |times: u32, calls: &mut u32| {
            again(|| {
                *calls += 1;
                if *calls > times { Ok(()) } else { Err(Errno::AGAIN) }
            })
        };
        assert_eq!((disturbed(3, &mut calls), calls), (Ok(()), 4));
        calls = 0;
        assert_eq!((disturbed(u32::MAX, &mut calls), calls), (Err(Errno::AGAIN), ATTEMPTS));
        let mut refused = 0;
        let outcome: Result<(), _> = again(|| {
            refused += 1;
            Err(Errno::NOENT)
        });
        assert_eq!((outcome, refused), (Err(Errno::NOENT), 1));
    }

    #[test]
    fn contents_are_told_by_the_path() {
        for path in ["/.", ".", "a/.", "/a/b/.", "/", "//", ""] {
            assert!(is_contents(Path::new(path)), "{path}");
        }
        for path in ["/a", "a/", "..", "/a.", "a/.."] {
            assert!(!is_contents(Path::new(path)), "{path}");
        }
    }
}
