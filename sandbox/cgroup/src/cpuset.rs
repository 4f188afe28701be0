//! The CPUs and the memory nodes to which a group is confined (section Cpuset of *cgroup-v2*, and
//! *cpusets*, in the kernel's admin guide).
//!
//! Few sandboxes are confined, and the controller makes each group more expensive. So a group has
//! no CPU set until it is confined: cgroup v2 gets the controller then, and v1's hierarchy of CPU
//! sets gets a directory for the group, which is removed together with the group.

use std::fs;
use std::io;
use std::path::Path;

use rustix::io::Errno;

use crate::{Error, Result};

/// The files of the two sets, in both versions of control groups.
pub(crate) const FILES: [&str; 2] = ["cpuset.cpus", "cpuset.mems"];
/// The most rounds in which processes of a group are moved. A process that is forked during a round
/// is moved in the next one.
const ROUNDS: usize = 16;

/// The CPUs and the memory nodes to which a group is confined, as lists such as "0-3,5". An empty
/// list stands for those of the parent group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sets {
    /// The CPUs.
    pub cpus: String,
    /// The NUMA nodes of memory.
    pub mems: String,
}

impl Sets {
    /// Returns each file with its list.
    fn files(&self) -> [(&'static str, &str); 2] {
        let [cpus, mems] = FILES;
        [(cpus, &self.cpus), (mems, &self.mems)]
    }

    /// Returns whether the sets confine nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.cpus.is_empty() && self.mems.is_empty()
    }
}

/// Confines the group of v2 at `dir`. Returns `false` if the group has no CPU sets, because its
/// parent does not enable the controller.
pub(crate) fn set_v2(dir: &Path, sets: &Sets) -> Result<bool> {
    if !FILES.iter().all(|file| dir.join(file).exists()) {
        return Ok(false);
    }
    sets.files().into_iter().try_for_each(|(file, list)| write(&dir.join(file), list))?;
    Ok(true)
}

/// Confines the processes of a group of v1: makes the directory `below` in the hierarchy of CPU
/// sets that is mounted at `root`, and moves the processes that the file `procs` lists there, if
/// there is such a file. Each directory between `root` and the group gets its parent's sets again:
/// v1 drops a CPU that goes offline from every set, and does not add it again when it returns.
pub(crate) fn set_v1(root: &Path, below: &Path, procs: Option<&Path>, sets: &Sets) -> Result<()> {
    let mut dir = root.to_owned();
    let mut parts = below.components().peekable();
    while let Some(part) = parts.next() {
        let above = dir.clone();
        dir.push(part);
        make(&dir)?;
        let is_group = parts.peek().is_none();
        FILES.into_iter().try_for_each(|file| inherit(&above, &dir, file, is_group))?;
    }
    for (file, list) in sets.files() {
        match (list, dir.parent()) {
            // v1 has no empty set for a group with processes, so the parent's stands for it.
            ("", Some(above)) => copy(&above.join(file), &dir.join(file))?,
            (list, _) => write(&dir.join(file), list)?,
        }
    }
    procs.map_or(Ok(()), |procs| follow(procs, &dir.join("cgroup.procs")))
}

/// Removes a group's directory in the hierarchy of CPU sets of v1. A missing directory is no error.
pub(crate) fn remove_v1(dir: &Path) -> Result<()> {
    match fs::remove_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::at("cannot remove control group", dir)(error))
        }
        _ => Ok(()),
    }
}

/// Makes the directory of a group. A directory that is there already is no error.
pub(crate) fn make(dir: &Path) -> Result<()> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(Error::at("cannot create control group", dir)(error))
        }
        _ => Ok(()),
    }
}

/// Moves the processes that the file `from` lists to the group of the file `to`, in at most
/// [`ROUNDS`] rounds. A file that cannot be read lists no processes.
fn follow(from: &Path, to: &Path) -> Result<()> {
    let listed = |file: &Path| fs::read_to_string(file).unwrap_or_default();
    for _ in 0..ROUNDS {
        let (all, there) = (listed(from), listed(to));
        let is_there = |pid: &&str| there.lines().any(|one| one == *pid);
        let mut others = all.lines().filter(|pid| !is_there(pid)).peekable();
        if others.peek().is_none() {
            break;
        }
        for pid in others {
            match fs::write(to, pid) {
                // The process has ended.
                Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {}
                moved => moved.map_err(Error::at("cannot move a process by", to))?,
            }
        }
    }
    Ok(())
}

/// Copies a set of the group at `above` to the group at `dir` if the latter's is empty: no process
/// can enter a group with an empty set. A set that differs is replaced, too, unless `keeps`; it
/// stays if the kernel refuses to replace it.
fn inherit(above: &Path, dir: &Path, file: &str, keeps: bool) -> Result<()> {
    let (from, to) = (above.join(file), dir.join(file));
    match read(&to).filter(|list| !list.is_empty()) {
        None => copy(&from, &to),
        Some(list) => {
            if !keeps && read(&from).is_some_and(|wider| wider != list) {
                let _ = copy(&from, &to);
            }
            Ok(())
        }
    }
}

/// Copies the list in the file `from` to the file `to`.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let list = fs::read_to_string(from).map_err(Error::at("cannot read", from))?;
    write(to, list.trim())
}

/// Returns the list in a file, or `None` if the file cannot be read.
fn read(file: &Path) -> Option<String> {
    fs::read_to_string(file).ok().map(|text| text.trim().to_owned())
}

/// Writes a list with a newline, since a write of an empty list alone would have no bytes and never
/// reach the kernel.
fn write(file: &Path, list: &str) -> Result<()> {
    fs::write(file, format!("{list}\n")).map_err(Error::at("cannot set", file))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sets(cpus: &str, mems: &str) -> Sets {
        Sets { cpus: cpus.to_owned(), mems: mems.to_owned() }
    }

    #[test]
    fn a_group_of_v2_is_confined_where_the_controller_is() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!set_v2(dir.path(), &sets("1", "")).unwrap());
        assert!(!dir.path().join("cpuset.cpus").exists());
        for file in FILES {
            fs::write(dir.path().join(file), "\n").unwrap();
        }
        let lists = || FILES.map(|file| fs::read_to_string(dir.path().join(file)).unwrap());
        assert!(set_v2(dir.path(), &sets("1-2", "0")).unwrap());
        assert_eq!(lists(), ["1-2\n", "0\n"]);
        assert!(set_v2(dir.path(), &sets("", "")).unwrap());
        assert_eq!(lists(), ["\n", "\n"]);
    }

    #[test]
    fn a_group_of_v1_has_its_own_directory_with_its_processes() {
        let root = tempfile::tempdir().unwrap();
        for (file, list) in FILES.into_iter().zip(["0-3\n", "0\n"]) {
            fs::write(root.path().join(file), list).unwrap();
        }
        let procs = root.path().join("procs");
        fs::write(&procs, "17").unwrap();
        let set = |cpus: &str, procs| {
            set_v1(root.path(), Path::new("p/one"), procs, &sets(cpus, "")).unwrap();
        };
        let list = |file: &str| read(&root.path().join(file)).unwrap();
        set("2", None);
        assert!(!root.path().join("p/one/cgroup.procs").exists());
        set("1", Some(procs.as_path()));
        assert_eq!((list("p/cpuset.cpus"), list("p/cpuset.mems")), ("0-3".into(), "0".into()));
        assert_eq!(
            (list("p/one/cpuset.cpus"), list("p/one/cpuset.mems")),
            ("1".into(), "0".into())
        );
        assert_eq!(list("p/one/cgroup.procs"), "17");
        set("", Some(procs.as_path()));
        assert_eq!(list("p/one/cpuset.cpus"), "0-3");
        // A CPU comes online.
        fs::write(root.path().join("cpuset.cpus"), "0-4\n").unwrap();
        set("4", Some(procs.as_path()));
        assert_eq!((list("p/cpuset.cpus"), list("p/one/cpuset.cpus")), ("0-4".into(), "4".into()));
        let missing = set_v1(&root.path().join("none"), Path::new("p"), None, &sets("1", ""));
        assert!(missing.unwrap_err().to_string().starts_with("cannot create control group"));
    }

    #[test]
    fn a_missing_directory_is_removed() {
        let root = tempfile::tempdir().unwrap();
        remove_v1(&root.path().join("none")).unwrap();
        fs::create_dir_all(root.path().join("one/below")).unwrap();
        assert!(remove_v1(&root.path().join("one")).is_err());
    }
}
