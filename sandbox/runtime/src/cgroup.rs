//! The control groups of sandboxes' VMMs, from the node's pool where one is ready.
//!
//! A sandbox's record has the path of its group before anything is in the group, so the next daemon
//! finds it after a crash. The path is removed from the record before the pool gets the group back:
//! no two records name the group of one live sandbox.
//!
//! On a host without writable control groups (a container, an odd mount), sandboxes run without
//! limits on the VMM; `slipway doctor` says so.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use slipway_cgroup::{Counters, Group, Hierarchies, Limits, Pool, Settings, V1_CONTROLLERS};

use crate::config::Config;
use crate::node::Node;
use crate::record::{ControlGroup, Record};
use crate::sandbox::Sandbox;
use crate::{Error, Result};

/// The parent of groups whose path is not recorded.
const PARENT: &str = "/slipway";

/// Returns the CPU time that the VMM of a sandbox with so many CPUs may use, as a number of CPUs.
/// One more is for the VMM's own threads: the VMM must answer while the guest computes.
pub(crate) fn cpu_time(cpus: u32) -> u32 {
    cpus + 1
}

/// Makes the pool of a node, which makes no group yet.
///
/// # Errors
/// The error of creating a thread.
pub(crate) fn pool(config: &Config) -> std::io::Result<Pool> {
    let hierarchies = Hierarchies::of_host(&config.cgroup_parent, &V1_CONTROLLERS);
    // Unique for each data directory of the host, for as long as groups live: until it restarts.
    let tag = std::fs::metadata(&config.data_dir)
        .map(|data| format!("pool-{:x}-{:x}", data.dev(), data.ino()))
        .unwrap_or_default();
    let size = if tag.is_empty() { 0 } else { config.cgroup_pool as usize };
    let limits = Limits {
        memory_bytes: config.memory_bytes,
        cpus: cpu_time(config.cpus),
        threads: 64 + config.cpus,
    };
    Pool::new(hierarchies, Settings { tag, size, limits })
}

/// Tells the pool which groups the live sandboxes have. It takes the others that an earlier daemon
/// left, unless a record that could not be read (`all_read` is false) may name one of them, and
/// begins to make groups.
pub(crate) async fn open(node: &Node, all_read: bool) {
    let live = node.list().into_iter().map(|sandbox| sandbox.record());
    let owned = live.filter_map(|record| Some(split(&record.cgroup?.path).1.to_owned()));
    let owned: BTreeSet<String> = owned.collect();
    let pool = Arc::clone(&node.cgroups);
    node.lane().run(move || pool.open(all_read.then_some(&owned))).await;
}

/// Returns the path of the sandbox's group in each hierarchy, as lines of proc_pid_cgroup(5) end
/// with it.
pub(crate) fn path(record: &Record) -> String {
    match &record.cgroup {
        Some(group) => group.path.clone(),
        None => format!("{PARENT}/{}", record.id),
    }
}

/// Returns the sandbox's group, whether or not it exists.
pub(crate) fn of(record: &Record) -> Group {
    found(record).1
}

/// Returns the hierarchies of the sandbox's group, and the group, whether or not it exists.
pub(crate) fn found(record: &Record) -> (Hierarchies, Group) {
    let path = path(record);
    let (parent, name) = split(&path);
    let hierarchies = Hierarchies::of_host(parent, &V1_CONTROLLERS);
    let before = record.cgroup.as_ref().map(|group| group.before).unwrap_or_default();
    let group = hierarchies.group(name).counting_from(before);
    (hierarchies, group)
}

/// Chooses the group of a sandbox that is about to start: one of the pool, or `None` if the pool
/// has none ready. Makes no system call. The caller saves the second part in the record before it
/// uses the group.
pub(crate) fn choose(node: &Node, id: &str) -> (Option<Group>, ControlGroup) {
    let taken = node.cgroups.take();
    let (name, before) = match &taken {
        Some(group) => (group.name(), group.before()),
        None => (id, Counters::default()),
    };
    let path = node.cgroups.hierarchies().path_of(name);
    (taken, ControlGroup { path, before })
}

/// Sets the limits of the chosen group, and makes the group if it is none of the pool. Returns the
/// files by which a process joins it.
///
/// # Errors
/// [`Error::Cgroup`] if the group cannot be made or a limit cannot be set.
pub(crate) async fn prepare(
    node: &Node,
    sandbox: &Sandbox,
    taken: Option<Group>,
    limits: Limits,
) -> Result<Vec<PathBuf>> {
    let (pool, id) = (Arc::clone(&node.cgroups), sandbox.id.clone());
    let prepared = sandbox.lane.run(move || {
        pool.expect(limits);
        let mut group = taken.map_or_else(|| pool.make(&id), Ok)?;
        group.limit(limits)?;
        Ok(group.procs_files())
    });
    prepared.await.map_err(Error::Cgroup)
}

/// Returns the files by which a process joins the sandbox's group.
pub(crate) async fn procs_files(sandbox: &Sandbox) -> Vec<PathBuf> {
    let group = sandbox.look(of);
    sandbox.lane.run(move || group.procs_files()).await
}

/// Gives the sandbox's group back: to the pool, or by removing it. The sandbox's processes have
/// ended.
///
/// # Errors
/// [`Error::Cgroup`] if a process is left in it; errors of saving the record, which then still
/// names the group.
pub(crate) async fn release(node: &Node, sandbox: &Sandbox) -> Result<()> {
    // Nothing confines the group while it is given back, nor afterwards.
    let _turn = sandbox.placement.lock().await;
    let record = sandbox.record();
    let group = of(&record);
    let pooled = node.cgroups.owns(group.name())
        && node.cgroups.hierarchies().path_of(group.name()) == path(&record);
    if !pooled {
        return remove(sandbox, group).await;
    }
    if let Err(error) = sandbox.update(|record| record.cgroup = None).await {
        // The saved record still names the group, so nobody else may have it.
        sandbox.note(|current| current.cgroup = record.cgroup);
        return Err(error);
    }
    node.cgroups.give_back(group);
    Ok(())
}

/// Removes a group. It empties a moment after its last process was reaped, so the removal is
/// retried.
async fn remove(sandbox: &Sandbox, group: Group) -> Result<()> {
    const TRIES: u32 = 100;
    const AGAIN: Duration = Duration::from_millis(10);
    let mut tries = 1;
    loop {
        let group = group.clone();
        match sandbox.lane.run(move || group.remove()).await {
            Err(_) if tries < TRIES => tries += 1,
            removed => return removed.map_err(Error::Cgroup),
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Returns the parent and the name of the group at `path`.
fn split(path: &str) -> (&str, &str) {
    let name = Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or_default();
    (path.strip_suffix(name).unwrap_or(path), name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_a_parent_and_a_name() {
        assert_eq!(split("/slipway/pool-1-2-3"), ("/slipway/", "pool-1-2-3"));
        assert_eq!(split("/a/b/c"), ("/a/b/", "c"));
        assert_eq!(split(""), ("", ""));
    }
}
