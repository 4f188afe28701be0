//! Files of the host that a container has copies of, and whether they have changed since.
//!
//! A source is resolved once, when the container is made, as a mount's is. Later it is opened
//! without following any link: whoever can write to a directory above must not choose another file
//! of the host.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use slipway_sandbox_api::copies::{CopyError, MOST, MOST_BYTES};
use slipway_sandbox_api::v1;

use crate::spec::{self, Mount};

/// A file or directory of the host that a container has a copy of.
pub struct Copy {
    mount: Mount,
    /// The mount's source without links.
    source: PathBuf,
    stamp: Option<Stamp>,
    /// The paths of the copies, and of those that an attempt to put them may have left.
    paths: Vec<String>,
    /// The paths that a later mount has its own files at.
    hidden: Vec<String>,
}

/// The version of a mount's files. It changes when they do.
#[derive(Debug, PartialEq, Eq)]
pub enum Stamp {
    /// A volume of Kubernetes': the directory that its link `..data` names.
    Version(PathBuf),
    /// Inode, size, and the time of its last change in ns.
    File(u64, u64, i128),
}

impl Stamp {
    /// Returns the version of what was opened at `path`, or `None` if nothing is there.
    fn of(path: &Path) -> Option<Self> {
        if let Ok(version) = fs::read_link(path.join("..data")) {
            return Some(Self::Version(version));
        }
        let status = fs::metadata(path).ok()?;
        let changed = i128::from(status.ctime()) * 1_000_000_000 + i128::from(status.ctime_nsec());
        Some(Self::File(status.ino(), status.size(), changed))
    }
}

/// New files of a copy.
pub struct Change {
    stamp: Option<Stamp>,
    /// The files that the container is to get, and those that it is to lose.
    pub request: v1::PutFilesRequest,
}

/// An open source, and a path that leads to it whatever becomes of its own.
struct Opened {
    path: PathBuf,
    _file: OwnedFd,
}

impl Copy {
    /// Resolves a mount's source.
    fn new(mount: Mount) -> Result<Self, String> {
        let source = fs::canonicalize(&mount.source).map_err(|source| {
            let path = PathBuf::from(&mount.source);
            spec::refused(&mount, &CopyError::Read { path, source }.to_string())
        })?;
        let (paths, hidden) = (Vec::new(), Vec::new());
        Ok(Self { mount, source, stamp: None, paths, hidden })
    }

    fn open(&self) -> Result<Opened, String> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let no_links = ResolveFlags::NO_SYMLINKS;
        let opened = rustix::fs::openat2(CWD, &self.source, flags, Mode::empty(), no_links);
        let file = opened.map_err(|errno| {
            let error = CopyError::Read { path: self.source.clone(), source: errno.into() };
            spec::refused(&self.mount, &error.to_string())
        })?;
        Ok(Opened { path: format!("/proc/self/fd/{}", file.as_raw_fd()).into(), _file: file })
    }

    /// Reads the files again if they have changed. `None` if they have not. May wait for a file
    /// system of the host.
    ///
    /// # Errors
    /// One line that names the file.
    pub fn change(&self) -> Result<Option<Change>, String> {
        let opened = self.open()?;
        // Before the files: what changes meanwhile is read again.
        let stamp = Stamp::of(&opened.path);
        if stamp == self.stamp {
            return Ok(None);
        }
        let mut files = spec::read_copy(&self.mount, &opened.path)?;
        files.retain(|file| !self.hidden.contains(&file.path));
        let is_gone = |path: &&String| !files.iter().any(|file| file.path == **path);
        let removed = self.paths.iter().filter(is_gone).cloned().collect();
        let request = v1::PutFilesRequest { name: String::new(), files, removed };
        Ok(Some(Change { stamp, request }))
    }

    /// Notes that the container was asked to take a change, and whether it has.
    pub fn note(&mut self, stamp: Option<Stamp>, paths: Vec<String>, is_put: bool) {
        if is_put {
            (self.stamp, self.paths) = (stamp, paths);
        } else {
            // Some of them may be there: the next attempt removes what it does not replace.
            let new = paths.into_iter().filter(|path| !self.paths.contains(path));
            let new: Vec<_> = new.collect();
            self.paths.extend(new);
        }
    }
}

impl Change {
    /// Returns what is to be noted, and what the container is to get.
    pub fn split(self) -> (Option<Stamp>, Vec<String>, v1::PutFilesRequest) {
        let paths = self.request.files.iter().map(|file| file.path.clone()).collect();
        (self.stamp, paths, self.request)
    }
}

/// Reads the files of these mounts. A later mount takes the place of an earlier one. May wait for a
/// file system of the host.
///
/// # Errors
/// One line that names the file.
pub fn read(mounts: Vec<Mount>) -> Result<(Vec<Copy>, Vec<v1::File>), String> {
    let (mut copies, mut all): (Vec<Copy>, Vec<v1::File>) = (Vec::new(), Vec::new());
    for mount in mounts {
        let mut copy = Copy::new(mount)?;
        let Some(change) = copy.change()? else { continue };
        let (stamp, paths, request) = change.split();
        for earlier in &mut copies {
            earlier.hidden.extend(paths.iter().cloned());
        }
        all.retain(|file| !paths.contains(&file.path));
        all.extend(request.files);
        let bytes: usize = all.iter().map(|file| file.content.len()).sum();
        if all.len() > MOST || bytes > MOST_BYTES {
            let error = CopyError::TooLarge(copy.source.clone());
            return Err(spec::refused(&copy.mount, &error.to_string()));
        }
        copy.note(stamp, paths, true);
        copies.push(copy);
    }
    Ok((copies, all))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn paths(files: &[v1::File]) -> Vec<&str> {
        files.iter().map(|file| file.path.as_str()).collect()
    }

    #[test]
    fn a_new_version_is_read_and_the_old_one_removed() {
        let dir = tempfile::tempdir().unwrap();
        let volume = dir.path().join("pods/0-1/volumes/kubernetes.io~configmap/app");
        let version = |name: &str, file: &str| {
            fs::create_dir_all(volume.join(name)).unwrap();
            fs::write(volume.join(name).join(file), name).unwrap();
            let aside = volume.join("..data_tmp");
            symlink(name, &aside).unwrap();
            fs::rename(aside, volume.join("..data")).unwrap();
        };
        version("..1", "a");
        let hosts = dir.path().join("hosts");
        fs::write(&hosts, "one").unwrap();
        let mount = |source: &Path, destination: &str| Mount {
            source: source.display().to_string(),
            destination: destination.to_owned(),
            kind: "bind".to_owned(),
            options: Vec::new(),
        };
        let mounts = vec![mount(&hosts, "/etc/hosts"), mount(&volume, "/c")];
        let (mut copies, files) = read(mounts).unwrap();
        assert_eq!(paths(&files), ["/etc/hosts", "/c/..1/a", "/c/..data", "/c/a"]);
        assert!(copies.iter().all(|copy| copy.change().unwrap().is_none()));
        version("..2", "b");
        assert!(copies[0].change().unwrap().is_none());
        let (stamp, put, request) = copies[1].change().unwrap().unwrap().split();
        assert_eq!(paths(&request.files), ["/c/..2/b", "/c/..data", "/c/b"]);
        assert_eq!(request.files[1].link, "..2");
        assert_eq!(request.removed, ["/c/..1/a", "/c/a"]);
        // What a failed attempt may have left goes with the next one.
        copies[1].note(stamp, put, false);
        version("..3", "a");
        let (stamp, put, request) = copies[1].change().unwrap().unwrap().split();
        assert_eq!(request.removed, ["/c/..1/a", "/c/..2/b", "/c/b"]);
        copies[1].note(stamp, put, true);
        assert!(copies[1].change().unwrap().is_none());
        // A file that was replaced, with as many bytes.
        fs::write(dir.path().join("new"), "two").unwrap();
        fs::rename(dir.path().join("new"), &hosts).unwrap();
        let (_, _, request) = copies[0].change().unwrap().unwrap().split();
        assert_eq!((&request.files[0].content[..], request.removed.len()), (&b"two"[..], 0));
        // A link in its place, or in that of a directory above, is not followed.
        let secret = tempfile::tempdir().unwrap();
        fs::write(secret.path().join("hosts"), "secret").unwrap();
        fs::remove_file(&hosts).unwrap();
        symlink(secret.path().join("hosts"), &hosts).unwrap();
        assert!(copies[0].change().is_err());
        let moved = volume.with_file_name("moved");
        fs::rename(&volume, &moved).unwrap();
        symlink(secret.path(), &volume).unwrap();
        assert!(copies[1].change().is_err());
    }
}
