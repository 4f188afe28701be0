//! Files of the host that a container gets copies of.
//!
//! [`Copies`] reads a file or a directory ([`Copies::add`]), or a volume of Kubernetes' with the
//! links by which it is replaced ([`Copies::add_volume`]), and counts all against the bounds below.
//! No link in a directory leads out of it.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Dir, FileType, Mode, OFlags, ResolveFlags};

use crate::v1;

/// The most bytes of all files of a container: the daemon takes no more.
pub const MOST_BYTES: usize = 16 << 20;
/// The most bytes of a file, and of a volume of Kubernetes' that is copied. A configMap and a
/// secret have at most 1 MiB each; a projected volume may have several.
pub const MOST_FILE_BYTES: usize = 2 << 20;
/// The most files of a container: the daemon takes no more.
pub const MOST: usize = 4096;
/// The most directories of a container's own for its files: the daemon takes no more.
pub const MOST_DIRS: usize = 256;
/// The most bytes of a message to the daemon: all files of a container, with paths and links of
/// 1,024 bytes each.
pub const LARGEST_REQUEST: usize = 32 << 20;
/// The most entries of directories that are looked at for a container.
const MOST_ENTRIES: usize = 8192;
/// The most directories within each other.
const DEPTH: usize = 16;

/// The link in a volume of Kubernetes' that leads to the version of its files that is in force.
const CURRENT: &str = "..data";
/// How often a volume is read anew because its version was replaced meanwhile.
const ATTEMPTS: u32 = 5;

/// The reason why a file of the host cannot be copied into a container.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// It is a device, a socket or a pipe.
    #[error("{} is neither a file nor a directory", .0.display())]
    Kind(PathBuf),
    /// A symbolic link in a directory leads out of that directory.
    #[error("{} is a link out of the directory, and not followed", .0.display())]
    Outside(PathBuf),
    /// A name is not UTF-8.
    #[error("{} has a name that is not UTF-8", .0.display())]
    Name(PathBuf),
    /// There is more than a container can have.
    #[error(
        "{} is too large to copy: at most {MOST} files with {} MiB, of which a file, or a volume \
         of Kubernetes', has at most {} MiB, {DEPTH} directories deep; a volume holds more",
        .0.display(),
        MOST_BYTES >> 20,
        MOST_FILE_BYTES >> 20
    )]
    TooLarge(PathBuf),
}

impl CopyError {
    /// Returns the error with paths at and below `to` in place of those at and below `from`, by
    /// which a file was opened.
    #[must_use]
    pub fn moved(self, from: &Path, to: &Path) -> Self {
        let moved = |path: PathBuf| match path.strip_prefix(from).map(Path::to_owned) {
            Ok(rest) if rest.as_os_str().is_empty() => to.to_owned(),
            Ok(rest) => to.join(rest),
            Err(_) => path,
        };
        match self {
            Self::Read { path, source } => Self::Read { path: moved(path), source },
            Self::Kind(path) => Self::Kind(moved(path)),
            Self::Outside(path) => Self::Outside(moved(path)),
            Self::Name(path) => Self::Name(moved(path)),
            Self::TooLarge(path) => Self::TooLarge(moved(path)),
        }
    }
}

/// Copies of files: all of them count against the limits.
#[derive(Clone, Debug)]
pub struct Copies {
    files: Vec<v1::File>,
    bytes: usize,
    entries: usize,
    /// The most bytes.
    most: usize,
}

impl Default for Copies {
    /// Makes the copies of one container, of which there are none yet.
    fn default() -> Self {
        Self { files: Vec::new(), bytes: 0, entries: 0, most: MOST_BYTES }
    }
}

impl Copies {
    /// Makes the copies of one volume of Kubernetes'.
    pub fn of_volume() -> Self {
        Self { most: MOST_FILE_BYTES, ..Self::default() }
    }

    /// Reads a file of the host, or all files below a directory, for the path `target` in the
    /// container. A file takes the place of an earlier one with its path.
    ///
    /// Symbolic links to `host` are followed; those in a directory as long as they stay in it,
    /// since somebody else may have made them. Names that begin with `..` are left out: Kubernetes
    /// keeps the versions of a volume there, and links to the current one. No device, socket or
    /// pipe is waited for; a file system of the network may be.
    ///
    /// # Errors
    /// [`CopyError`], which names the file.
    pub fn add(&mut self, host: &Path, target: &str) -> Result<(), CopyError> {
        self.add_all(host, target, false)
    }

    /// Reads a part of a volume of Kubernetes', a file or a directory, as [`add`](Self::add) does.
    /// Files keep their owners.
    ///
    /// # Errors
    /// [`CopyError`], which names the file.
    pub fn add_part(&mut self, host: &Path, target: &str) -> Result<(), CopyError> {
        self.add_all(host, target, true)
    }

    fn add_all(&mut self, host: &Path, target: &str, owners: bool) -> Result<(), CopyError> {
        let opened = rustix::fs::open(host, FLAGS, Mode::empty());
        let top = opened.map_err(|errno| failed(errno, host))?;
        if file_type(&top, host)? != FileType::Directory {
            return self.add_file(top, host, target.to_owned(), owners);
        }
        let target = target.trim_end_matches('/');
        let walk = Walk { top: top.as_fd(), host, target, owners };
        self.add_below(&walk, "", 0)
    }

    /// Reads a volume of Kubernetes' that holds a few small files (a configMap, a secret), as it is
    /// kept there: a directory with the version that is in force, the link `..data` to it, and a
    /// link to each file through that. So a new version can take the place of all of the old one at
    /// once, and programs that watch for that see it. Files keep their owners. A directory without
    /// `..data` is read as by [`add`](Self::add).
    ///
    /// # Errors
    /// [`CopyError`], which names the file.
    pub fn add_volume(&mut self, host: &Path, target: &str) -> Result<(), CopyError> {
        let before = self.clone();
        for _ in 1..ATTEMPTS {
            match self.add_version(host, target) {
                // Kubernetes removes a version as soon as there is a new one.
                Err(CopyError::Read { source, .. }) if source.kind() == ErrorKind::NotFound => {
                    self.clone_from(&before);
                }
                outcome => return outcome,
            }
        }
        self.add_version(host, target)
    }

    fn add_version(&mut self, host: &Path, target: &str) -> Result<(), CopyError> {
        let current = host.join(CURRENT);
        let version = match std::fs::read_link(&current) {
            Ok(version) => version,
            Err(source) if source.kind() == ErrorKind::NotFound => return self.add(host, target),
            Err(source) => return Err(CopyError::Read { path: current, source }),
        };
        let mut parts = version.components();
        let (Some(Component::Normal(name)), None) = (parts.next(), parts.next()) else {
            return Err(CopyError::Outside(current));
        };
        let name = name.to_str().ok_or_else(|| CopyError::Name(current.clone()))?;
        let (path, target) = (host.join(name), target.trim_end_matches('/'));
        let opened = rustix::fs::open(&path, FLAGS | OFlags::NOFOLLOW, Mode::empty());
        let top = opened.map_err(|errno| failed(errno, &path))?;
        let below = format!("{target}/{name}");
        let walk = Walk { top: top.as_fd(), host: &path, target: &below, owners: true };
        self.add_below(&walk, "", 0)?;
        self.add_link(format!("{target}/{CURRENT}"), name.to_owned(), &current)?;
        for name in self.names(walk.open(".")?, &path)? {
            self.add_link(format!("{target}/{name}"), format!("{CURRENT}/{name}"), &path)?;
        }
        Ok(())
    }

    fn add_link(&mut self, target: String, link: String, path: &Path) -> Result<(), CopyError> {
        self.forget(&target);
        if self.files.len() == MOST {
            return Err(CopyError::TooLarge(path.to_owned()));
        }
        self.files.push(v1::File { path: target, link, mode: 0o777, ..v1::File::default() });
        Ok(())
    }

    /// Returns the files.
    pub fn into_files(self) -> Vec<v1::File> {
        self.files
    }

    fn add_file(
        &mut self,
        file: OwnedFd,
        path: &Path,
        target: String,
        owners: bool,
    ) -> Result<(), CopyError> {
        if file_type(&file, path)? != FileType::RegularFile {
            return Err(CopyError::Kind(path.to_owned()));
        }
        let status = rustix::fs::fstat(&file).map_err(|errno| failed(errno, path))?;
        self.forget(&target);
        let (mut content, left) = (Vec::new(), (self.most - self.bytes).min(MOST_FILE_BYTES));
        let read = File::from(file).take(left as u64 + 1).read_to_end(&mut content);
        read.map_err(|source| CopyError::Read { path: path.to_owned(), source })?;
        if content.len() > left || self.files.len() == MOST {
            return Err(CopyError::TooLarge(path.to_owned()));
        }
        self.bytes += content.len();
        let (uid, gid) = if owners { (status.st_uid, status.st_gid) } else { (0, 0) };
        let (mode, link) = (status.st_mode & 0o777, String::new());
        self.files.push(v1::File { path: target, content, mode, uid, gid, link });
        Ok(())
    }

    fn forget(&mut self, target: &str) {
        if let Some(at) = self.files.iter().position(|file| file.path == target) {
            self.bytes -= self.files.remove(at).content.len();
        }
    }

    /// Adds all files below the directory `below`, relative to the top; empty for the top itself.
    fn add_below(&mut self, walk: &Walk<'_>, below: &str, depth: usize) -> Result<(), CopyError> {
        let path = walk.path(below);
        // A link may lead back to a directory above.
        if depth == DEPTH {
            return Err(CopyError::TooLarge(path));
        }
        let directory = walk.open(if below.is_empty() { "." } else { below })?;
        for name in self.names(directory, &path)? {
            let relative = if below.is_empty() { name } else { format!("{below}/{name}") };
            let (file, path) = (walk.open(&relative)?, walk.path(&relative));
            if file_type(&file, &path)? == FileType::Directory {
                self.add_below(walk, &relative, depth + 1)?;
            } else {
                self.add_file(file, &path, format!("{}/{relative}", walk.target), walk.owners)?;
            }
        }
        Ok(())
    }

    /// Returns the names in a directory that count, in order.
    fn names(&mut self, directory: OwnedFd, path: &Path) -> Result<Vec<String>, CopyError> {
        let mut names = Vec::new();
        for entry in Dir::new(directory).map_err(|errno| failed(errno, path))? {
            let entry = entry.map_err(|errno| failed(errno, path))?;
            self.entries += 1;
            if self.entries > MOST_ENTRIES {
                return Err(CopyError::TooLarge(path.to_owned()));
            }
            let name = entry.file_name().to_str();
            names.push(name.map_err(|_| CopyError::Name(path.to_owned()))?.to_owned());
        }
        names.retain(|name| name != "." && !name.starts_with(".."));
        names.sort();
        Ok(names)
    }
}

/// How files are opened: nothing that may be in a place of a file makes the open wait.
const FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// A directory of the host that is copied.
struct Walk<'a> {
    top: std::os::fd::BorrowedFd<'a>,
    host: &'a Path,
    target: &'a str,
    /// Set if files keep their owners; else they are root's.
    owners: bool,
}

impl Walk<'_> {
    fn path(&self, relative: &str) -> PathBuf {
        if relative.is_empty() { self.host.to_owned() } else { self.host.join(relative) }
    }

    /// Opens a path relative to the top, which it does not leave.
    fn open(&self, relative: &str) -> Result<OwnedFd, CopyError> {
        let within = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let opened = rustix::fs::openat2(self.top, relative, FLAGS, Mode::empty(), within);
        opened.map_err(|errno| match errno {
            rustix::io::Errno::XDEV => CopyError::Outside(self.path(relative)),
            errno => failed(errno, &self.path(relative)),
        })
    }
}

fn failed(errno: rustix::io::Errno, path: &Path) -> CopyError {
    match errno {
        // A socket.
        rustix::io::Errno::NXIO => CopyError::Kind(path.to_owned()),
        errno => CopyError::Read { path: path.to_owned(), source: errno.into() },
    }
}

fn file_type(file: &OwnedFd, path: &Path) -> Result<FileType, CopyError> {
    let status = rustix::fs::fstat(file).map_err(|errno| failed(errno, path))?;
    Ok(FileType::from_raw_mode(status.st_mode))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn read(host: &Path, target: &str) -> Result<Vec<v1::File>, CopyError> {
        let mut copies = Copies::default();
        copies.add(host, target).map(|()| copies.into_files())
    }

    fn paths(files: &[v1::File]) -> Vec<&str> {
        files.iter().map(|file| file.path.as_str()).collect()
    }

    #[test]
    fn a_file_has_its_content_and_permission_bits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one");
        fs::write(&path, "text").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o4640)).unwrap();
        let (content, mode) = (b"text".to_vec(), 0o640);
        let expected = v1::File { path: "/etc/a".into(), content, mode, ..Default::default() };
        assert_eq!(read(&path, "/etc/a").unwrap(), [expected]);
    }

    #[test]
    fn a_directory_is_all_its_files_as_kubernetes_lays_them_out() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("..2026")).unwrap();
        fs::write(dir.path().join("..2026/key"), "secret").unwrap();
        symlink("..2026", dir.path().join("..data")).unwrap();
        symlink("..data/key", dir.path().join("key")).unwrap();
        fs::create_dir(dir.path().join("more")).unwrap();
        fs::write(dir.path().join("more/x"), "").unwrap();
        let files = read(dir.path(), "/run/secrets/").unwrap();
        assert_eq!(paths(&files), ["/run/secrets/key", "/run/secrets/more/x"]);
        assert_eq!(files[0].content, b"secret");
    }

    #[test]
    fn a_volume_of_kubernetes_keeps_its_versions_and_owners() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("..2026/deep")).unwrap();
        fs::write(at("..2026/deep/x"), "x").unwrap();
        fs::write(at("..2026/token"), "secret").unwrap();
        fs::write(at("stray"), "is in no version").unwrap();
        symlink("..2026", at("..data")).unwrap();
        let read = |target: &str| {
            let mut copies = Copies::default();
            copies.add_volume(dir.path(), target).map(|()| copies.into_files())
        };
        let files = read("/run/secrets/").unwrap();
        let links: Vec<_> = files.iter().map(|f| (f.path.as_str(), f.link.as_str())).collect();
        let expected = [
            ("/run/secrets/..2026/deep/x", ""),
            ("/run/secrets/..2026/token", ""),
            ("/run/secrets/..data", "..2026"),
            ("/run/secrets/deep", "..data/deep"),
            ("/run/secrets/token", "..data/token"),
        ];
        assert_eq!(links, expected);
        let owner = std::os::unix::fs::MetadataExt::uid(&fs::metadata(at("..2026")).unwrap());
        assert_eq!((&files[1].content[..], files[1].uid), (&b"secret"[..], owner));
        // A version that is another directory's, or is gone, is an error.
        for (version, reason) in [("../etc", "link out of"), ("..2027", "cannot read")] {
            fs::remove_file(at("..data")).unwrap();
            symlink(version, at("..data")).unwrap();
            let error = read("/a").unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        fs::remove_file(at("..data")).unwrap();
        assert_eq!(paths(&read("/a").unwrap()), ["/a/stray"]);
    }

    #[test]
    fn too_much_is_refused_whatever_its_shape() {
        let dir = tempfile::tempdir().unwrap();
        let large = |path: &Path| matches!(read(path, "/a"), Err(CopyError::TooLarge(_)));
        let file = dir.path().join("large");
        fs::write(&file, vec![0; MOST_FILE_BYTES]).unwrap();
        assert_eq!(read(&file, "/a").unwrap().len(), 1);
        fs::write(&file, vec![0; MOST_FILE_BYTES + 1]).unwrap();
        assert!(large(&file));
        fs::remove_file(&file).unwrap();
        symlink(".", dir.path().join("again")).unwrap();
        assert!(large(dir.path()));
        fs::remove_file(dir.path().join("again")).unwrap();
        (0..=MOST_ENTRIES / 64).for_each(|one| {
            let one = dir.path().join(one.to_string());
            (0..64).for_each(|two| fs::create_dir_all(one.join(two.to_string())).unwrap());
        });
        assert!(large(dir.path()));
    }

    #[test]
    fn all_copies_of_a_container_count_together_and_later_ones_replace() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("part");
        fs::write(&file, vec![0; MOST_FILE_BYTES]).unwrap();
        let (mut copies, parts) = (Copies::default(), MOST_BYTES / MOST_FILE_BYTES);
        for target in (0..parts).chain(0..parts) {
            copies.add(&file, &format!("/{target}")).unwrap();
        }
        fs::write(&file, "x").unwrap();
        assert!(matches!(copies.add(&file, "/c"), Err(CopyError::TooLarge(_))));
        copies.add(&file, "/1").unwrap();
        assert_eq!(copies.into_files().len(), parts);
    }

    #[test]
    fn the_files_of_a_volume_count_together_and_a_part_keeps_owners() {
        let dir = tempfile::tempdir().unwrap();
        let half = dir.path().join("half");
        fs::write(&half, vec![0; MOST_FILE_BYTES / 2]).unwrap();
        let mut copies = Copies::of_volume();
        for target in ["/a", "/b"] {
            copies.add_part(&half, target).unwrap();
        }
        fs::write(&half, "x").unwrap();
        assert!(matches!(copies.add_part(&half, "/c"), Err(CopyError::TooLarge(_))));
        let owner = std::os::unix::fs::MetadataExt::uid(&fs::metadata(&half).unwrap());
        assert!(copies.into_files().iter().all(|file| file.uid == owner));
    }

    #[test]
    fn an_error_names_the_file_by_another_path() {
        let moved = |path: &str| {
            let error = CopyError::Kind(path.into()).moved(Path::new("/proc/9"), Path::new("/v"));
            error.to_string().split(' ').next().unwrap().to_owned()
        };
        assert_eq!(["/proc/9", "/proc/9/a/b", "/proc/91"].map(moved), ["/v", "/v/a/b", "/proc/91"]);
    }

    #[test]
    fn a_link_in_a_directory_does_not_lead_out_of_it() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let secret = outside.path().join("secret");
        fs::write(&secret, "secret").unwrap();
        symlink(&secret, dir.path().join("link")).unwrap();
        assert!(matches!(read(dir.path(), "/a"), Err(CopyError::Outside(_))));
        // The path that the caller names may be a link.
        assert_eq!(read(&dir.path().join("link"), "/a").unwrap()[0].content, b"secret");
        fs::remove_file(dir.path().join("link")).unwrap();
        symlink(outside.path(), dir.path().join("link")).unwrap();
        assert!(matches!(read(dir.path(), "/a"), Err(CopyError::Outside(_))));
        assert_eq!(read(&dir.path().join("link"), "/a").unwrap().len(), 1);
    }

    #[test]
    fn a_pipe_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let (path, mode) = (dir.path().join("pipe"), Mode::from_raw_mode(0o600));
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, mode, 0).unwrap();
        assert!(matches!(read(&path, "/a"), Err(CopyError::Kind(_))));
        assert!(matches!(read(dir.path(), "/a"), Err(CopyError::Kind(_))));
    }

    #[test]
    fn what_is_no_file_is_named() {
        let error = read(Path::new("/dev/null"), "/a").unwrap_err().to_string();
        assert_eq!(error, "/dev/null is neither a file nor a directory");
        let error = read(Path::new("/no/such"), "/a").unwrap_err().to_string();
        assert!(error.starts_with("cannot read /no/such: "), "{error}");
    }
}
