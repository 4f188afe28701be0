//! Files of the host that a container has copies of, and whether they have changed since.
//!
//! A source is resolved once, when the container is made, as a mount's is. Later it is opened
//! without following any link: whoever can write to a directory above must not choose another file
//! of the host.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use serde::{Deserialize, Serialize};
use slipway_sandbox_api::copies::{CopyError, MOST, MOST_BYTES};
use slipway_sandbox_api::v1;

use crate::spec::{self, Mount};
use crate::store::name;

/// A file or directory of the host that a container has a copy of.
#[derive(Debug, Serialize, Deserialize)]
pub struct Copy {
    mount: Mount,
    /// The mount's source without links.
    source: PathBuf,
    /// The version that the container has; `None` until it has one.
    stamp: Option<Stamp>,
    /// The paths of the copies, and of those that an attempt to put them may have left.
    paths: BTreeSet<String>,
    /// The paths that a later mount has its own files at.
    hidden: BTreeSet<String>,
}

/// The version of a mount's files. It changes when they do.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Stamp {
    /// A volume of Kubernetes': the directory that its link `..data` names.
    Version(PathBuf),
    /// Inode, size, and the time of its last change in ns.
    File(u64, u64, i128),
}

impl Stamp {
    /// Returns the version of what was opened at `path`.
    fn of(path: &Path) -> io::Result<Self> {
        if let Ok(version) = fs::read_link(path.join("..data")) {
            return Ok(Self::Version(version));
        }
        let status = fs::metadata(path)?;
        let changed = i128::from(status.ctime()) * 1_000_000_000 + i128::from(status.ctime_nsec());
        Ok(Self::File(status.ino(), status.size(), changed))
    }
}

/// A version of a copy, to be noted with [`Copy::has`] or [`Copy::may_have`].
pub struct Version {
    stamp: Stamp,
    paths: BTreeSet<String>,
}

/// An open source, and a path that leads to it whatever becomes of its own.
struct Opened {
    path: PathBuf,
    _file: OwnedFd,
}

impl Copy {
    /// Resolves a mount's source.
    fn new(mount: Mount) -> Result<Self, String> {
        let source = fs::canonicalize(&mount.source)
            .map_err(|error| unreadable(&mount, mount.source.as_ref(), error))?;
        let (paths, hidden) = (BTreeSet::new(), BTreeSet::new());
        Ok(Self { mount, source, stamp: None, paths, hidden })
    }

    /// Returns the beginning of the names of the files in the store with a container's copies.
    pub fn files(task: &str) -> String {
        name("copy", &[task]) + "-"
    }

    /// Returns the name of the file in the store with this copy of a container.
    pub fn file(&self, task: &str) -> String {
        Self::files(task) + &name("of", &[&self.mount.destination])
    }

    fn open(&self) -> io::Result<Opened> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let no_links = ResolveFlags::NO_SYMLINKS;
        let file = rustix::fs::openat2(CWD, &self.source, flags, Mode::empty(), no_links)?;
        Ok(Opened { path: format!("/proc/self/fd/{}", file.as_raw_fd()).into(), _file: file })
    }

    /// Reads the files again if they have changed. Returns `None` if they have not, else the new
    /// version, and the request for it without the container's name. May wait for a file system of
    /// the host.
    ///
    /// # Errors
    /// One line that names the file. A volume without a version that had one is an error, too: the
    /// host is about to remove it, which is no reason to remove the container's files.
    pub fn change(&self) -> Result<Option<(Version, v1::PutFilesRequest)>, String> {
        let failed = |error| unreadable(&self.mount, &self.source, error);
        let opened = self.open().map_err(failed)?;
        // Before the files: what changes meanwhile is read again.
        let stamp = Stamp::of(&opened.path).map_err(failed)?;
        if self.stamp.as_ref() == Some(&stamp) {
            return Ok(None);
        }
        if let (Some(Stamp::Version(_)), Stamp::File(..)) = (&self.stamp, &stamp) {
            return Err(failed(io::Error::other("the volume has no version any more")));
        }
        let mut files = self.read(&opened)?;
        files.retain(|file| !self.hidden.contains(&file.path));
        let paths: BTreeSet<_> = files.iter().map(|file| file.path.clone()).collect();
        let gone = self.paths.difference(&paths).filter(|path| !self.hidden.contains(*path));
        let removed = gone.cloned().collect();
        let request = v1::PutFilesRequest { name: String::new(), files, removed };
        Ok(Some((Version { stamp, paths }, request)))
    }

    /// Reads the files of the opened source. An error names the source, not the descriptor.
    fn read(&self, opened: &Opened) -> Result<Vec<v1::File>, String> {
        let read = spec::read_copy(&self.mount, &opened.path);
        let (descriptor, source) = (opened.path.display().to_string(), self.source.display());
        read.map_err(|error| error.replace(&descriptor, &source.to_string()))
    }

    /// Notes that the container has a version.
    pub fn has(&mut self, version: Version) {
        (self.stamp, self.paths) = (Some(version.stamp), version.paths);
    }

    /// Notes that the container may have files of a version: the next one removes those that it
    /// does not replace.
    pub fn may_have(&mut self, version: Version) {
        self.paths.extend(version.paths);
    }
}

fn unreadable(mount: &Mount, path: &Path, source: io::Error) -> String {
    let path = path.to_owned();
    spec::refused(mount, &CopyError::Read { path, source }.to_string())
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
        // A new copy has no version yet.
        let Some((version, request)) = copy.change()? else { continue };
        for earlier in &mut copies {
            earlier.hidden.extend(version.paths.iter().cloned());
        }
        all.retain(|file| !version.paths.contains(&file.path));
        all.extend(request.files);
        let bytes: usize = all.iter().map(|file| file.content.len()).sum();
        if all.len() > MOST || bytes > MOST_BYTES {
            let error = CopyError::TooLarge(copy.source.clone());
            return Err(spec::refused(&copy.mount, &error.to_string()));
        }
        copy.has(version);
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

    fn mount(source: &Path, destination: &str) -> Mount {
        Mount {
            source: source.display().to_string(),
            destination: destination.to_owned(),
            kind: "bind".to_owned(),
            options: Vec::new(),
        }
    }

    #[test]
    fn a_file_of_a_later_mount_is_neither_replaced_nor_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (etc, resolver) = (dir.path().join("etc"), dir.path().join("resolver"));
        fs::create_dir(&etc).unwrap();
        for file in [etc.join("resolv.conf"), etc.join("app"), resolver.clone()] {
            fs::write(file, "").unwrap();
        }
        let mounts = vec![mount(&etc, "/etc"), mount(&resolver, "/etc/resolv.conf")];
        let (mut copies, files) = read(mounts).unwrap();
        assert_eq!(paths(&files), ["/etc/app", "/etc/resolv.conf"]);
        // Its directory changes with a file in it.
        fs::rename(etc.join("app"), etc.join("new")).unwrap();
        let (version, request) = copies[0].change().unwrap().unwrap();
        assert_eq!(
            (paths(&request.files), request.removed),
            (vec!["/etc/new"], vec!["/etc/app".to_owned()])
        );
        copies[0].has(version);
        fs::remove_file(etc.join("resolv.conf")).unwrap();
        let (_, request) = copies[0].change().unwrap().unwrap();
        assert_eq!((paths(&request.files), request.removed.len()), (vec!["/etc/new"], 0));
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
        let mounts = vec![mount(&hosts, "/etc/hosts"), mount(&volume, "/c")];
        let (mut copies, files) = read(mounts).unwrap();
        assert_eq!(paths(&files), ["/etc/hosts", "/c/..1/a", "/c/..data", "/c/a"]);
        assert!(copies.iter().all(|copy| copy.change().unwrap().is_none()));
        version("..2", "b");
        assert!(copies[0].change().unwrap().is_none());
        let (version_2, request) = copies[1].change().unwrap().unwrap();
        assert_eq!(paths(&request.files), ["/c/..2/b", "/c/..data", "/c/b"]);
        assert_eq!(request.files[1].link, "..2");
        assert_eq!(request.removed, ["/c/..1/a", "/c/a"]);
        // The next version removes the files that a failed attempt may have left.
        copies[1].may_have(version_2);
        version("..3", "a");
        let (version_3, request) = copies[1].change().unwrap().unwrap();
        assert_eq!(request.removed, ["/c/..1/a", "/c/..2/b", "/c/b"]);
        copies[1].has(version_3);
        assert!(copies[1].change().unwrap().is_none());
        // A file that was replaced, with as many bytes.
        fs::write(dir.path().join("new"), "two").unwrap();
        fs::rename(dir.path().join("new"), &hosts).unwrap();
        let (_, request) = copies[0].change().unwrap().unwrap();
        assert_eq!((&request.files[0].content[..], request.removed.len()), (&b"two"[..], 0));
        // A volume that the host is removing: an error that names it, and nothing is removed.
        fs::remove_file(volume.join("..data")).unwrap();
        let error = copies[1].change().err().unwrap();
        assert!(error.contains("app") && error.contains("no version any more"), "{error}");
        symlink("..4", volume.join("..data")).unwrap();
        let error = copies[1].change().err().unwrap();
        assert!(error.contains("app/..4") && !error.contains("/proc"), "{error}");
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
