//! Files of the host that a container has copies of, and whether they have changed since.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use slipway_sandbox_api::v1;

use crate::spec::{self, Mount};

/// Files of the host that a container has copies of, as they were when they were read.
pub struct Copies {
    mounts: Vec<Mount>,
    stamps: Vec<Option<Stamp>>,
    /// The paths of the copies.
    paths: Vec<String>,
}

/// The version of a mount's files. It changes when they do.
#[derive(Debug, PartialEq, Eq)]
enum Stamp {
    /// A volume of Kubernetes': the directory that its link `..data` names.
    Version(PathBuf),
    /// Inode, size, and the time of its last change in ns.
    File(u64, u64, i128),
}

impl Stamp {
    /// Returns `None` if nothing is there.
    fn of(mount: &Mount) -> Option<Self> {
        let path = Path::new(&mount.source);
        if let Ok(version) = fs::read_link(path.join("..data")) {
            return Some(Self::Version(version));
        }
        let status = fs::metadata(path).ok()?;
        let changed = i128::from(status.ctime()) * 1_000_000_000 + i128::from(status.ctime_nsec());
        Some(Self::File(status.ino(), status.size(), changed))
    }
}

impl Copies {
    /// Reads the files of these mounts. May wait for a file system of the host.
    ///
    /// # Errors
    /// One line that names the file.
    pub fn read(mounts: Vec<Mount>) -> Result<(Self, Vec<v1::File>), String> {
        // Before the files: what changes meanwhile is read again.
        let stamps = mounts.iter().map(Stamp::of).collect();
        let files = spec::read_copies(&mounts)?;
        let paths = files.iter().map(|file| file.path.clone()).collect();
        Ok((Self { mounts, stamps, paths }, files))
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.mounts.is_empty()
    }

    fn has_changed(&self) -> bool {
        self.mounts.iter().zip(&self.stamps).any(|(mount, stamp)| Stamp::of(mount) != *stamp)
    }

    /// Reads the files again if they have changed. Returns them, and the paths of copies that are
    /// to go; `None` if nothing has changed. May wait for a file system of the host.
    ///
    /// # Errors
    /// One line that names the file.
    pub fn read_again(&self) -> Result<Option<(Self, v1::PutFilesRequest)>, String> {
        if !self.has_changed() {
            return Ok(None);
        }
        let (now, files) = Self::read(self.mounts.clone())?;
        let is_gone = |path: &&String| !now.paths.contains(*path);
        let removed = self.paths.iter().filter(is_gone).cloned().collect();
        Ok(Some((now, v1::PutFilesRequest { name: String::new(), files, removed })))
    }
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
        let (copies, files) = Copies::read(mounts).unwrap();
        assert_eq!(paths(&files), ["/etc/hosts", "/c/..1/a", "/c/..data", "/c/a"]);
        assert!(copies.read_again().unwrap().is_none());
        version("..2", "b");
        let (copies, request) = copies.read_again().unwrap().unwrap();
        assert_eq!(paths(&request.files), ["/etc/hosts", "/c/..2/b", "/c/..data", "/c/b"]);
        assert_eq!(request.files[2].link, "..2");
        assert_eq!(request.removed, ["/c/..1/a", "/c/a"]);
        assert!(copies.read_again().unwrap().is_none());
        // A file that was replaced, with as many bytes.
        fs::write(dir.path().join("new"), "two").unwrap();
        fs::rename(dir.path().join("new"), &hosts).unwrap();
        let (copies, request) = copies.read_again().unwrap().unwrap();
        assert_eq!((&request.files[0].content[..], request.removed.len()), (&b"two"[..], 0));
        fs::remove_file(&hosts).unwrap();
        assert!(copies.read_again().is_err());
    }
}
