//! runc's containers with the root of the same image, as a peer.
//!
//! The image is mounted in a mount namespace of this process, so that no mount is left when the
//! process ends in whatever way. Containers have a read-only root, no seccomp filter and no limits.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use slipway_bench::packet::run_command;
use slipway_image::Image;

use crate::bench::scratch::Scratch;
use crate::bench::vm::Namespace;

/// The configuration in a container's bundle.
const CONFIG: &str = "config.json";
/// The longest time for which starts that are under way may go on after a measurement was broken
/// off.
const END: Duration = Duration::from_secs(60);
/// The time between two looks at such starts.
const LOOK: Duration = Duration::from_millis(20);

/// runc with a root file system for its containers.
pub struct Runc {
    /// The state of runc, bundles, and the place where the image is mounted.
    scratch: Scratch,
    mounts: Namespace,
}

impl Runc {
    /// Mounts an image.
    ///
    /// # Errors
    /// runc is not installed, parts of the image are still to be fetched, the kernel cannot mount
    /// it from a loop device, or runc can start no container.
    pub fn make(image: &Image) -> Result<Self> {
        run(Command::new("runc").arg("--version")).context("runc is not installed")?;
        ensure!(!image.lazy, "parts of the image are still to be fetched");
        let scratch = Scratch::make_in(&std::env::temp_dir())?;
        let mounts = Namespace::of_mounts()?;
        let made = Self { scratch, mounts };
        std::fs::create_dir(made.root())?;
        // The host must not see the mount.
        run_command(made.mounts.command("mount").args(["--make-rprivate", "/"]))?;
        let mut mount = made.mounts.command("mount");
        mount.args(["-t", "erofs", "-o", "ro,loop"]).arg(&image.erofs_path).arg(made.root());
        run_command(&mut mount)?;
        // A host on which runc cannot start a container is found before anything is measured.
        let network = Namespace::make()?;
        made.start("trial", network.path())?;
        made.remove("trial")?;
        Ok(made)
    }

    /// Starts a container in the network namespace at `network`. Blocks until its process runs.
    ///
    /// # Errors
    /// runc's own words.
    pub fn start(&self, name: &str, network: &str) -> Result<()> {
        let bundle = self.bundle(name);
        std::fs::create_dir(&bundle)?;
        let config = config(name, &self.root(), network).to_string();
        std::fs::write(bundle.join(CONFIG), config)?;
        let mut command = self.runc();
        command.args(["run", "--detach", "--bundle"]).arg(&bundle).arg(name);
        run(&mut command).with_context(|| self.words())
    }

    /// Ends and removes a container.
    ///
    /// # Errors
    /// runc's own words.
    pub fn remove(&self, name: &str) -> Result<()> {
        run(self.runc().args(["delete", "--force", name])).with_context(|| self.words())?;
        std::fs::remove_dir_all(self.bundle(name))?;
        Ok(())
    }

    /// Ends and removes the containers that are left by a measurement that was broken off. Starts
    /// that are under way, on threads of their own, come to their end before.
    ///
    /// # Errors
    /// A start takes too long, or runc's own words about the first container that stays.
    pub async fn remove_left(self: &Arc<Self>) -> Result<()> {
        let begun = Instant::now();
        while Arc::strong_count(self) > 1 {
            ensure!(begun.elapsed() < END, "runc does not come to the end of a start");
            tokio::time::sleep(LOOK).await;
        }
        let names = containers(self.scratch.path());
        let removed: Vec<Result<()>> = names.iter().map(|name| self.remove(name)).collect();
        removed.into_iter().collect()
    }

    fn runc(&self) -> Command {
        let mut command = self.mounts.command("runc");
        command.arg("--root").arg(self.scratch.path().join("state"));
        command.arg("--log").arg(self.log());
        command
    }

    fn root(&self) -> PathBuf {
        self.scratch.path().join("root")
    }

    fn bundle(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn log(&self) -> PathBuf {
        self.scratch.path().join("log")
    }

    /// Returns the last line that runc wrote to its log.
    fn words(&self) -> String {
        let log = std::fs::read_to_string(self.log()).unwrap_or_default();
        format!("runc: {}", log.lines().last().unwrap_or("no words in its log"))
    }
}

/// Returns the names of the containers whose bundles are in a folder.
fn containers(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let bundles = entries.filter(|entry| entry.path().join(CONFIG).is_file());
    bundles.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Runs a command whose output nobody reads: a container would keep a pipe open.
fn run(command: &mut Command) -> Result<()> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let status = command.status().with_context(|| format!("{command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// Returns the configuration of a container (OCI runtime specification 1.0.2) whose program sleeps.
fn config(name: &str, root: &Path, network: &str) -> serde_json::Value {
    let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["sleep", "1000000"],
            "env": [path],
            "cwd": "/",
            "noNewPrivileges": true,
        },
        "root": {"path": root, "readonly": true},
        "hostname": name,
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
        ],
        "linux": {
            "namespaces": [
                {"type": "pid"},
                {"type": "ipc"},
                {"type": "uts"},
                {"type": "mount"},
                {"type": "network", "path": network},
            ],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_that_are_left_are_known_by_their_bundles() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["root", "state", "bench-startup-1-0", "bench-startup-1-1"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        std::fs::write(folder.path().join("log"), "").unwrap();
        std::fs::write(folder.path().join("bench-startup-1-1").join(CONFIG), "{}").unwrap();
        assert_eq!(containers(folder.path()), ["bench-startup-1-1"]);
    }

    #[test]
    fn a_container_has_the_images_root_and_the_namespace() {
        let config = config("one", Path::new("/tmp/root"), "/proc/1/ns/net");
        assert_eq!(config["root"]["path"], "/tmp/root");
        assert_eq!(config["linux"]["namespaces"][4]["path"], "/proc/1/ns/net");
        assert_eq!(config["process"]["args"][0], "sleep");
    }
}
