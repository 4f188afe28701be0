//! The control group of one sandbox.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::{Counters, Error, Limits, Result, cpuset, limits};

/// A group: a directory in each hierarchy. The methods read and write the kernel's files, which may
/// wait for other users of control groups; none of them belongs on a thread that serves several
/// peers.
#[derive(Clone, Debug)]
pub struct Group {
    name: String,
    dirs: Vec<PathBuf>,
    /// The directory in v1's hierarchy of CPU sets, which is there once the group was confined.
    cpuset: Option<PathBuf>,
    /// The limits in force, as far as they are known.
    limits: Option<Limits>,
    /// The counters at the time when the group was taken.
    before: Counters,
}

/// The use of a group by its present owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Counters since the group was taken.
    pub counters: Counters,
    /// Memory that is charged to the group now, in bytes.
    pub memory_bytes: u64,
}

impl Group {
    pub(crate) fn new(name: &str, dirs: Vec<PathBuf>, cpuset: Option<PathBuf>) -> Self {
        Self { name: name.to_owned(), dirs, cpuset, limits: None, before: Counters::default() }
    }

    /// Returns the name, which is that of each of the directories.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the counters at the time when the group was taken.
    pub fn before(&self) -> Counters {
        self.before
    }

    /// Sets the counters from which [`usage`](Self::usage) counts.
    #[must_use]
    pub fn counting_from(mut self, before: Counters) -> Self {
        self.before = before;
        self
    }

    pub(crate) fn dirs(&self) -> &[PathBuf] {
        &self.dirs
    }

    pub(crate) fn cpuset(&self) -> Option<&Path> {
        self.cpuset.as_deref()
    }

    /// Makes the directories; their parents must exist. Returns `false`, with nothing made, if the
    /// first of them exists.
    ///
    /// # Errors
    /// If a directory cannot be made. The directories that were made before it are removed.
    pub(crate) fn make(&self) -> Result<bool> {
        for (made, dir) in self.dirs.iter().enumerate() {
            match fs::create_dir(dir) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    if made == 0 {
                        return Ok(false);
                    }
                }
                Err(error) => {
                    let _ = self.remove();
                    return Err(Error::at("cannot create control group", dir)(error));
                }
                Ok(()) => {}
            }
        }
        Ok(true)
    }

    /// Sets the limits. A limit that is known to be in force is not written again.
    ///
    /// # Errors
    /// If a limit cannot be set.
    pub fn limit(&mut self, limits: Limits) -> Result<()> {
        let before = self.limits.take();
        self.dirs.iter().try_for_each(|dir| limits::set(dir, limits, before))?;
        self.limits = Some(limits);
        Ok(())
    }

    /// Changes the limit of CPU time, as a number of CPUs. A missing group is no error.
    ///
    /// # Errors
    /// If a limit cannot be set.
    pub fn limit_cpus(&mut self, cpus: u32) -> Result<()> {
        self.limits = None;
        self.dirs.iter().try_for_each(|dir| limits::set_cpus(dir, cpus))
    }

    /// Changes the limit of memory, in bytes. A missing group is no error.
    ///
    /// # Errors
    /// If a limit cannot be set, for example because the group uses more.
    pub fn limit_memory(&mut self, bytes: u64) -> Result<()> {
        self.limits = None;
        self.dirs.iter().try_for_each(|dir| limits::set_memory(dir, bytes))
    }

    /// Returns the files to which a process id is written to join the group; "0" stands for the
    /// writer.
    pub fn procs_files(&self) -> Vec<PathBuf> {
        let confined = self.cpuset.iter().filter(|dir| dir.exists());
        self.dirs.iter().chain(confined).map(|dir| dir.join("cgroup.procs")).collect()
    }

    /// Moves process `pid` into the group.
    ///
    /// # Errors
    /// If the process is gone, or the kernel refuses.
    pub fn join(&self, pid: u32) -> Result<()> {
        let pid = pid.to_string();
        self.procs_files().iter().try_for_each(|file| {
            fs::write(file, &pid).map_err(Error::at("cannot move a process by", file))
        })
    }

    /// Returns the use of the group by its present owner.
    pub fn usage(&self) -> Usage {
        Usage {
            counters: Counters::read(&self.dirs).since(self.before),
            memory_bytes: self.dirs.iter().filter_map(|dir| charged(dir)).sum(),
        }
    }

    /// Removes the group. A missing group is no error.
    ///
    /// # Errors
    /// If a process is in one of the directories; the others are removed. A group empties a moment
    /// after its last process was reaped, so the caller should retry.
    pub fn remove(&self) -> Result<()> {
        let removed = self.dirs.iter().map(|dir| match fs::remove_dir(dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::at("cannot remove control group", dir)(error))
            }
            _ => Ok(()),
        });
        // `fold` visits all directories, whatever fails.
        removed.fold(self.leave_cpuset(), Result::and)
    }

    /// Removes the directory in v1's hierarchy of CPU sets, if there is one.
    ///
    /// # Errors
    /// If a process is in it.
    pub(crate) fn leave_cpuset(&self) -> Result<()> {
        self.cpuset.as_deref().map_or(Ok(()), cpuset::remove_v1)
    }
}

/// Returns the memory that is charged to the group at `dir`, in bytes. Returns `None` if `dir` is
/// in a hierarchy without the memory controller.
pub(crate) fn charged(dir: &Path) -> Option<u64> {
    let read = |file: &str| fs::read_to_string(dir.join(file)).ok()?.trim().parse().ok();
    read("memory.current").or_else(|| read("memory.usage_in_bytes"))
}
