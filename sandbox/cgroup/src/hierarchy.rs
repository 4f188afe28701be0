//! The hierarchies of the host in which groups can be made.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use crate::{Error, Group, Result};

/// The directory at which the host's hierarchies are mounted.
pub const ROOT: &str = "/sys/fs/cgroup";
/// The v1 hierarchies that sandboxes use if they are mounted.
pub const V1_CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];

/// The directories that are the parents of all groups, one in each hierarchy. Empty on a host
/// without writable control groups: groups then have no directory, and every operation on them
/// succeeds without effect.
#[derive(Clone, Debug)]
pub struct Hierarchies {
    /// The mount point of each hierarchy.
    roots: Arc<[PathBuf]>,
    /// The parent of all groups, relative to a hierarchy's mount point.
    parent: Arc<Path>,
}

impl Hierarchies {
    /// Returns the hierarchies of the host: that of cgroup v2, or those of `controllers` on v1. The
    /// groups' parent in each is `parent`, a relative path such as `slipway`; a leading `/` is
    /// left out, and other components than names are.
    pub fn of_host(parent: &str, controllers: &[&str]) -> Self {
        let root = Path::new(ROOT);
        let roots: Vec<_> = if is_v2(root) {
            vec![root.to_owned()]
        } else {
            controllers.iter().map(|name| root.join(name)).collect()
        };
        Self::at(roots.into_iter().filter(|root| writable(root)).collect(), parent)
    }

    /// Returns the hierarchies that are mounted at `roots`.
    pub fn at(roots: Vec<PathBuf>, parent: &str) -> Self {
        let names = Path::new(parent).components();
        let parent: PathBuf = names.filter(|part| matches!(part, Component::Normal(_))).collect();
        Self { roots: roots.into(), parent: parent.into() }
    }

    /// Returns whether there is no hierarchy in which groups can be made.
    pub fn is_empty(&self) -> bool {
        self.roots.is_empty()
    }

    /// Returns the mount points of the hierarchies.
    pub fn roots(&self) -> &[PathBuf] {
        &self.roots
    }

    /// Returns the group `name`, whether or not it exists.
    pub fn group(&self, name: &str) -> Group {
        Group::new(name, self.parents().map(|parent| parent.join(name)).collect())
    }

    /// Returns the path of group `name` in each hierarchy, as lines of proc_pid_cgroup(5) end with
    /// it.
    pub fn path_of(&self, name: &str) -> String {
        format!("/{}", self.parent.join(name).display())
    }

    /// Returns the names of the groups that exist in any hierarchy.
    pub fn names(&self) -> BTreeSet<String> {
        let entries = self.parents().filter_map(|parent| fs::read_dir(parent).ok()).flatten();
        let groups =
            entries.flatten().filter(|one| one.file_type().is_ok_and(|kind| kind.is_dir()));
        groups.filter_map(|one| one.file_name().into_string().ok()).collect()
    }

    /// Makes the groups' parents, and gives their groups the controllers of v2. Existing parents
    /// are no error.
    ///
    /// # Errors
    /// If a parent cannot be made.
    pub(crate) fn make_parents(&self) -> Result<()> {
        for root in self.roots.iter() {
            let parent = root.join(&self.parent);
            fs::create_dir_all(&parent)
                .map_err(Error::at("cannot create control group", &parent))?;
            if is_v2(root) {
                self.enable_controllers(root);
            }
        }
        Ok(())
    }

    fn parents(&self) -> impl Iterator<Item = PathBuf> {
        self.roots.iter().map(|root| root.join(&self.parent))
    }

    /// Enables the controllers for the children of each directory from the root down to the parent.
    fn enable_controllers(&self, root: &Path) {
        let mut dir = root.to_owned();
        let below = self.parent.components().map(Some).chain([None]);
        for next in below {
            for controller in ["+memory", "+cpu", "+pids"] {
                // A controller that the kernel lacks is no reason not to run.
                let _ = fs::write(dir.join("cgroup.subtree_control"), controller);
            }
            if let Some(name) = next {
                dir.push(name);
            }
        }
    }
}

fn is_v2(root: &Path) -> bool {
    root.join("cgroup.controllers").exists()
}

/// Returns whether groups can be created in `dir`. In many containers the hierarchies are mounted
/// read-only.
fn writable(dir: &Path) -> bool {
    dir.is_dir() && rustix::fs::access(dir, rustix::fs::Access::WRITE_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_stays_below_the_root() {
        let at = |parent: &str| Hierarchies::at(vec!["/h".into()], parent).path_of("one");
        assert_eq!(at("slipway"), "/slipway/one");
        assert_eq!(at("/system.slice/slipway.service"), "/system.slice/slipway.service/one");
        assert_eq!(at("../../etc/./x"), "/etc/x/one");
    }

    #[test]
    fn names_are_those_of_any_hierarchy() {
        let dir = tempfile::tempdir().unwrap();
        let roots: Vec<_> = ["cpu", "pids"].iter().map(|name| dir.path().join(name)).collect();
        for root in &roots {
            fs::create_dir(root).unwrap();
        }
        let all = Hierarchies::at(roots.clone(), "slipway");
        assert!(all.names().is_empty());
        all.make_parents().unwrap();
        fs::create_dir(roots[0].join("slipway/a")).unwrap();
        fs::create_dir(roots[1].join("slipway/b")).unwrap();
        fs::write(roots[1].join("slipway/cgroup.procs"), "").unwrap();
        assert_eq!(all.names(), BTreeSet::from(["a".to_owned(), "b".to_owned()]));
    }
}
