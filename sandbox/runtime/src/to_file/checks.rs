//! Checks of a sandbox that is to be paused into a file: of what it has, and of the host's files
//! that it refers to.

use std::time::Duration;

use crate::node::Node;
use crate::pause::check_runs;
use crate::record::{Process, Record, SandboxState, Volume};
use crate::sandbox::Sandbox;
use crate::snapshot::{cannot_save_machine, host_files};
use crate::target::Target;
use crate::{Error, Result, pod_disks};

/// The longest wait for containers of a pod that start or are being released.
const SETTLES: Duration = Duration::from_secs(60);

/// Checks that a sandbox, or a pod as a whole, is not paused and can come back from a file.
///
/// # Errors
/// [`Error::Invalid`] with the reason why it cannot; [`Error::WrongState`] if it is paused.
pub(super) fn check(target: &Target) -> Result<()> {
    let why = match target.is_own() {
        true => target.sandbox.look(cannot_be_in_file),
        false => Some("it is a container of a pod: pause the pod"),
    };
    if let Some(why) = why {
        let what = format!("the memory of {} cannot be in a file: {why}", target.name());
        return Err(Error::Invalid(what));
    }
    check_runs(target)
}

/// Returns why a sandbox's memory cannot be in a file (`docs/snapshots.md`), or `None` if it can.
/// Containers of a pod that have ended are not looked at.
fn cannot_be_in_file(record: &Record) -> Option<&'static str> {
    let network = record.network.as_ref();
    let of_others = network.is_some_and(|one| one.namespace.is_some() || one.pool.is_some());
    let has_input = |process: &Process| process.terminal || process.stdin;
    let of_host =
        |volume: &Volume| !volume.read_only && !volume.overlay && volume.scratch_bytes.is_none();
    let live = || record.added.iter().filter(|one| one.state.is_live());
    let has_function = !record.plugged.functions.is_empty() || record.plugged.sockets.is_some();
    let reasons = [
        (has_input(&record.settings.process), "its container has a terminal or standard input"),
        (
            live().any(|one| has_input(&one.settings.process)),
            "a container of it has a terminal or standard input",
        ),
        (of_others, "its interface is that of a network namespace or of a pool"),
        (
            record.volumes.iter().chain(live().flat_map(|one| &one.volumes)).any(of_host),
            "it writes to a file of the host, which others could change meanwhile",
        ),
        (live().any(|one| !one.shares.is_empty()), "a container of it has directories of the host"),
        (has_function, "a container of it has a function of a pool or of sockets"),
        (record.bound.room() > 0, "its containers have memory of their own (--bind-memory)"),
    ];
    let reason = reasons.into_iter().find(|(is_so, _)| *is_so).map(|(_, why)| why);
    cannot_save_machine(record).or(reason)
}

/// Checks that the function of a sandbox has no disk that a user attached to it: the sandbox would
/// come back without that. A container that starts or ends meanwhile has its disks by the record
/// before or after.
///
/// # Errors
/// [`Error::Invalid`], which names the disk; [`Error::Plane`].
pub(super) async fn check_disks(node: &Node, sandbox: &Sandbox) -> Result<()> {
    let before = sandbox.look(pod_disks::of_record);
    let used = pod_disks::used(node, &sandbox.id).await?;
    let own = [before, sandbox.look(pod_disks::of_record)].concat();
    check_own(&sandbox.name, &used, &own)
}

/// Checks that all namespaces in `used` are the `own` ones of sandbox `name`.
fn check_own(name: &str, used: &[u32], own: &[u32]) -> Result<()> {
    let Some(nsid) = used.iter().find(|nsid| !own.contains(nsid)) else { return Ok(()) };
    Err(Error::Invalid(format!(
        "the memory of {name} cannot be in a file: it would come back without the disk that was \
         attached to it as namespace {nsid}; `slipway endpoint detach {name} {nsid}` takes it away"
    )))
}

/// Returns whether a container in this state neither starts nor is being released.
fn is_settled(state: SandboxState) -> bool {
    !matches!(state, SandboxState::Starting | SandboxState::Stopping)
}

/// Waits until no container of a pod starts or is being released, for a bounded time. The caller
/// has no lock that these wait for.
pub(super) async fn settles(sandbox: &Sandbox) {
    let settled = async {
        for container in sandbox.added() {
            container.wait_state(|state| is_settled(*state)).await;
        }
    };
    // Whoever has not settled by then is named by `check_settled`.
    let _ = tokio::time::timeout(SETTLES, settled).await;
}

/// Checks that no container of a pod starts or is being released: the pod is saved with a container
/// as a whole, or without it. The caller has the pod's turn, in which none begins to.
///
/// # Errors
/// [`Error::WrongState`], which names the container.
pub(super) fn check_settled(record: &Record) -> Result<()> {
    match record.added.iter().find(|one| !is_settled(one.state)) {
        None => Ok(()),
        Some(one) => Err(Error::WrongState {
            name: format!("{}/{}", record.name, one.name),
            state: one.state.as_str().to_owned(),
            advice: "its pod is paused once that is over; try again".to_owned(),
        }),
    }
}

/// Returns the record of a sandbox that is to be saved, with what the save must know of the files
/// that its volumes and those of its containers refer to.
///
/// # Errors
/// The errors of [`host_files::identify`].
pub(super) async fn identify(sandbox: &Sandbox) -> Result<Record> {
    let mut record = sandbox.record();
    let own = std::mem::take(&mut record.volumes);
    record.volumes = host_files::identify(&sandbox.looks, own).await?;
    for added in record.added.iter_mut().filter(|one| one.disks.is_some()) {
        let volumes = std::mem::take(&mut added.volumes);
        added.volumes = host_files::identify(&sandbox.looks, volumes).await?;
    }
    Ok(record)
}

#[cfg(test)]
mod tests {
    use super::super::tests::record;
    use super::*;
    use crate::adopt::tests::added_of;
    use crate::record::{Added, BoundMemory, Disks, Given, GivenSockets, Share};
    use crate::snapshot::begin::tests::snapshot;

    #[test]
    fn what_could_not_come_back_from_a_file_is_named() {
        assert_eq!(cannot_be_in_file(&record()), None);
        let why = |change: fn(&mut Record)| {
            let mut record = record();
            change(&mut record);
            cannot_be_in_file(&record).unwrap()
        };
        assert!(why(|record| record.settings.process.stdin = true).contains("standard input"));
        assert!(why(|record| record.settings.process.terminal = true).contains("a terminal"));
        let [own, of_host] = <[Volume; 2]>::try_from(snapshot().volumes).unwrap();
        let with = |volume| cannot_be_in_file(&Record { volumes: vec![volume], ..record() });
        assert_eq!(with(own.clone()), None, "an overlay");
        assert_eq!(with(of_host.clone()), None, "one that is only read");
        let scratch = Volume { overlay: false, scratch_bytes: Some(1 << 20), ..own };
        assert_eq!(with(scratch), None);
        let written = Volume { read_only: false, host_device: None, ..of_host };
        assert!(with(written).unwrap().contains("a file of the host"));
    }

    #[test]
    fn what_containers_of_a_pod_have_is_named_while_they_live() {
        let pod = |added: Added| Record { pod: true, added: vec![added], ..record() };
        let added = || added_of("a", SandboxState::Running);
        assert_eq!(cannot_be_in_file(&pod(added())), None);
        assert_eq!(cannot_be_in_file(&Record { pod: true, ..record() }), None, "without any");
        let [_, of_host] = <[Volume; 2]>::try_from(snapshot().volumes).unwrap();
        let written = Volume { read_only: false, host_device: None, ..of_host.clone() };
        let mut with_input = added();
        with_input.settings.process.stdin = true;
        for (one, what) in [
            (with_input, "standard input"),
            (Added { volumes: vec![written], ..added() }, "a file of the host"),
            (Added { shares: vec![Share::default()], ..added() }, "directories of the host"),
        ] {
            let ended = Added { state: SandboxState::Exited, ..one.clone() };
            assert_eq!(cannot_be_in_file(&pod(ended)), None, "{what}");
            assert!(cannot_be_in_file(&pod(one)).unwrap().contains(what), "{what}");
        }
        let read = Added { volumes: vec![of_host], ..added() };
        assert_eq!(cannot_be_in_file(&pod(read)), None);
        let mut has = pod(added());
        has.plugged.functions = vec![Given::default()];
        assert!(cannot_be_in_file(&has).unwrap().contains("function of a pool"));
        let mut has = pod(added());
        has.plugged.sockets = Some(GivenSockets::default());
        assert!(cannot_be_in_file(&has).unwrap().contains("sockets"));
        let binds = Record { bound: BoundMemory::of_regions(128 << 20), ..pod(added()) };
        assert!(cannot_be_in_file(&binds).unwrap().contains("--bind-memory"));
    }

    #[test]
    fn a_disk_that_a_user_attached_is_named() {
        let [volume, _] = <[Volume; 2]>::try_from(snapshot().volumes).unwrap();
        let alone = Record { volumes: vec![volume], ..record() };
        let own = pod_disks::of_record(&alone);
        assert_eq!(own, [1, 2, 3], "the image, the volatile layer and the volume");
        check_own("one", &own, &own).unwrap();
        let refused = check_own("one", &[1, 2, 3, 4], &own).unwrap_err().to_string();
        assert!(refused.contains("`slipway endpoint detach one 4`"), "{refused}");
        assert!(!refused.contains('\n'), "{refused}");
        let mut added = added_of("a", SandboxState::Running);
        added.disks = Some(Disks { image: 7, volatile: 9, volumes: vec![8] });
        let mut pod = Record { pod: true, added: vec![added], ..record() };
        pod.empty_dirs.disk = Some(2);
        let mut own = pod_disks::of_record(&pod);
        own.sort_unstable();
        assert_eq!(own, [2, 7, 8, 9]);
        assert!(check_own("one", &[2, 7, 1], &own).is_err());
    }

    #[test]
    fn a_pod_with_a_container_that_starts_or_ends_is_not_saved() {
        let check = |state| {
            let added = vec![added_of("a", SandboxState::Running), added_of("b", state)];
            check_settled(&Record { pod: true, added, ..record() })
        };
        for state in [SandboxState::Created, SandboxState::Running, SandboxState::Exited] {
            check(state).unwrap();
        }
        for state in [SandboxState::Starting, SandboxState::Stopping] {
            let refused = check(state).unwrap_err().to_string();
            assert!(refused.contains("one/b") && refused.contains(state.as_str()), "{refused}");
        }
    }
}
