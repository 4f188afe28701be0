//! A control group for each sandbox's VMM, on cgroup v2 or v1, whichever the host has.
//!
//! On a host without writable control groups (a container, an odd mount), sandboxes run without
//! limits on the VMM; `slipway doctor` says so.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

const ROOT: &str = "/sys/fs/cgroup";
/// The name of the group that is the parent of all of Slipway's groups.
const PARENT: &str = "slipway";
/// The v1 hierarchies that are used if they are mounted.
const V1_CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];

/// The resource limits of a VMM.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Host memory of the VMM in bytes: guest memory and its own.
    pub memory_bytes: u64,
    /// CPU time, as a number of CPUs.
    pub cpus: u32,
    /// The number of threads.
    pub threads: u32,
}

/// The groups of one sandbox, one in each hierarchy. The methods read and write files, so a daemon
/// calls them in the sandbox's [lane](crate::files::Lane).
#[derive(Clone, Debug)]
pub struct Cgroup {
    dirs: Vec<PathBuf>,
}

/// Returns the name of the groups of sandbox `id`, relative to the root of each hierarchy, as lines
/// of proc_pid_cgroup(5) end with it.
pub fn name(id: &str) -> String {
    format!("/{PARENT}/{id}")
}

impl Cgroup {
    /// Returns the groups of sandbox `id`, whether or not they exist.
    pub fn of(id: &str) -> Self {
        Self { dirs: hierarchies().into_iter().map(|root| root.join(PARENT).join(id)).collect() }
    }

    /// Creates the groups and sets the limits.
    ///
    /// # Errors
    /// [`Error::File`] if a group cannot be created or a limit cannot be set.
    pub fn create(&self, limits: Limits) -> Result<()> {
        for dir in &self.dirs {
            fs::create_dir_all(dir).map_err(Error::file("cannot create control group", dir))?;
            if is_v2(dir) {
                delegate(dir);
            }
            set(dir, settings(limits))?;
        }
        Ok(())
    }

    /// Changes the limit of CPU time, as a number of CPUs. Missing groups are no error.
    ///
    /// # Errors
    /// [`Error::File`] if a limit cannot be set.
    pub fn limit_cpus(&self, cpus: u32) -> Result<()> {
        self.dirs.iter().try_for_each(|dir| set(dir, cpu_settings(cpus)))
    }

    /// Returns the files to which a process id is written to join the groups.
    pub fn procs_files(&self) -> Vec<PathBuf> {
        self.dirs.iter().map(|dir| dir.join("cgroup.procs")).collect()
    }

    /// Removes the groups. Missing groups are no error.
    ///
    /// # Errors
    /// [`Error::File`] if a process is in one of the groups; the others are removed. A group
    /// empties a moment after its last process was reaped, so the caller should retry.
    pub fn remove(&self) -> Result<()> {
        let removed = self.dirs.iter().map(|dir| remove(dir));
        // `fold` visits all groups, whatever fails.
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

/// Writes to those of the files that exist.
fn set<const N: usize>(dir: &Path, settings: [(&str, String); N]) -> Result<()> {
    for (file, value) in settings {
        let path = dir.join(file);
        if path.exists() {
            fs::write(&path, value).map_err(Error::file("cannot set", &path))?;
        }
    }
    Ok(())
}

fn is_v2(dir: &Path) -> bool {
    dir.join("cgroup.controllers").exists()
}

/// Returns whether groups can be created in `dir`. In many containers the hierarchies are mounted
/// read-only.
fn writable(dir: &Path) -> bool {
    dir.is_dir() && rustix::fs::access(dir, rustix::fs::Access::WRITE_OK).is_ok()
}

/// Returns the roots of the hierarchies in which groups can be created.
fn hierarchies() -> Vec<PathBuf> {
    let root = PathBuf::from(ROOT);
    if is_v2(&root) {
        return Some(root).filter(|root| writable(root)).into_iter().collect();
    }
    V1_CONTROLLERS.iter().map(|name| root.join(name)).filter(|dir| writable(dir)).collect()
}

/// Enables the available controllers for our parent group and for its children.
fn delegate(dir: &Path) {
    for controller in ["+memory", "+cpu", "+pids"] {
        for above in dir.ancestors().skip(1).take(2).collect::<Vec<_>>().into_iter().rev() {
            // A controller that the kernel lacks is no reason not to run.
            let _ = fs::write(above.join("cgroup.subtree_control"), controller);
        }
    }
}

/// Returns the file and the value of each limit, with the names of v2 and of v1.
fn settings(limits: Limits) -> [(&'static str, String); 6] {
    let [max, period, quota] = cpu_settings(limits.cpus);
    [
        ("memory.max", limits.memory_bytes.to_string()),
        ("memory.limit_in_bytes", limits.memory_bytes.to_string()),
        max,
        period,
        quota,
        ("pids.max", limits.threads.to_string()),
    ]
}

/// Returns the file and the value of the limit of CPU time, with the names of v2 and of v1.
fn cpu_settings(cpus: u32) -> [(&'static str, String); 3] {
    const PERIOD_US: u64 = 100_000;
    let quota = u64::from(cpus) * PERIOD_US;
    [
        ("cpu.max", format!("{quota} {PERIOD_US}")),
        ("cpu.cfs_period_us", PERIOD_US.to_string()),
        ("cpu.cfs_quota_us", quota.to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_of_cpu_time_is_changed_where_there_is_one() {
        let dir = tempfile::tempdir().unwrap();
        let (there, absent) = (dir.path().join("one"), dir.path().join("two"));
        fs::create_dir(&there).unwrap();
        fs::write(there.join("cpu.max"), "200000 100000").unwrap();
        let group = Cgroup { dirs: vec![absent.clone(), there.clone()] };
        group.limit_cpus(3).unwrap();
        assert_eq!(fs::read_to_string(there.join("cpu.max")).unwrap(), "300000 100000");
        assert_eq!(fs::read_dir(there).unwrap().count(), 1);
        assert!(!absent.exists());
    }
}
