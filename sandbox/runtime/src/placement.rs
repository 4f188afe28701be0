//! The CPUs and the memory nodes of the host to which sandboxes keep: the CPU sets of containers.
//!
//! A sandbox's VMM, with all its threads and the process of its shares, is confined to the union of
//! the sets of its containers: guests know nothing of the host's CPUs, and run containers on any of
//! their own. If a container that runs has no set, the sandbox is not confined. The union changes
//! as containers come, change and go.
//!
//! CPU sets of the VMM's control group confine it. On a host without them the VMM's threads are
//! told their CPUs, and may use memory of any node.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use rustix::process::Pid;
use rustix::thread::CpuSet;
use slipway_cgroup::Sets;

use crate::cgroup;
use crate::files::Lane;
use crate::record::{Added, Placement, Record, SandboxState};
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::{Error, Result, v1};

/// The longest list, bytes.
const LONGEST: usize = 4096;
/// The most looks for threads that were started while others were told their CPUs.
const LOOKS: usize = 16;
/// The kernel's lists of the CPUs and the memory nodes that are online.
const CPUS_ONLINE: &str = "/sys/devices/system/cpu/online";
const NODES_ONLINE: &str = "/sys/devices/system/node/online";

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
            cpus: check("CPU", &cpus, Path::new(CPUS_ONLINE))?,
            memory_nodes: check("memory node", &memory_nodes, Path::new(NODES_ONLINE))?,
        })
    });
    checked.await
}

/// Changes the placement of a container that runs, and that of its sandbox with it. Lists that
/// `change` leaves empty stay.
///
/// # Errors
/// [`Error::WrongState`] if the container does not run; [`Error::Invalid`] for a pod, whose
/// containers have placements; [`Error::Cgroup`] or [`Error::Placement`] if the kernel refuses.
/// Nothing has changed then.
pub(crate) async fn change(target: &Target, change: &Placement) -> Result<()> {
    if target.container.state() != SandboxState::Running {
        return Err(target.wrong_state("the CPUs of a container that runs can be changed"));
    }
    let Target { sandbox, .. } = target;
    if target.is_own() && sandbox.look(|record| record.pod) {
        let why = "a pod keeps to the CPUs of its containers: change theirs";
        return Err(Error::Invalid(why.to_owned()));
    }
    let swap = |record: &mut Record, other: &mut Placement| {
        if let Some(own) = own(record, target) {
            std::mem::swap(own, other);
        }
    };
    let mut other = target.look(|settings| settings.placement.clone());
    other.change(change);
    sandbox.note(|record| swap(record, &mut other));
    if let Err(error) = apply(sandbox).await {
        // The one before.
        sandbox.update(|record| swap(record, &mut other)).await?;
        return Err(error);
    }
    sandbox.update(|_| {}).await
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
    let its = Arc::clone(sandbox);
    // In the lane changes follow each other, and precede the end of the control group's use.
    sandbox.lane.run(move || confine(&its)).await?;
    sandbox.update(|_| {}).await?;
    Ok(true)
}

/// Confines a sandbox, and notes that in its record. Waits for the kernel.
fn confine(sandbox: &Sandbox) -> Result<()> {
    let change = sandbox.look(|record| {
        let found = || (cgroup::found(record), wanted(record), record.confined.clone());
        changes(record).then(found)
    });
    let Some(((hierarchies, group), wanted, before)) = change else { return Ok(()) };
    let confined = match hierarchies.confine(&group, &sets(&wanted)) {
        Ok(true) => true,
        Ok(false) => tell_threads(sandbox, &wanted)?,
        Err(error) => {
            let _ = hierarchies.confine(&group, &sets(&before));
            return Err(Error::Cgroup(error));
        }
    };
    if confined {
        sandbox.note(|record| record.confined = wanted);
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
    runs && record.cgroup.is_some() && wanted(record) != record.confined
}

/// Returns the placement that the containers of a sandbox ask for.
fn wanted(record: &Record) -> Placement {
    if !record.pod {
        return record.settings.placement.clone();
    }
    let runs = |added: &&Added| added.state.is_live() && added.state != SandboxState::Created;
    Placement::union(record.added.iter().filter(runs).map(|added| &added.settings.placement))
}

/// Tells the threads of the VMM on which CPUs they run. Those that they start later run there too.
/// Returns `false` if there is no VMM yet.
fn tell_threads(sandbox: &Sandbox, placement: &Placement) -> Result<bool> {
    let Some(vm) = sandbox.vm() else { return Ok(false) };
    let list = match placement.cpus.as_str() {
        "" => std::fs::read_to_string(CPUS_ONLINE).unwrap_or_default(),
        list => list.to_owned(),
    };
    let mut cpus = CpuSet::new();
    let numbers = Placement::numbers(&list).unwrap_or_default();
    numbers.into_iter().filter(|cpu| *cpu < CpuSet::MAX_CPU).for_each(|cpu| cpus.set(cpu));
    tell(vm.record().pid, &cpus).map_err(|source| Error::Placement { list, source })?;
    Ok(true)
}

fn tell(pid: i32, cpus: &CpuSet) -> std::io::Result<()> {
    let mut told = BTreeSet::new();
    for _ in 0..LOOKS {
        let before = told.len();
        for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let name = thread?.file_name();
            let Some(thread) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            if told.insert(thread) {
                match rustix::thread::sched_setaffinity(Pid::from_raw(thread), cpus) {
                    // It has ended.
                    Err(rustix::io::Errno::SRCH) => {}
                    done => done?,
                }
            }
        }
        if told.len() == before {
            break;
        }
    }
    Ok(())
}

/// Checks a list of `what` that are online by the kernel's list in the file `online`. Returns it in
/// the kernel's form.
fn check(what: &str, list: &str, online: &Path) -> Result<String> {
    if list.is_empty() {
        return Ok(String::new());
    }
    let shown: String = list.chars().take(80).collect();
    let parsed = Some(list).filter(|list| list.len() <= LONGEST).and_then(Placement::numbers);
    let numbers = parsed.filter(|numbers| !numbers.is_empty()).ok_or_else(|| {
        Error::Invalid(format!("{shown:?} is no list of {what}s of the host: as 0-3,5"))
    })?;
    // A kernel without NUMA lists no nodes, and decides by itself.
    let Ok(has) = std::fs::read_to_string(online) else { return Ok(Placement::list(&numbers)) };
    let online = Placement::numbers(&has).unwrap_or_default();
    match numbers.difference(&online).next() {
        None => Ok(Placement::list(&numbers)),
        Some(missing) => Err(Error::Invalid(format!(
            "{what} {missing} of the set {shown:?} is not online: this host has {}",
            has.trim()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use rustix::thread::sched_getaffinity;

    use super::*;
    use crate::adopt::tests::{added_of, record_of};
    use crate::record::ControlGroup;

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
    fn a_sandbox_keeps_to_what_its_own_container_keeps_to() {
        let mut record = record_of(SandboxState::Running);
        assert_eq!(wanted(&record), Placement::default());
        record.settings.placement = placed("1", "");
        assert_eq!(wanted(&record), placed("1", ""));
        assert!(!changes(&record), "it has no group that is recorded");
        let group = ControlGroup { path: "/slipway/one".to_owned(), before: Default::default() };
        record.cgroup = Some(group);
        assert!(changes(&record));
        record.confined = placed("1", "");
        assert!(!changes(&record));
        (record.confined, record.state) = (Placement::default(), SandboxState::Stopping);
        assert!(!changes(&record), "its group goes to others");
    }

    #[test]
    fn a_record_of_an_earlier_build_has_no_placement() {
        let record = record_of(SandboxState::Running);
        assert_eq!((record.confined, record.settings.placement), Default::default());
        assert_eq!(added_of("a", SandboxState::Running).settings.placement, Placement::default());
    }

    #[test]
    fn a_set_is_one_of_cpus_that_are_online() {
        let dir = tempfile::tempdir().unwrap();
        let online = dir.path().join("online");
        std::fs::write(&online, "0-3,6\n").unwrap();
        let check = |list: &str| check("CPU", list, &online).map_err(|error| error.to_string());
        for (list, expected) in
            [("", ""), ("0-3", "0-3"), ("6,1,0", "0-1,6"), ("1-2,2-3\n", "1-3"), ("3,", "3")]
        {
            assert_eq!(check(list).as_deref(), Ok(expected), "{list:?}");
        }
        let unlisted = super::check("node", "7", &dir.path().join("none"));
        assert_eq!(unlisted.unwrap(), "7");
        for (list, missing) in [("4", "CPU 4"), ("0-7", "CPU 4"), ("6-8191", "CPU 7")] {
            let error = check(list).unwrap_err();
            assert!(error.contains(missing) && error.contains("this host has 0-3,6"), "{error}");
        }
        let long = "0,".repeat(LONGEST);
        for list in ["all", "0-", "8192", "3-1", ",", "\n", "0\n1", long.as_str()] {
            let error = check(list).unwrap_err();
            assert!(error.contains("is no list of CPUs") && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn threads_are_told_their_cpus() {
        let before = sched_getaffinity(None).unwrap();
        let last = (0..CpuSet::MAX_CPU).rfind(|cpu| before.is_set(*cpu)).unwrap();
        let mut one = CpuSet::new();
        one.set(last);
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_child(&child);
        tell(pid.as_raw_nonzero().get(), &one).unwrap();
        assert_eq!(sched_getaffinity(Some(pid)).unwrap(), one);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(tell(pid.as_raw_nonzero().get(), &one).is_err(), "it has ended");
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}
