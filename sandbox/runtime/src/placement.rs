//! The CPUs and the memory nodes of the host to which sandboxes keep: the CPU sets of containers.
//!
//! A sandbox's VMM, with all its threads and the process of its shares, is confined to the union of
//! the sets of its containers: guests know nothing of the host's CPUs, and run containers on any of
//! their own. If a container that runs has no set, the sandbox is not confined. The union changes
//! as containers come, change and go, and is kept after the end of the last one: a guest that
//! reports its container's end must not get all CPUs of the host for it.
//!
//! CPU sets of the VMM's control group confine it. On a host without them the VMM's threads are
//! told their CPUs, and may use memory of any node. Without a set, they are told those of the
//! VMM's launch again.
//!
//! Changes of one sandbox take turns, and precede the end of its control group's use. The kernel
//! may move all memory of a VMM to other nodes before it answers. So a thread of its own waits for
//! it, and neither the control thread nor those of the lanes.

mod threads;

use std::path::Path;
use std::sync::Arc;

use rustix::process::Pid;
use rustix::thread::CpuSet;
use slipway_cgroup::Sets;

use crate::cgroup;
use crate::files::Lane;
use crate::record::{Added, Confinement, Placement, Record, SandboxState};
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::{Error, Result, v1};

/// The longest list, bytes.
const LONGEST: usize = 4096;
/// The kernel's lists of the CPUs that are online, and of those that control groups may use by
/// cgroup v2 and by v1.
const CPUS: [&str; 3] = [
    "/sys/devices/system/cpu/online",
    "/sys/fs/cgroup/cpuset.cpus.effective",
    "/sys/fs/cgroup/cpuset/cpuset.effective_cpus",
];
/// Such lists of memory nodes.
const NODES: [&str; 3] = [
    "/sys/devices/system/node/online",
    "/sys/fs/cgroup/cpuset.mems.effective",
    "/sys/fs/cgroup/cpuset/cpuset.effective_mems",
];

/// A change of a container's placement that was made.
pub(crate) struct Change {
    before: Placement,
    after: Placement,
}

/// Checks the placement that a user asks for, in a lane.
///
/// # Errors
/// [`Error::Invalid`], which names what the host does not have.
pub(crate) async fn of_new(asked: Option<&v1::Placement>, lane: &Lane) -> Result<Placement> {
    let Some(v1::Placement { cpus, memory_nodes }) = asked.cloned() else {
        return Ok(Placement::default());
    };
    let checked = lane.run(move || {
        Ok(Placement {
            cpus: check("CPU", &cpus, &CPUS)?,
            memory_nodes: check("memory node", &memory_nodes, &NODES)?,
        })
    });
    checked.await
}

/// Changes the placement of a container that runs, and that of its sandbox with it. Lists that
/// `change` leaves empty stay. The change goes on to its end if the caller stops waiting.
///
/// # Errors
/// [`Error::WrongState`] if the container does not run; [`Error::Invalid`] for a pod, whose
/// containers have placements; [`Error::Cgroup`] or [`Error::Placement`] if the kernel refuses;
/// errors of saving the record. Nothing has changed then.
pub(crate) async fn change(target: &Target, change: Placement) -> Result<Change> {
    if target.container.state() != SandboxState::Running {
        return Err(target.wrong_state("the CPUs of a container that runs can be changed"));
    }
    let Target { sandbox, .. } = target;
    if target.is_own() && sandbox.look(|record| record.pod) {
        let why = "a pod keeps to the CPUs of its containers: change theirs";
        return Err(Error::Invalid(why.to_owned()));
    }
    replace(target, move |placement| placement.change(&change)).await
}

/// Takes a change back, unless the placement was changed again. A failure is logged.
pub(crate) async fn undo(target: &Target, change: Change) {
    let Change { before, after } = change;
    let undone = replace(target, move |placement| {
        if *placement == after {
            *placement = before;
        }
    });
    if let Err(error) = undone.await {
        tell_kept(target, &error);
    }
}

/// Changes the placement of a container, and that of its sandbox with it, or neither.
async fn replace(
    target: &Target,
    change: impl FnOnce(&mut Placement) + Send + 'static,
) -> Result<Change> {
    let target = target.clone();
    let replaced = async move {
        let sandbox = &target.sandbox;
        let _turn = sandbox.placement.lock().await;
        let before = target.look(|settings| settings.placement.clone());
        let mut after = before.clone();
        change(&mut after);
        set(&target, &after);
        if let Err(error) = confine_and_save(sandbox).await {
            set(&target, &before);
            if let Err(error) = confine_and_save(sandbox).await {
                tell_kept(&target, &error);
            }
            return Err(error);
        }
        Ok(Change { before, after })
    };
    to_end(replaced).await
}

/// Logs that an update which failed was not taken back.
fn tell_kept(target: &Target, error: &Error) {
    tracing::warn!(container = target.name(), %error, "it keeps to the CPUs of a failed update");
}

/// Sets the placement of a container in memory.
fn set(target: &Target, placement: &Placement) {
    target.sandbox.note(|record| {
        if let Some(own) = own(record, target) {
            own.clone_from(placement);
        }
    });
}

/// Runs a task to its end, even if the caller stops waiting.
async fn to_end<T: Send + 'static>(
    task: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    tokio::spawn(task).await.unwrap_or_else(|error| Err(lost(&error)))
}

/// Returns the error of a task that panicked, or that the end of the daemon cut off.
fn lost(error: &tokio::task::JoinError) -> Error {
    Error::Placement {
        list: "of its containers".to_owned(),
        source: std::io::Error::other(error.to_string()),
    }
}

/// Returns the placement of a container, unless the container was removed.
fn own<'a>(record: &'a mut Record, target: &Target) -> Option<&'a mut Placement> {
    match target.is_own() {
        true => Some(&mut record.settings.placement),
        false => {
            record.added_mut(&target.container.name).map(|added| &mut added.settings.placement)
        }
    }
}

/// Confines a sandbox that has a control group as its containers ask for. Returns `false` if that
/// is so already. Without CPU sets of control groups, it does nothing before the VMM runs.
///
/// # Errors
/// [`Error::Cgroup`] or [`Error::Placement`] if the kernel refuses: it is confined as before then.
/// Errors of saving the record.
pub(crate) async fn apply(sandbox: &Arc<Sandbox>) -> Result<bool> {
    if !sandbox.look(changes) {
        return Ok(false);
    }
    let sandbox = Arc::clone(sandbox);
    let applied = async move {
        let _turn = sandbox.placement.lock().await;
        confine_and_save(&sandbox).await?;
        Ok(true)
    };
    to_end(applied).await
}

/// Confines a sandbox, and saves its record. The caller has the turn, and does not stop waiting.
async fn confine_and_save(sandbox: &Arc<Sandbox>) -> Result<()> {
    confine(sandbox).await?;
    sandbox.update(|_| {}).await
}

/// Confines a sandbox, and notes that in its record. The caller has the turn, and does not stop
/// waiting.
async fn confine(sandbox: &Arc<Sandbox>) -> Result<()> {
    if !sandbox.look(changes) {
        return Ok(());
    }
    let sandbox = Arc::clone(sandbox);
    let confined = tokio::task::spawn_blocking(move || confine_now(&sandbox));
    confined.await.unwrap_or_else(|error| Err(lost(&error)))
}

/// Confines a sandbox, and notes that in its record. Waits for the kernel.
fn confine_now(sandbox: &Sandbox) -> Result<()> {
    let change = sandbox.look(|record| {
        let found = || (cgroup::found(record), wanted(record), record.confinement.confined.clone());
        changes(record).then(found)
    });
    let Some(((hierarchies, group), wanted, before)) = change else { return Ok(()) };
    let mut launched = None;
    let confined = match hierarchies.confine(&group, &sets(&wanted)) {
        Ok(true) => true,
        Ok(false) => {
            launched = tell_threads(sandbox, &wanted)?;
            launched.is_some()
        }
        Err(error) => {
            let _ = hierarchies.confine(&group, &sets(&before));
            return Err(Error::Cgroup(error));
        }
    };
    if confined {
        sandbox.note(|record| {
            record.confinement.confined = wanted;
            if let Some(cpus) = launched {
                record.confinement.launch_cpus = cpus;
            }
        });
    }
    Ok(())
}

fn sets(placement: &Placement) -> Sets {
    Sets { cpus: placement.cpus.clone(), mems: placement.memory_nodes.clone() }
}

/// Returns whether a sandbox is to be confined in another way than it is. Its control group is its
/// own from its start until its end begins.
fn changes(record: &Record) -> bool {
    let runs = matches!(record.state, SandboxState::Starting | SandboxState::Running);
    let confinement = &record.confinement;
    runs && confinement.cgroup.is_some() && wanted(record) != confinement.confined
}

/// Returns the placement that the containers of a sandbox ask for. A pod in which no container runs
/// stays where it is: its guest says when a container has ended, and its CPUs go on.
fn wanted(record: &Record) -> Placement {
    if !record.pod {
        return record.settings.placement.clone();
    }
    let runs = |added: &&Added| added.state.is_live() && added.state != SandboxState::Created;
    let running = record.added.iter().filter(runs).map(|added| &added.settings.placement);
    if running.clone().next().is_none() {
        return record.confinement.confined.clone();
    }
    Placement::union(running)
}

/// Tells the threads of the VMM on which CPUs they run. Those that they start later run there too.
/// Returns the list of the CPUs on which the VMM was launched, or `None` if there is no VMM yet.
fn tell_threads(sandbox: &Sandbox, placement: &Placement) -> Result<Option<String>> {
    let Some(vm) = sandbox.vm() else { return Ok(None) };
    let pid = vm.record().pid;
    // Known once the threads were told CPUs.
    let known = sandbox.look(|record| {
        let Confinement { confined, launch_cpus, .. } = &record.confinement;
        (!confined.cpus.is_empty()).then(|| launch_cpus.clone())
    });
    let launched = known.unwrap_or_else(|| threads::run_on(Pid::from_raw(pid)));
    let list = match (placement.cpus.as_str(), launched.as_str()) {
        // Not known. A launch gives the daemon's own, unless it prefers those near the memory.
        ("", "") => threads::run_on(None),
        ("", launched) => launched.to_owned(),
        (list, _) => list.to_owned(),
    };
    let mut cpus = CpuSet::new();
    let numbers = Placement::numbers(&list).unwrap_or_default();
    numbers.into_iter().filter(|cpu| *cpu < CpuSet::MAX_CPU).for_each(|cpu| cpus.set(cpu));
    threads::tell(pid, &cpus).map_err(|source| Error::Placement { list, source })?;
    Ok(Some(launched))
}

/// Checks that each number of `list` is in each of the kernel's lists in `files`: of those online,
/// then of those that control groups may use. A file that is missing is passed over. `what` names
/// the numbered things for errors. Returns the list in the kernel's form.
///
/// # Errors
/// [`Error::Invalid`].
fn check(what: &str, list: &str, files: &[impl AsRef<Path>]) -> Result<String> {
    if list.is_empty() {
        return Ok(String::new());
    }
    let shown: String = list.chars().take(80).collect();
    let parsed = Some(list).filter(|list| list.len() <= LONGEST).and_then(Placement::numbers);
    let numbers = parsed.filter(|numbers| !numbers.is_empty()).ok_or_else(|| {
        Error::Invalid(format!("{shown:?} is no list of {what}s of the host: as 0-3,5"))
    })?;
    for (place, file) in files.iter().enumerate() {
        // A kernel without NUMA lists no nodes, and decides by itself.
        let Ok(has) = std::fs::read_to_string(file) else { continue };
        let usable = Placement::numbers(&has).unwrap_or_default();
        if let Some(missing) = numbers.difference(&usable).next() {
            let why = match place {
                0 => "is not online: this host has",
                _ => "is not for use: this host's control groups have",
            };
            let has = has.trim();
            return Err(Error::Invalid(format!(
                "{what} {missing} of the set {shown:?} {why} {has}"
            )));
        }
    }
    Ok(Placement::list(&numbers))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::{added_of, record_of};
    use crate::files::Files;
    use crate::record::{ControlGroup, Store};

    fn placed(cpus: &str, memory_nodes: &str) -> Placement {
        Placement { cpus: cpus.to_owned(), memory_nodes: memory_nodes.to_owned() }
    }

    fn pod(containers: &[(SandboxState, Placement)]) -> Record {
        let mut record = Record { pod: true, ..record_of(SandboxState::Running) };
        for (number, (state, placement)) in containers.iter().enumerate() {
            let mut added = added_of(&number.to_string(), *state);
            added.settings.placement = placement.clone();
            record.added.push(added);
        }
        record
    }

    #[test]
    fn a_pod_keeps_to_the_union_of_what_its_containers_keep_to() {
        use SandboxState::{Created, Exited, Running, Starting};
        let wanted = |containers: &[_]| wanted(&pod(containers));
        let two = [(Running, placed("0-1,4", "0")), (Starting, placed("2,7", "1"))];
        assert_eq!(wanted(&two), placed("0-2,4,7", "0-1"));
        let [one, other] = two;
        let free = (Running, Placement::default());
        assert_eq!(wanted(&[one.clone(), free]), Placement::default());
        assert_eq!(wanted(&[one.clone(), (Running, placed("3", ""))]), placed("0-1,3-4", ""));
        for state in [Created, Exited] {
            let gone = (state, Placement::default());
            assert_eq!(wanted(&[one.clone(), other.clone(), gone]), placed("0-2,4,7", "0-1"));
        }
        assert_eq!(wanted(&[]), Placement::default());
    }

    #[test]
    fn a_pod_stays_confined_after_the_end_of_its_last_container() {
        use SandboxState::{Created, Exited, Running};
        let mut record = pod(&[(Running, placed("0-1,4", "0")), (Created, placed("7", ""))]);
        record.confinement.confined = placed("0-1,4", "0");
        record.added[0].state = Exited;
        assert_eq!(wanted(&record), placed("0-1,4", "0"));
        record.added.clear();
        assert_eq!(wanted(&record), placed("0-1,4", "0"));
        let confinement = record.confinement;
        let next = Record { confinement, ..pod(&[(Running, placed("5", ""))]) };
        assert_eq!(wanted(&next), placed("5", ""), "the next container's");
        let confinement = next.confinement;
        let free = Record { confinement, ..pod(&[(Running, Placement::default())]) };
        assert_eq!(wanted(&free), Placement::default());
    }

    #[test]
    fn a_sandbox_keeps_to_what_its_own_container_keeps_to() {
        let mut record = record_of(SandboxState::Running);
        assert_eq!(wanted(&record), Placement::default());
        record.settings.placement = placed("1", "");
        assert_eq!(wanted(&record), placed("1", ""));
        assert!(!changes(&record), "it has no group that is recorded");
        let group = ControlGroup { path: "/slipway/one".to_owned(), before: Default::default() };
        record.confinement.cgroup = Some(group);
        assert!(changes(&record));
        record.confinement.confined = placed("1", "");
        assert!(!changes(&record));
        record.confinement.lift();
        record.state = SandboxState::Stopping;
        assert!(!changes(&record), "its group goes to others");
    }

    #[test]
    fn a_record_of_an_earlier_build_has_no_placement() {
        let record = record_of(SandboxState::Running);
        assert_eq!((record.confinement, record.settings.placement), Default::default());
        assert_eq!(added_of("a", SandboxState::Running).settings.placement, Placement::default());
    }

    /// Makes a sandbox that runs, whose group is not recorded.
    fn target(dir: &Path) -> Target {
        let record = record_of(SandboxState::Running);
        let store = Store::new(dir, &record.id);
        store.create().unwrap();
        Target::own(Sandbox::new(record, store, Files::start().unwrap().lane()))
    }

    #[tokio::test]
    async fn changes_take_turns_and_can_be_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        let target = target(dir.path());
        let kept = || target.look(|settings| settings.placement.clone());
        let turn = target.sandbox.placement.lock().await;
        let changing = {
            let target = target.clone();
            tokio::spawn(async move { change(&target, placed("1", "0")).await })
        };
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        assert_eq!(kept(), Placement::default());
        drop(turn);
        let first = changing.await.unwrap().unwrap();
        assert_eq!(kept(), placed("1", "0"));
        let second = change(&target, placed("2", "")).await.unwrap();
        undo(&target, first).await;
        assert_eq!(kept(), placed("2", "0"), "it was changed again");
        undo(&target, second).await;
        assert_eq!(kept(), placed("1", "0"));
        assert_eq!(target.sandbox.store.load().unwrap().unwrap().settings.placement, kept());
    }

    #[tokio::test]
    async fn a_change_that_cannot_be_saved_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let target = target(dir.path());
        drop(dir);
        assert!(change(&target, placed("1", "")).await.is_err());
        assert_eq!(target.look(|settings| settings.placement.clone()), Placement::default());
    }

    #[test]
    fn a_set_is_one_of_cpus_that_are_online() {
        let dir = tempfile::tempdir().unwrap();
        let online = dir.path().join("online");
        std::fs::write(&online, "0-3,6\n").unwrap();
        let check = |list: &str| check("CPU", list, &[&online]).map_err(|error| error.to_string());
        for (list, expected) in
            [("", ""), ("0-3", "0-3"), ("6,1,0", "0-1,6"), ("1-2,2-3\n", "1-3"), ("3,", "3")]
        {
            assert_eq!(check(list).as_deref(), Ok(expected), "{list:?}");
        }
        let unlisted = super::check("node", "7", &[dir.path().join("none")]);
        assert_eq!(unlisted.unwrap(), "7");
        for (list, missing) in [("4", "CPU 4"), ("0-7", "CPU 4"), ("6-8191", "CPU 7")] {
            let error = check(list).unwrap_err();
            assert!(error.contains(missing) && error.contains("this host has 0-3,6"), "{error}");
        }
        let usable = dir.path().join("effective");
        std::fs::write(&usable, "1-2\n").unwrap();
        let both = |list: &str| super::check("CPU", list, &[&online, &usable]);
        assert_eq!(both("1-2").unwrap(), "1-2");
        let error = both("1-3").unwrap_err().to_string();
        assert!(error.contains("CPU 3") && error.contains("control groups have 1-2"), "{error}");
        let long = "0,".repeat(LONGEST);
        for list in ["all", "0-", "8192", "3-1", ",", "\n", "0\n1", long.as_str()] {
            let error = check(list).unwrap_err();
            assert!(error.contains("is no list of CPUs") && !error.contains('\n'), "{error}");
        }
    }
}
