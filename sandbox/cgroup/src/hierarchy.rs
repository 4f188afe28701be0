//! The hierarchies of the host in which groups can be made.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use crate::{Error, Group, Result, Sets, cpuset};

/// The directory at which the host's hierarchies are mounted.
pub const ROOT: &str = "/sys/fs/cgroup";
/// The v1 hierarchies that sandboxes use if they are mounted.
pub const V1_CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];
/// The controllers of v2 that sandboxes use.
const V2_CONTROLLERS: [(&str, &str); 3] =
    [("memory", "+memory"), ("cpu", "+cpu"), ("pids", "+pids")];
/// The hierarchy of v1 that has CPU sets.
const V1_CPUSETS: &str = "cpuset";

/// The directories that are the parents of all groups, one in each hierarchy. Empty on a host
/// without writable control groups: groups then have no directory, and every operation on them
/// succeeds without effect.
#[derive(Clone, Debug)]
pub struct Hierarchies {
    /// The mount point of each hierarchy.
    roots: Arc<[PathBuf]>,
    /// The mount point of v1's hierarchy of CPU sets, if there is one.
    cpusets: Option<Arc<Path>>,
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
        let cpusets = Some(root.join(V1_CPUSETS)).filter(|dir| !is_v2(root) && writable(dir));
        let roots = roots.into_iter().filter(|root| writable(root)).collect();
        Self { cpusets: cpusets.map(Arc::from), ..Self::at(roots, parent) }
    }

    /// Returns the hierarchies that are mounted at `roots`.
    pub fn at(roots: Vec<PathBuf>, parent: &str) -> Self {
        let names = Path::new(parent).components();
        let parent: PathBuf = names.filter(|part| matches!(part, Component::Normal(_))).collect();
        Self { roots: roots.into(), cpusets: None, parent: parent.into() }
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
        let cpuset = self.cpusets.as_ref().map(|root| root.join(&self.parent).join(name));
        Group::new(name, self.parents().map(|parent| parent.join(name)).collect(), cpuset)
    }

    /// Confines the processes of a group that exists, and those that join it later, to CPUs and
    /// memory nodes. Returns `false`, with nothing changed, if the host has no CPU sets in its
    /// control groups. Waits for the kernel, which on v2 moves memory to its new nodes.
    ///
    /// # Errors
    /// If the kernel refuses a set. One of the two may have changed.
    pub fn confine(&self, group: &Group, sets: &Sets) -> Result<bool> {
        let dirs = group.dirs();
        if let (Some(root), Some(dir)) = (&self.cpusets, group.cpuset()) {
            if !dirs.is_empty() && (dir.exists() || !sets.is_empty()) {
                let procs = dirs.first().map(|dir| dir.join("cgroup.procs"));
                cpuset::set_v1(root, &self.parent.join(group.name()), procs.as_deref(), sets)?;
            }
            return Ok(!dirs.is_empty());
        }
        let (Some(root), Some(dir)) = (self.roots.first(), dirs.first()) else { return Ok(false) };
        if cpuset::set_v2(dir, sets)? {
            return Ok(true);
        }
        if is_v2(root) && !sets.is_empty() {
            self.enable_controllers(root, &["+cpuset"]);
            return cpuset::set_v2(dir, sets);
        }
        Ok(false)
    }

    /// Returns the path of group `name` in each hierarchy, as lines of proc_pid_cgroup(5) end with
    /// it.
    pub fn path_of(&self, name: &str) -> String {
        format!("/{}", self.parent.join(name).display())
    }

    /// Returns the names of the groups that exist in any hierarchy, that of CPU sets among them.
    pub fn names(&self) -> BTreeSet<String> {
        let cpusets = self.cpusets.iter().map(|root| root.join(&self.parent));
        let parents = self.parents().chain(cpusets);
        let entries = parents.filter_map(|parent| fs::read_dir(parent).ok()).flatten();
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
                self.enable_controllers(root, &V2_CONTROLLERS.map(|(_, enabled)| enabled));
            }
        }
        Ok(())
    }

    /// Returns whether the group lacks a controller of v2 that sandboxes use and the host has:
    /// somebody has taken it away from the group's parent.
    pub(crate) fn lacks_controllers(&self, group: &Group) -> bool {
        let lists = |dir: &Path| fs::read_to_string(dir.join("cgroup.controllers")).ok();
        let lacks = |(root, dir): (&PathBuf, &PathBuf)| {
            // v1 has no such file.
            let Some(host) = lists(root) else { return false };
            let given = lists(dir).unwrap_or_default();
            let has = |list: &str, name: &str| list.split_ascii_whitespace().any(|one| one == name);
            V2_CONTROLLERS.iter().any(|(name, _)| has(&host, name) && !has(&given, name))
        };
        self.roots.iter().zip(group.dirs()).any(lacks)
    }

    /// Returns the least limit of memory of the groups' parent and of those above it, in bytes;
    /// `None` without any.
    pub fn memory_limit(&self) -> Option<u64> {
        let read = |dir: PathBuf| {
            let file = |name: &str| -> Option<u64> {
                fs::read_to_string(dir.join(name)).ok()?.trim().parse().ok()
            };
            file("memory.max").or_else(|| file("memory.limit_in_bytes"))
        };
        let above =
            |root: &PathBuf| self.parent.ancestors().filter_map(|at| read(root.join(at))).min();
        self.roots.iter().filter_map(above).min()
    }

    /// Makes a group whose parent belongs to others, as to kubelet. The parent must be there in one
    /// hierarchy, unless it is a slice: systemd makes slices for their units, too. A parent that is
    /// missing in the other hierarchies is made. A group that is there already, with neither
    /// processes nor groups in it, is no error.
    ///
    /// # Errors
    /// The errors of [`check_free`](Self::check_free), or the parent is in no hierarchy; no group
    /// is made then. If a directory cannot be made, those of the group are removed.
    pub fn make_in_parent(&self, group: &Group) -> Result<()> {
        let Some(first) = self.parents().next() else { return Ok(()) };
        let is_slice = self.parent.extension().is_some_and(|name| name == "slice");
        if !is_slice && !self.parents().any(|parent| parent.is_dir()) {
            let next = "make it first, or name another parent (cgroup_parent)";
            let error = io::Error::new(io::ErrorKind::NotFound, next);
            return Err(Error::at("there is no control group", &first)(error));
        }
        self.check_free(group)?;
        self.make_parents()?;
        let made = group.dirs().iter().try_for_each(|dir| cpuset::make(dir));
        if made.is_err() {
            let _ = group.remove();
        }
        made
    }

    /// Checks that a group can be given to a new owner. The limits of a group hold for the groups
    /// in it, too, so one with groups in it is somebody else's. A missing group is no error.
    ///
    /// # Errors
    /// If processes or groups are in the group.
    pub fn check_free(&self, group: &Group) -> Result<()> {
        let refused = |what: &'static str, dir: &Path| {
            let next = "end them first, or name another group";
            let error = io::Error::new(io::ErrorKind::AlreadyExists, next);
            Error::at(what, dir)(error)
        };
        if let Some(dir) = group.dirs().iter().find(|dir| has_processes(dir)) {
            return Err(refused("processes are in control group", dir));
        }
        if let Some(dir) = group.dirs().iter().find(|dir| has_groups(dir)) {
            return Err(refused("other groups are in control group", dir));
        }
        Ok(())
    }

    fn parents(&self) -> impl Iterator<Item = PathBuf> {
        self.roots.iter().map(|root| root.join(&self.parent))
    }

    /// Enables controllers for the children of each directory from the root down to the parent.
    fn enable_controllers(&self, root: &Path, controllers: &[&str]) {
        let mut dir = root.to_owned();
        let below = self.parent.components().map(Some).chain([None]);
        for next in below {
            for controller in controllers {
                // A controller that the kernel lacks is no reason not to run.
                let _ = fs::write(dir.join("cgroup.subtree_control"), controller);
            }
            if let Some(name) = next {
                dir.push(name);
            }
        }
    }
}

fn has_processes(dir: &Path) -> bool {
    fs::read_to_string(dir.join("cgroup.procs")).is_ok_and(|processes| !processes.is_empty())
}

fn has_groups(dir: &Path) -> bool {
    let is_dir = |entry: fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    fs::read_dir(dir).is_ok_and(|entries| entries.flatten().any(is_dir))
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
    fn a_group_is_confined_where_the_host_can() {
        let host = tempfile::tempdir().unwrap();
        let (pids, cpusets) = (host.path().join("pids"), host.path().join("cpuset"));
        for dir in [pids.join("p/one"), cpusets.clone()] {
            fs::create_dir_all(dir).unwrap();
        }
        for (file, list) in cpuset::FILES.into_iter().zip(["0-3", "0"]) {
            fs::write(cpusets.join(file), list).unwrap();
        }
        let sets = Sets { cpus: "2".to_owned(), mems: String::new() };
        let without = Hierarchies::at(vec![pids.clone()], "p");
        assert!(!without.confine(&without.group("one"), &sets).unwrap());
        let with = Hierarchies { cpusets: Some(cpusets.clone().into()), ..without };
        let group = with.group("one");
        assert!(with.confine(&group, &Sets::default()).unwrap(), "it is confined to nothing");
        assert_eq!(group.procs_files(), [pids.join("p/one/cgroup.procs")]);
        assert!(!cpusets.join("p").exists());
        assert!(with.confine(&group, &sets).unwrap());
        assert_eq!(fs::read_to_string(cpusets.join("p/one/cpuset.cpus")).unwrap(), "2\n");
        assert_eq!(group.procs_files()[1], cpusets.join("p/one/cgroup.procs"));
        let nowhere = Hierarchies { cpusets: with.cpusets, ..Hierarchies::at(Vec::new(), "p") };
        assert!(!nowhere.confine(&nowhere.group("one"), &sets).unwrap());
    }

    #[test]
    fn a_group_is_made_in_a_parent_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let roots: Vec<_> = ["cpu", "pids"].iter().map(|name| dir.path().join(name)).collect();
        roots.iter().for_each(|root| fs::create_dir(root).unwrap());
        let in_parent = |parent: &str| {
            let all = Hierarchies::at(roots.clone(), parent);
            let group = all.group("one");
            (all.make_in_parent(&group).map_err(|error| error.to_string()), group)
        };
        let error = in_parent("/kubepods/pod1").0.unwrap_err();
        assert!(error.contains("there is no control group") && !error.contains('\n'), "{error}");
        assert!(!roots[0].join("kubepods").exists() && !roots[1].join("kubepods").exists());
        fs::create_dir_all(roots[1].join("kubepods/pod1")).unwrap();
        let (made, group) = in_parent("/kubepods/pod1");
        made.unwrap();
        assert!(roots.iter().all(|root| root.join("kubepods/pod1/one").is_dir()));
        in_parent("/kubepods/pod1").0.unwrap();
        group.remove().unwrap();
        assert!(roots.iter().all(|root| !root.join("kubepods/pod1/one").exists()));
        let limit = |at: &str, text: &str| fs::write(roots[1].join(at), text).unwrap();
        let in_pod = Hierarchies::at(roots.clone(), "/kubepods/pod1");
        assert_eq!(in_pod.memory_limit(), None);
        limit("kubepods/memory.max", "4096\n");
        limit("kubepods/pod1/memory.max", "max\n");
        assert_eq!(in_pod.memory_limit(), Some(4096));
        limit("kubepods/pod1/memory.max", "1024\n");
        assert_eq!(in_pod.memory_limit(), Some(1024));
        in_parent("/a.slice/a-b.slice").0.unwrap();
        fs::write(roots[1].join("a.slice/a-b.slice/one/cgroup.procs"), "1\n").unwrap();
        let error = in_parent("/a.slice/a-b.slice").0.unwrap_err();
        assert!(error.contains("processes are in control group"), "{error}");
        // The limits of a group with others in it would be theirs, too.
        let (made, group) = in_parent("/b.slice");
        made.unwrap();
        fs::create_dir(roots[0].join("b.slice/one/pod1")).unwrap();
        let error = in_parent("/b.slice").0.unwrap_err();
        assert!(error.contains("other groups are in control group"), "{error}");
        assert!(roots.iter().all(|root| root.join("b.slice/one").is_dir()));
        fs::remove_dir(roots[0].join("b.slice/one/pod1")).unwrap();
        group.remove().unwrap();
        let none = Hierarchies::at(Vec::new(), "/nowhere");
        none.make_in_parent(&none.group("one")).unwrap();
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
        let names = ["a", "b", "c"].map(str::to_owned);
        assert_eq!(all.names(), BTreeSet::from_iter(names[..2].iter().cloned()));
        let cpusets = dir.path().join("cpuset");
        fs::create_dir_all(cpusets.join("slipway/c")).unwrap();
        let all = Hierarchies { cpusets: Some(cpusets.into()), ..all };
        assert_eq!(all.names(), BTreeSet::from(names));
        all.group("c").remove().unwrap();
        assert!(!all.names().contains("c"));
    }
}
