//! RunD-V's joint controllers (section VI.B): one hierarchy of version 1 that has all controllers
//! of its lightweight groups, mounted for a measurement.

use std::ffi::CString;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;

/// The controllers of RunD-V's hierarchy, by the names of version 1.
const CONTROLLERS: [&str; 5] = ["cpu", "cpuacct", "cpuset", "memory", "blkio"];
/// The kernel's table of controllers (cgroups(7)).
const TABLE: &str = "/proc/cgroups";

/// One hierarchy of version 1 with the controllers cpu, cpuacct, cpuset, memory and blkio. It is
/// unmounted when this is dropped; no group may be in it then.
#[derive(Debug)]
pub struct Joint(TempDir);

impl Joint {
    /// Mounts the hierarchy.
    ///
    /// # Errors
    /// A controller is in a hierarchy of version 1 already, or the kernel has none of that version;
    /// groups of version 2 have it; the process may not mount.
    pub fn mount() -> Result<Self> {
        let table = std::fs::read_to_string(TABLE).context(TABLE)?;
        check(&table)?;
        let controllers = CONTROLLERS.join(",");
        let options = CString::new(controllers.as_str())?;
        let place = TempDir::new().context("no place for a hierarchy")?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount("cgroup", place.path(), "cgroup", flags, options.as_c_str()).with_context(|| {
            format!(
                "cannot mount {controllers} in one hierarchy, perhaps since groups of version 2 \
                 have controllers"
            )
        })?;
        let joint = Self(place);
        // A new group has the CPUs and memory nodes of its parent: without any it takes no process.
        let clone = joint.path().join("cgroup.clone_children");
        std::fs::write(&clone, "1").with_context(|| clone.display().to_string())?;
        Ok(joint)
    }

    /// Returns the mount point.
    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Joint {
    fn drop(&mut self) {
        // An error: somebody else has unmounted it.
        let _ = unmount(self.path(), UnmountFlags::DETACH);
    }
}

/// Checks by the kernel's table that it has all controllers, and none in a hierarchy of version 1.
fn check(table: &str) -> Result<()> {
    let mut mounted = Vec::new();
    for name in CONTROLLERS {
        let mut rows = table.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
        // Name, number of the hierarchy, number of groups, whether it is enabled.
        let found = rows.find(|row| row.first() == Some(&name));
        let enabled = found.as_ref().is_some_and(|row| row.get(3) == Some(&"1"));
        ensure!(enabled, "the kernel has no controller {name} of version 1");
        if found.is_some_and(|row| row.get(1) != Some(&"0")) {
            mounted.push(name);
        }
    }
    ensure!(
        mounted.is_empty(),
        "{} mounted already, each in a hierarchy of the host: a server has none with version 2 \
         alone, as that of lab/kvm-host",
        match mounted.as_slice() {
            [one] => format!("{one} is"),
            all => format!("{} are", all.join(", ")),
        }
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controllers_that_are_mounted_or_missing_are_told() {
        let table = |hierarchy: &str, enabled: &str| {
            let row = |name| format!("{name}\t0\t1\t1\n");
            let mut text = "#subsys_name\thierarchy\tnum_cgroups\tenabled\n".to_owned();
            text.extend(["cpu", "cpuacct", "cpuset", "blkio", "pids"].map(row));
            text + &format!("memory\t{hierarchy}\t7\t{enabled}\n")
        };
        check(&table("0", "1")).unwrap();
        let why = |text: &str| check(text).unwrap_err().to_string();
        assert!(why(&table("4", "1")).starts_with("memory is mounted already"));
        assert!(why(&table("0", "0")).contains("no controller memory"));
        assert!(why("").contains("no controller cpu"));
        let two = table("4", "1").replace("cpuset\t0", "cpuset\t3");
        assert!(why(&two).starts_with("cpuset, memory are mounted already"));
    }
}
