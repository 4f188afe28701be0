//! The control groups of sandboxes' VMMs, from the node's pool where one is ready.
//!
//! A sandbox's record has the path of its group before anything is in the group, so the next daemon
//! finds it after a crash. The path is removed from the record before the pool gets the group back:
//! no two records name the group of one live sandbox.
//!
//! On a host without writable control groups (a container, an odd mount), sandboxes run without
//! limits on the VMM; `slipway doctor` says so.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use slipway_cgroup::{Counters, Group, Hierarchies, Limits, Pool, Settings, V1_CONTROLLERS};
use tokio::sync::oneshot;

use crate::config::Config;
use crate::node::Node;
use crate::record::{ControlGroup, Record};
use crate::sandbox::Sandbox;
use crate::{Error, Result};

/// The parent of groups whose path is not recorded.
const PARENT: &str = "/slipway";
/// The time in which the kernel limits the memory of a group, beside its earlier work on the group.
const PATIENCE: Duration = Duration::from_secs(30);

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
    let owned =
        live.filter_map(|record| Some(split(&record.confinement.cgroup?.path).1.to_owned()));
    let owned: BTreeSet<String> = owned.collect();
    let pool = Arc::clone(&node.cgroups);
    node.lane().run(move || pool.open(all_read.then_some(&owned))).await;
}

/// Returns the path of the sandbox's group in each hierarchy, as lines of proc_pid_cgroup(5) end
/// with it.
pub(crate) fn path(record: &Record) -> String {
    match &record.confinement.cgroup {
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
    let (hierarchies, group) = at(&path(record));
    let before = record.confinement.cgroup.as_ref().map(|group| group.before).unwrap_or_default();
    (hierarchies, group.counting_from(before))
}

/// Returns the hierarchies of the group at `path`, and the group, whether or not it exists.
fn at(path: &str) -> (Hierarchies, Group) {
    let (parent, name) = split(path);
    let hierarchies = Hierarchies::of_host(parent, &V1_CONTROLLERS);
    let group = hierarchies.group(name);
    (hierarchies, group)
}

/// Checks the path of a control group that a sandbox is asked to have, "" for none. `own` is the
/// parent of the node's groups. Returns the path without repeated slashes and dots.
///
/// # Errors
/// [`Error::Invalid`] if the path names no group below the root of a hierarchy, or one of the
/// node's, which the pool could give to another sandbox.
pub(crate) fn asked(path: &str, own: &Path) -> Result<String> {
    if own.file_name().is_some() && Path::new(path).starts_with(own) {
        return Err(Error::Invalid(format!(
            "the control group {path:?} is one of the node's own (cgroup_parent): name another"
        )));
    }
    let parts: Vec<_> = Path::new(path).components().collect();
    match &parts[..] {
        [] => Ok(String::new()),
        [Component::RootDir, names @ ..]
            if !names.is_empty()
                && names.iter().all(|name| matches!(name, Component::Normal(_))) =>
        {
            Ok(parts.iter().collect::<PathBuf>().to_string_lossy().into_owned())
        }
        _ => Err(Error::Invalid(format!(
            "the control group {path:?} is wrong: it is an absolute path, as /kubepods/pod1/one"
        ))),
    }
}

/// Takes a pod that has not started out of its own control group. No limit of kubelet's bounds its
/// memory then, so it has the least that was asked for.
pub(crate) fn leave_asked(record: &mut Record) {
    record.confinement.control_group.clear();
    let least = record.confinement.least_memory_bytes;
    record.memory_bytes = record.memory_bytes.max(least);
    record.memory = record.memory.at_least(least);
}

/// Chooses the group of a sandbox that is about to start: the one that its VMM, which was started
/// `ahead`, is in, or another one. The first part is a group of the pool, or `None` if the pool has
/// none ready. The caller saves the second part in the record before it uses the group. Makes no
/// system call.
///
/// Both parts are `None` for a sandbox that is asked to have a group. [`prepare`] records that
/// group once it is known to be nobody else's: the processes in a recorded group are killed after
/// a crash of the daemon.
pub(crate) fn choose(
    node: &Node,
    sandbox: &Sandbox,
    ahead: Option<Group>,
) -> (Option<Group>, Option<ControlGroup>) {
    if sandbox.look(|record| record.confinement.asks_for_group()) {
        return (None, None);
    }
    let id = sandbox.id.as_str();
    let taken = ahead.or_else(|| node.cgroups.take());
    let (name, before) = match &taken {
        Some(group) => (group.name(), group.before()),
        None => (id, Counters::default()),
    };
    let path = node.cgroups.hierarchies().path_of(name);
    (taken, Some(ControlGroup { path, before }))
}

/// Sets the limits of the chosen group, and makes the group if it is none of the pool, when the
/// sandbox's turn has come. Returns the files by which a process joins it.
///
/// # Errors
/// [`Error::Cgroup`] if the group cannot be made or a limit cannot be set; [`Error::Invalid`] if
/// another sandbox has the group; [`Error::File`] if the record is not saved.
pub(crate) async fn prepare(
    node: &Node,
    sandbox: &Sandbox,
    taken: Option<Group>,
    limits: Limits,
) -> Result<Vec<PathBuf>> {
    if sandbox.look(|record| record.confinement.asks_for_group()) {
        return make_asked(node, sandbox, limits).await;
    }
    let (pool, id) = (Arc::clone(&node.cgroups), sandbox.id.clone());
    let prepared = sandbox.lane.run(move || {
        pool.expect(limits);
        let _turn = pool.turn();
        let mut group = taken.map_or_else(|| pool.make(&id), Ok)?;
        group.limit(limits)?;
        Ok(group.procs_files())
    });
    prepared.await.map_err(Error::Cgroup)
}

/// Makes the group that the sandbox is asked to have, and sets its limits. Other sandboxes do not
/// wait for that. If the group is another's or cannot be made, the record does not name it, so
/// that nobody removes it or ends the processes in it.
async fn make_asked(node: &Node, sandbox: &Sandbox, limits: Limits) -> Result<Vec<PathBuf>> {
    let path = sandbox.look(|record| record.confinement.control_group.clone());
    let (hierarchies, group) = at(&path);
    let checked = sandbox.lane.run(move || hierarchies.check_free(&group));
    checked.await.map_err(Error::Cgroup)?;
    let its = ControlGroup { path: path.clone(), before: Counters::default() };
    // Recorded before the look at the others: of two sandboxes at once, one sees the other.
    sandbox.update(|record| record.confinement.cgroup = Some(its)).await?;
    let is_its = |other: &Sandbox| {
        other.id != sandbox.id && other.look(|record| record.confinement.has_group(&path))
    };
    let owner = node.list().into_iter().find(|other| is_its(other));
    let made = match owner {
        Some(owner) => Err(Error::Invalid(format!(
            "the control group {path} is that of sandbox {}: name another",
            owner.name
        ))),
        None => make_at(sandbox, &path, limits).await,
    };
    if made.is_err() {
        sandbox.update(|record| record.confinement.cgroup = None).await?;
    }
    made
}

/// Makes the group at `path`, and sets its limits.
async fn make_at(sandbox: &Sandbox, path: &str, limits: Limits) -> Result<Vec<PathBuf>> {
    let (hierarchies, mut group) = at(path);
    let name = sandbox.name.clone();
    let made = sandbox.lane.run(move || {
        hierarchies.make_in_parent(&group)?;
        warn_of_limit(&name, limits.memory_bytes, hierarchies.memory_limit());
        let limited = group.limit(limits);
        if limited.is_err() {
            let _ = group.remove();
        }
        limited.map(|()| group.procs_files())
    });
    made.await.map_err(Error::Cgroup)
}

/// Logs a limit above the control group of a pod's own that is too small for so much memory of the
/// guest. kubelet raises its limit before it raises those of containers; `slipway update` does not.
pub(crate) async fn look_above(sandbox: &Sandbox, guest_bytes: u64) {
    let Some((wanted, limit)) = above(sandbox, guest_bytes).await else { return };
    warn_of_limit(&sandbox.name, wanted, limit);
}

/// Checks that the limits above the control group of a pod's own leave room for so much memory of
/// the guest, some of it in huge pages. kubelet's limit does not count these, which are ordinary
/// memory of the host.
///
/// # Errors
/// [`Error::Invalid`], which says how much is missing.
pub(crate) async fn check_above(sandbox: &Sandbox, guest_bytes: u64) -> Result<()> {
    let Some((wanted, Some(limit))) = above(sandbox, guest_bytes).await else { return Ok(()) };
    match wanted.saturating_sub(limit).div_ceil(1 << 20) {
        0 => Ok(()),
        missing => Err(Error::Invalid(format!(
            "with its huge pages the pod's VMM may take {} MiB of the host, and its control \
             group's parent has a limit of {} MiB, which does not count them: name a RuntimeClass \
             whose overhead has {missing} MiB more, or set pod_cgroups = false",
            wanted.div_ceil(1 << 20),
            limit >> 20
        ))),
    }
}

/// Returns the most memory of the guest in bytes for which the limits above the control group of a
/// pod's own leave room. Returns `None` if there is no such limit or group.
pub(crate) async fn most_above(sandbox: &Sandbox) -> Option<u64> {
    let (own, limit) = above(sandbox, 0).await?;
    limit.map(|limit| limit.saturating_sub(own))
}

/// Returns the memory in bytes that the VMM of a pod in a control group of its own may take with so
/// much memory of the guest, and the limit above that group. Returns `None` for other sandboxes.
async fn above(sandbox: &Sandbox, guest_bytes: u64) -> Option<(u64, Option<u64>)> {
    if sandbox.look(|record| !record.confinement.asks_for_group()) {
        return None;
    }
    let (hierarchies, _) = sandbox.look(found);
    let wanted = guest_bytes.saturating_add(sandbox.look(|record| record.memory.overhead_bytes));
    let limit = sandbox.lane.run(move || hierarchies.memory_limit()).await;
    Some((wanted, limit))
}

/// Logs that the kernel may end a VMM before the VMM has taken what it may take.
fn warn_of_limit(name: &str, wanted: u64, limit: Option<u64>) {
    if let Some(limit) = limit.filter(|limit| *limit < wanted) {
        tracing::warn!(
            sandbox = name,
            "its control group's parent has a limit of {} MiB, and its VMM may take {} MiB: give \
             the pod's RuntimeClass a larger overhead, or set pod_cgroups = false",
            limit >> 20,
            wanted >> 20
        );
    }
}

/// Returns the files by which a process joins the sandbox's group.
pub(crate) async fn procs_files(sandbox: &Sandbox) -> Vec<PathBuf> {
    let group = sandbox.look(of);
    sandbox.lane.run(move || group.procs_files()).await
}

/// Limits the memory of a sandbox's VMM to what it needs for so much memory of its guest.
///
/// The kernel reclaims memory until the VMM has no more than that. A VMM that touches its pages
/// again, as one that has not given back what it said, can make that last. So a thread of the
/// sandbox's own waits for the kernel, and no thread that other sandboxes need. The thread holds
/// the turn for the group, which nobody else is given meanwhile.
///
/// # Errors
/// [`Error::Cgroup`] if the limit cannot be set; [`Error::File`] if the kernel does not set it in
/// time, or no thread is left.
pub(crate) async fn limit_memory(sandbox: &Sandbox, guest_bytes: u64) -> Result<()> {
    let own = sandbox.look(|record| record.memory.overhead_bytes);
    let bytes = guest_bytes.saturating_add(own);
    let limited = on_own_thread(sandbox, move |mut group| group.limit_memory(bytes));
    tokio::time::timeout(PATIENCE, limited).await.unwrap_or_else(|_| {
        let late = "the kernel cannot reclaim what the VMM uses";
        Err(unlimited(sandbox)(io::Error::new(io::ErrorKind::TimedOut, late)))
    })
}

/// Has a thread of the sandbox's own, which has the turn for the sandbox's group, limit the group.
/// The thread goes on if the caller stops waiting.
async fn on_own_thread(
    sandbox: &Sandbox,
    limit: impl FnOnce(Group) -> slipway_cgroup::Result<()> + Send + 'static,
) -> Result<()> {
    let turn = Arc::clone(&sandbox.placement).lock_owned().await;
    let group = sandbox.look(of);
    let (done, outcome) = oneshot::channel();
    let run = move || {
        let limited = limit(group);
        drop(turn);
        // The caller may have given up.
        drop(done.send(limited));
    };
    let thread = std::thread::Builder::new().name("limit".into());
    thread.spawn(run).map_err(unlimited(sandbox))?;
    match outcome.await {
        Ok(limited) => limited.map_err(Error::Cgroup),
        Err(_) => Err(unlimited(sandbox)(io::Error::other("the thread for it has ended"))),
    }
}

/// Returns a function that makes the error of a group whose memory is not limited.
fn unlimited(sandbox: &Sandbox) -> impl FnOnce(io::Error) -> Error {
    Error::file("cannot limit the memory of the control group", sandbox.look(path))
}

/// Gives the sandbox's group back: to the pool, or by removing it. The sandbox's processes have
/// ended.
///
/// # Errors
/// [`Error::Cgroup`] if a process is left in it; errors of saving the record, which then still
/// names the group.
pub(crate) async fn release(node: &Node, sandbox: &Sandbox) -> Result<()> {
    // Nothing confines or limits the group while it is given back, nor afterwards.
    let _turn = sandbox.placement.lock().await;
    let record = sandbox.record();
    let group = of(&record);
    let pooled = node.cgroups.owns(group.name())
        && node.cgroups.hierarchies().path_of(group.name()) == path(&record);
    if !pooled {
        return remove(sandbox, group).await;
    }
    if let Err(error) = sandbox.update(|record| record.confinement.cgroup = None).await {
        // The saved record still names the group, so nobody else may have it.
        sandbox.note(|current| current.confinement.cgroup = record.confinement.cgroup);
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
    use std::sync::mpsc::channel;

    use super::*;
    use crate::adopt::tests::record_of;
    use crate::files::{Files, THREADS};
    use crate::record::{MemoryBounds, SandboxState, Store};

    #[test]
    fn a_path_is_a_parent_and_a_name() {
        assert_eq!(split("/slipway/pool-1-2-3"), ("/slipway/", "pool-1-2-3"));
        assert_eq!(split("/a/b/c"), ("/a/b/", "c"));
        assert_eq!(split(""), ("", ""));
    }

    #[test]
    fn a_group_that_is_asked_for_is_below_the_root() {
        let own = Path::new("/slipway/");
        for (path, group) in [("", ""), ("/a/one", "/a/one"), ("//a/./one/", "/a/one")] {
            assert_eq!(asked(path, own).unwrap(), group);
        }
        assert_eq!(asked("/slipway-pods/one", own).unwrap(), "/slipway-pods/one");
        assert_eq!(asked("/slipway/one", Path::new("/")).unwrap(), "/slipway/one");
        for path in ["/", "a/one", "/a/../one", "..", "/slipway", "//slipway/./pool-1-2"] {
            let error = asked(path, own).unwrap_err().to_string();
            assert!(error.contains("the control group") && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn a_pod_out_of_its_group_has_the_least_memory_that_was_asked_for() {
        let left = |least_memory_bytes| {
            let mut record = Record {
                memory_bytes: 160,
                memory: MemoryBounds::new(160, 200),
                ..record_of(SandboxState::Created)
            };
            record.confinement.control_group = "/a/one".to_owned();
            record.confinement.least_memory_bytes = least_memory_bytes;
            leave_asked(&mut record);
            assert!(!record.confinement.asks_for_group());
            let bounds = record.memory;
            (record.memory_bytes, bounds.boot_bytes, bounds.granted_bytes, bounds.max_bytes)
        };
        assert_eq!(left(256), (256, 256, 256, 256));
        assert_eq!(left(0), (160, 160, 160, 200));
    }

    #[test]
    fn a_group_is_that_of_the_sandbox_whose_record_names_it() {
        let mut record = record_of(SandboxState::Starting);
        record.confinement.control_group = "/a/one".to_owned();
        assert!(!record.confinement.has_group("/a/one"), "it is only asked for");
        record.confinement.cgroup =
            Some(ControlGroup { path: "/a/one".to_owned(), before: Counters::default() });
        let has = |path| record.confinement.has_group(path);
        assert!(has("/a/one") && !has("/a") && !has("/one"));
    }

    /// More sandboxes than there are threads for files have a limit that the kernel does not set.
    #[tokio::test]
    async fn a_limit_that_is_not_set_holds_up_its_sandbox_alone() {
        let (files, dir) = (Files::start().unwrap(), tempfile::tempdir().unwrap());
        let sandbox = || {
            let record = record_of(SandboxState::Running);
            let store = Store::new(dir.path(), &record.id);
            Sandbox::new(record, store, files.lane())
        };
        let mut hanging = Vec::new();
        for _ in 0..=THREADS {
            let (release, held) = channel::<()>();
            let its = sandbox();
            let limited = Arc::clone(&its);
            let limit = tokio::spawn(async move {
                on_own_thread(&limited, move |_| {
                    let _ = held.recv();
                    Ok(())
                })
                .await
            });
            while its.placement.try_lock().is_ok() {
                tokio::task::yield_now().await;
            }
            hanging.push((its, release, limit));
        }
        let other = sandbox();
        other.lane.run(|| ()).await;
        on_own_thread(&other, |_| Ok(())).await.unwrap();
        for (its, release, limit) in hanging {
            its.lane.run(|| ()).await;
            limit.abort();
            assert!(limit.await.is_err());
            assert!(its.placement.try_lock().is_err(), "the group is given to nobody else");
            drop(release);
            drop(its.placement.lock().await);
        }
    }
}
