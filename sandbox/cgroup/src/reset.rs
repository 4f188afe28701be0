//! How a group that was used becomes one for the next sandbox.

use std::fs;
use std::path::Path;

use crate::group::charged;
use crate::{Group, cpuset};

/// The most memory in bytes that may stay charged to a group that is used again: the kernel's own
/// reserve of a group, up to 64 pages for each CPU, and small objects such as names of files.
pub(crate) const MOST_CHARGED: u64 = 512 << 10;

/// The state of a group after an attempt to reset it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reset {
    /// The group can be used again.
    Clean,
    /// A process is in the group, or has just left it. A later attempt may succeed.
    Busy,
    /// The group is empty and cannot be used again: it is gone, has groups of its own, or keeps
    /// memory that the next sandbox would pay for.
    Unfit,
}

/// Frees the page cache that is charged to `group` and resets what the kernel lets us reset.
pub(crate) fn reset(group: &Group) -> Reset {
    let states = group.dirs().iter().map(|dir| reset_dir(dir));
    let state = states.fold(Reset::Clean, |worst, state| match (worst, state) {
        (Reset::Busy, _) | (_, Reset::Busy) => Reset::Busy,
        (Reset::Unfit, _) | (_, Reset::Unfit) => Reset::Unfit,
        _ => Reset::Clean,
    });
    match state {
        Reset::Clean if group.leave_cpuset().is_err() => Reset::Busy,
        state => state,
    }
}

fn reset_dir(dir: &Path) -> Reset {
    match fs::read_to_string(dir.join("cgroup.procs")) {
        Ok(pids) if pids.trim().is_empty() => {}
        Ok(_) => return Reset::Busy,
        Err(_) => return Reset::Unfit,
    }
    if has_groups(dir) {
        return Reset::Unfit;
    }
    free_page_cache(dir);
    // Peaks and counts of v1. Files of other controllers do not exist here.
    for file in ["memory.max_usage_in_bytes", "memory.failcnt", "cpuacct.usage"] {
        write(dir, file, "0");
    }
    // The sets of v2 are those of the group above again.
    cpuset::FILES.iter().for_each(|file| write(dir, file, "\n"));
    match charged(dir) {
        Some(bytes) if bytes > MOST_CHARGED => Reset::Unfit,
        _ => Reset::Clean,
    }
}

/// Frees the page cache that processes of the group read or wrote. It stays charged to the group
/// after they have ended.
fn free_page_cache(dir: &Path) {
    write(dir, "memory.force_empty", "0"); // v1
    if let Some(bytes) = charged(dir).filter(|bytes| *bytes > 0) {
        write(dir, "memory.reclaim", &bytes.to_string()); // v2, Linux 5.19
    }
}

fn has_groups(dir: &Path) -> bool {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.into_iter().any(|one| one.file_type().is_ok_and(|kind| kind.is_dir()))
}

/// Writes to a file if it exists. The kernel may refuse: the check afterwards decides.
fn write(dir: &Path, file: &str, value: &str) {
    use std::io::Write;
    let file = fs::OpenOptions::new().write(true).open(dir.join(file));
    let _ = file.and_then(|mut file| file.write_all(value.as_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Hierarchies;

    /// A directory with the files of a v1 group, which no kernel fills.
    fn group(procs: &str, usage: u64) -> (tempfile::TempDir, Group) {
        let root = tempfile::tempdir().unwrap();
        let all = Hierarchies::at(vec![root.path().into()], "p");
        let dir = root.path().join("p/one");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("cgroup.procs"), procs).unwrap();
        fs::write(dir.join("memory.usage_in_bytes"), usage.to_string()).unwrap();
        fs::write(dir.join("memory.max_usage_in_bytes"), "77").unwrap();
        fs::write(dir.join("cpuset.cpus"), "3").unwrap();
        (root, all.group("one"))
    }

    #[test]
    fn a_group_is_used_again_only_if_it_is_clean() {
        let (root, empty) = group("", 4096);
        assert_eq!(reset(&empty), Reset::Clean);
        let peak = root.path().join("p/one/memory.max_usage_in_bytes");
        assert_eq!(fs::read_to_string(peak).unwrap(), "07", "the peak is reset");
        let cpus = root.path().join("p/one/cpuset.cpus");
        assert_eq!(fs::read_to_string(cpus).unwrap(), "\n", "it is confined to no CPUs");
        assert_eq!(reset(&group("17\n", 0).1), Reset::Busy);
        assert_eq!(reset(&group("", MOST_CHARGED + 1).1), Reset::Unfit);
        fs::create_dir(root.path().join("p/one/below")).unwrap();
        assert_eq!(reset(&empty), Reset::Unfit, "it has a group of its own");
        drop(root);
        assert_eq!(reset(&empty), Reset::Unfit, "it is gone");
    }
}
