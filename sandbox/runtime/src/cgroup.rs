//! A control group for each sandbox's VMM, on cgroup v2 or v1, whichever the host has.
//!
//! A host without writable control groups (a container, an odd mount) runs sandboxes without
//! limits on the VMM; `slipway doctor` says so.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

const ROOT: &str = "/sys/fs/cgroup";
/// All our groups are below one of this name.
const PARENT: &str = "slipway";
/// v1 hierarchies that are used where they are mounted.
const V1_CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];

/// What a VMM may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Host memory of the VMM, bytes: guest memory and its own.
    pub memory_bytes: u64,
    /// CPUs' worth of time.
    pub cpus: u32,
    /// Threads.
    pub threads: u32,
}

/// The groups of one sandbox. Its methods read and write files: a daemon calls them in the sandbox's
/// [lane](crate::files::Lane).
#[derive(Clone, Debug)]
pub struct Cgroup {
    dirs: Vec<PathBuf>,
}

/// Name of the groups of sandbox `id`, from the root of each hierarchy, as proc_pid_cgroup(5)
/// ends with it.
pub fn name(id: &str) -> String {
    format!("/{PARENT}/{id}")
}

impl Cgroup {
    /// Names the groups of sandbox `id`, whether or not they are there.
    pub fn of(id: &str) -> Self {
        Self { dirs: hierarchies().into_iter().map(|root| root.join(PARENT).join(id)).collect() }
    }

    /// Makes the groups and sets the limits.
    ///
    /// # Errors
    /// [`Error::File`] when a hierarchy is there and refuses.
    pub fn create(&self, limits: Limits) -> Result<()> {
        for dir in &self.dirs {
            fs::create_dir_all(dir).map_err(Error::file("cannot create control group", dir))?;
            if is_v2(dir) {
                delegate(dir);
            }
            for (file, value) in settings(limits) {
                let path = dir.join(file);
                if path.exists() {
                    fs::write(&path, value).map_err(Error::file("cannot set", &path))?;
                }
            }
        }
        Ok(())
    }

    /// The files to write a process id to for it to join.
    pub fn procs_files(&self) -> Vec<PathBuf> {
        self.dirs.iter().map(|dir| dir.join("cgroup.procs")).collect()
    }

    /// Removes the groups; missing ones are fine.
    ///
    /// # Errors
    /// [`Error::File`] when a process holds one; the others went. A group empties a moment after its last
    /// process was reaped: it is worth another try.
    pub fn remove(&self) -> Result<()> {
        let removed = self.dirs.iter().map(|dir| remove(dir));
        // All are tried.
        removed.fold(Ok(()), Result::and)
    }
}

fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::file("cannot remove control group", dir)(error))
        }
        _ => Ok(()),
    }
}

fn is_v2(dir: &Path) -> bool {
    dir.join("cgroup.controllers").exists()
}

/// Whether groups can be made there; in many containers the hierarchies are mounted read-only.
fn writable(dir: &Path) -> bool {
    dir.is_dir() && rustix::fs::access(dir, rustix::fs::Access::WRITE_OK).is_ok()
}

/// Roots of the hierarchies in which groups can be made.
fn hierarchies() -> Vec<PathBuf> {
    let root = PathBuf::from(ROOT);
    if is_v2(&root) {
        return Some(root).filter(|root| writable(root)).into_iter().collect();
    }
    V1_CONTROLLERS.iter().map(|name| root.join(name)).filter(|dir| writable(dir)).collect()
}

/// Enables the controllers that there are for the children of our parent group.
fn delegate(dir: &Path) {
    for controller in ["+memory", "+cpu", "+pids"] {
        for above in dir.ancestors().skip(1).take(2).collect::<Vec<_>>().into_iter().rev() {
            // A controller that the kernel lacks is no reason not to run.
            let _ = fs::write(above.join("cgroup.subtree_control"), controller);
        }
    }
}

/// File and value of each limit, v2's names and v1's; only those that exist are written.
fn settings(limits: Limits) -> [(&'static str, String); 6] {
    const PERIOD_US: u64 = 100_000;
    let quota = u64::from(limits.cpus) * PERIOD_US;
    [
        ("memory.max", limits.memory_bytes.to_string()),
        ("memory.limit_in_bytes", limits.memory_bytes.to_string()),
        ("cpu.max", format!("{quota} {PERIOD_US}")),
        ("cpu.cfs_period_us", PERIOD_US.to_string()),
        ("cpu.cfs_quota_us", quota.to_string()),
        ("pids.max", limits.threads.to_string()),
    ]
}
