//! Files of the host that a container has copies of, and what becomes of the copies when the
//! host's files change.
//!
//! The shim looks at the files from time to time. A watch would tell at once, but it would take one
//! of the 128 inotify instances that a user has, for each pod. Kubernetes itself looks whether a
//! configMap or a secret has changed about once a minute.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use slipway_sandbox_api::v1;
use tonic::Code;

use crate::spec::{self, Mount};
use crate::task::Task;

/// The time between two looks.
const LOOK: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 5000 });
/// The longest time that the daemon and the guest may take to put files into a container.
const PATIENCE: Duration = Duration::from_secs(60);

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

    fn has_changed(&self) -> bool {
        self.mounts.iter().zip(&self.stamps).any(|(mount, stamp)| Stamp::of(mount) != *stamp)
    }

    /// Reads the files again if they have changed. Returns them, and the paths of copies that are
    /// to go.
    fn read_again(&self) -> Result<Option<(Self, v1::PutFilesRequest)>, String> {
        if !self.has_changed() {
            return Ok(None);
        }
        let (now, files) = Self::read(self.mounts.clone())?;
        let is_gone = |path: &&String| !now.paths.contains(*path);
        let removed = self.paths.iter().filter(is_gone).cloned().collect();
        Ok(Some((now, v1::PutFilesRequest { name: String::new(), files, removed })))
    }
}

/// Keeps the copies of a container that runs up to date, until it ends.
pub fn serve(task: &Arc<Task>) {
    // Nobody panics with the lock held.
    let copies = task.copies.lock().ok().and_then(|mut copies| copies.take());
    let Some(copies) = copies.filter(|copies| !copies.mounts.is_empty()) else { return };
    let task = Arc::clone(task);
    tokio::spawn(async move {
        tokio::select! {
            () = refresh(&task, Arc::new(copies)) => {}
            _ = task.init.ended() => {}
            _ = task.pod_ended() => {}
        }
    });
}

async fn refresh(task: &Task, mut copies: Arc<Copies>) {
    let mut told = String::new();
    loop {
        tokio::time::sleep(LOOK).await;
        let now = Arc::clone(&copies);
        let read = tokio::task::spawn_blocking(move || now.read_again()).await;
        let put = match read.map_err(|error| error.to_string()).and_then(|read| read) {
            Ok(None) => continue,
            Ok(Some((now, request))) => put(task, request).await.map(|()| now),
            Err(reason) => Err(Refused::Now(reason)),
        };
        match put {
            Ok(now) => copies = Arc::new(now),
            Err(Refused::Always(reason)) => return warn(task, &reason),
            // Tried again with the next look, and said once.
            Err(Refused::Now(reason)) if reason != told => {
                warn(task, &reason);
                told = reason;
            }
            Err(Refused::Now(_)) => {}
        }
    }
}

fn warn(task: &Task, reason: &str) {
    crate::log::warn(&format!("{}: files that have changed stay as they were: {reason}", task.id));
}

/// The reason why files were not put into a container.
enum Refused {
    /// The next attempt may succeed.
    Now(String),
    /// No attempt will succeed.
    Always(String),
}

async fn put(task: &Task, mut request: v1::PutFilesRequest) -> Result<(), Refused> {
    request.name = task.name.clone();
    let mut client =
        task.daemon.connect().await.map_err(|failure| Refused::Now(failure.message))?;
    let called = tokio::time::timeout(PATIENCE, client.put_files(request)).await;
    match called {
        Ok(Ok(_)) => Ok(()),
        // A daemon, or a guest, of an earlier version.
        Ok(Err(status)) if status.code() == Code::Unimplemented => {
            Err(Refused::Always(status.message().to_owned()))
        }
        Ok(Err(status)) => Err(Refused::Now(status.message().to_owned())),
        Err(_) => Err(Refused::Now("the guest does not take them".to_owned())),
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
