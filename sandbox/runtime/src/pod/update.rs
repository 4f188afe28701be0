//! Updates of the limits of a pod's container, and of the pod's microVM with them.
//!
//! If the limits of all containers need more than the microVM has, and it has room, it is given
//! memory and then CPUs before the limit is raised. If anything fails, the microVM gets its size
//! back. A limit that is lowered is lowered first. CPUs that no limit needs any more are then taken
//! offline and away, and memory goes back to the host, in a task of its own: as far as it is free,
//! and within a bound of time. The update waits for the first attempt, and tells what went back.
//!
//! The update of a pod in its own control group waits for that task: kubelet lowers the limit of
//! the group above after the update, and the kernel would end a VMM that has more.
//!
//! An update is recorded before it changes anything, so that the next daemon settles one that was
//! cut off (module `settle`).
//!
//! Updates of the containers of one pod take turns, with each other, with those of the pod's own
//! limits ([`whole`]) and with `slipway update` of the pod.

mod settle;
mod surplus;
mod whole;

use std::sync::Arc;
use std::time::Duration;

use slipway_agent_protocol::v1 as agent_v1;
use tokio::sync::OwnedSemaphorePermit;

pub(super) use self::settle::settle;
pub(crate) use self::surplus::GivenBack;
use self::surplus::give_back_spare;
pub(super) use self::surplus::{floor, give_back_memory, needed, spare};
use super::request::{check_huge_pages, fits, limits};
use super::sums::Sums;
use super::{bound, change, quota};
use crate::node::Node;
use crate::record::{Limits, Record, SandboxState};
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::v1::Resources;
use crate::{Error, Result, cpus, resize};

/// The longest time that a guest may take to follow a change of its memory.
pub(super) const LONGEST: Duration = Duration::from_secs(60);

impl Node {
    /// Changes limits of a container that was added and runs, and before that the size of its pod's
    /// microVM if the limits need more. Returns the memory that the pod gave back. Waits for its
    /// turn. The change goes on to its end if the caller stops waiting.
    ///
    /// # Errors
    /// [`Error::Invalid`], also if the pod cannot have as much memory; [`Error::WrongState`] if the
    /// container does not run; [`Error::Busy`] if too many updates wait; [`Error::Agent`] if it
    /// uses more memory than that, or the guest or the VMM refuses. Limits have not changed then,
    /// and the microVM is given its size back.
    pub(crate) async fn update_added(
        &self,
        target: &Target,
        asked: &Resources,
    ) -> Result<GivenBack> {
        let asked = limits(Some(asked))?;
        if asked == Limits::default() {
            return Err(Error::Invalid("the update names no limit".to_owned()));
        }
        check_runs(target)?;
        let place = target.sandbox.update_of_limits()?;
        let updated = self.guests.spawn(take_turn(target.clone(), asked, place)).await;
        updated.unwrap_or_else(|error| Err(Error::Agent(error.to_string())))
    }
}

/// Makes an update when its turn comes. A task gives back what the update set free.
/// `place` is held until that is done.
async fn take_turn(
    target: Target,
    asked: Limits,
    place: OwnedSemaphorePermit,
) -> Result<GivenBack> {
    let turn = target.sandbox.wait_to_change_size().await;
    let lowers = update(&target, asked).await;
    if !matches!(lowers, Ok(true)) {
        end(&target.sandbox, 1).await;
        return lowers.map(|_| GivenBack::default());
    }
    // The task waits for a turn of its own.
    drop(turn);
    give_back_spare(&target.sandbox, place).await
}

/// Fails unless the container runs.
fn check_runs(target: &Target) -> Result<()> {
    match target.container.state() {
        SandboxState::Running => Ok(()),
        _ => Err(target.wrong_state("the limits of a container that runs can be changed")),
    }
}

/// Makes an update. Returns whether the pod's containers may use less than before.
async fn update(target: &Target, asked: Limits) -> Result<bool> {
    check_runs(target)?;
    let (sandbox, name) = (&target.sandbox, &target.container.name);
    let shared = sandbox.look(|record| bound::of_others(record, name, asked))?;
    let plan = sandbox.look(|record| Plan::new(record, name, shared))?;
    let before = sandbox.look(|record| (record.memory_bytes, record.cpus.count));
    begin(sandbox).await?;
    let limited = async {
        plan.grow(sandbox).await?;
        bound::grow(target, asked).await?;
        limit(target, asked).await
    };
    let limited = limited.await;
    bound::fit(target).await;
    if let Err(error) = limited {
        undo(sandbox, before).await;
        return Err(error);
    }
    if !plan.lowers {
        quota::allow(sandbox).await;
    }
    Ok(plan.lowers)
}

/// Records that the limits of a pod are about to change.
///
/// # Errors
/// Errors of saving the record.
async fn begin(sandbox: &Sandbox) -> Result<()> {
    sandbox.update(|record| record.changing_limits = true).await
}

/// Records that an update has ended with all that follows from it, unless another update is under
/// way. `own` is the number of permits of [`Sandbox::update_of_limits`] that the caller holds: 1 in
/// an update, 0 elsewhere.
async fn end(sandbox: &Sandbox, own: usize) {
    let is_last = sandbox.updates_of_limits() <= own;
    if !is_last || !sandbox.look(|record| record.changing_limits) {
        return;
    }
    // An ended pod has nothing to settle, and its record may be gone.
    if sandbox.state() != SandboxState::Running {
        return;
    }
    if let Err(error) = sandbox.update(|record| record.changing_limits = false).await {
        tracing::warn!(sandbox = sandbox.name, %error, "the next daemon repeats its limits");
    }
}

/// Sets the limits in the guest, and records them.
async fn limit(target: &Target, asked: Limits) -> Result<()> {
    limit_in_guest(target, asked).await?;
    change(target, |added| added.limits = added.limits.changed_by(asked)).await;
    Ok(())
}

/// Sets limits of a container in the guest.
///
/// # Errors
/// [`Error::Refused`] if the guest refuses one; [`Error::Agent`]. Those before it may have changed.
pub(crate) async fn limit_in_guest(target: &Target, asked: Limits) -> Result<()> {
    let id = target.container.name.clone();
    let request = agent_v1::UpdateContainerRequest { id, resources: Some(asked.into()) };
    let agent = target.sandbox.agent()?;
    agent.call(|mut client| async move { client.update_container(request).await }).await?;
    Ok(())
}

/// Gives a pod's microVM the size back that it had before an update which failed.
async fn undo(sandbox: &Arc<Sandbox>, (memory, cpus): (u64, u32)) {
    let now = sandbox.look(|record| (record.memory_bytes, record.cpus.count));
    let mut undone = Ok(());
    if now.1 > cpus {
        undone = quota::cut(sandbox, cpus).await;
    }
    if now.0 > memory {
        undone = undone.and(resize::change_to(sandbox, memory, LONGEST).await);
    }
    if let Err(error) = undone {
        tracing::warn!(sandbox = sandbox.name, %error, "it keeps something of a failed update");
    }
}

/// Returns the most bytes that a pod's microVM can have.
pub(super) fn most(record: &Record) -> u64 {
    record.memory.max_bytes.max(record.memory_bytes)
}

/// The changes of a pod's microVM for an update of limits.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    /// The memory that it is given, bytes; `None`: it has enough.
    memory: Option<u64>,
    /// The memory without which the limits cannot be, bytes.
    least: u64,
    /// The number of CPUs that it is given; `None`: as [`quota::more`] says.
    cpus: Option<u32>,
    /// Set if the containers' limits are lowered.
    lowers: bool,
}

impl Plan {
    /// Plans an update of the container `name`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the microVM cannot have as much memory.
    fn new(record: &Record, name: &str, asked: Limits) -> Result<Self> {
        let most = most(record);
        fits(asked, most)?;
        if let Some(added) = record.added(name) {
            check_huge_pages(added.limits, asked)?;
        }
        let before = Sums::of(record, name, Limits::default());
        let after = Sums::of(record, name, asked);
        let raises = after.memory > before.memory;
        // Limits that were too large together from the start are their user's choice.
        if raises && after.memory > most && before.memory <= most {
            return Err(Error::Invalid(format!(
                "with that, the limits of the pod's containers would be {} MiB together, more than \
                 the {} MiB that its microVM can have; begin such a pod with more, or a larger \
                 --max-memory",
                after.memory >> 20,
                most >> 20
            )));
        }
        Ok(Self::between(record, &before, &after, asked))
    }

    /// Plans what takes the sums of the limits from `before` to `after`.
    fn between(record: &Record, before: &Sums, after: &Sums, asked: Limits) -> Self {
        let (has, most) = (record.memory_bytes, most(record));
        let raises = after.memory > before.memory;
        let wanted = after.needed(record.memory.boot_bytes).min(most);
        let cpus_raise = after.quota_us > before.quota_us;
        // A limit that is lifted needs no less than before.
        let memory_lowers = after.memory < before.memory && asked.memory_bytes != u64::MAX;
        let cpus_lower = after.quota_us < before.quota_us && asked.cpu_quota_us != u64::MAX;
        Self {
            memory: Some(wanted).filter(|wanted| raises && *wanted > has),
            least: after.memory.min(most),
            cpus: quota::more(record, after.quota_us).filter(|_| cpus_raise),
            lowers: memory_lowers || cpus_lower,
        }
    }

    /// Gives the microVM what the limits need.
    ///
    /// # Errors
    /// [`Error::Agent`] with what it cannot have.
    async fn grow(&self, sandbox: &Arc<Sandbox>) -> Result<()> {
        if let Some(memory) = self.memory
            && let Err(error) = resize::change_to(sandbox, memory, LONGEST).await
        {
            if sandbox.look(|record| record.memory_bytes) < self.least {
                return Err(cannot(&format!("{} MiB of memory", memory >> 20), error));
            }
            tracing::warn!(sandbox = sandbox.name, %error, "little is left beside its limits");
        }
        let Some(cpus) = self.cpus else { return Ok(()) };
        let grown = cpus::change_to(sandbox, cpus).await;
        grown.map_err(|error| cannot(&format!("{cpus} CPUs"), error))
    }
}

/// Returns the error of an update for which a microVM cannot have `what`. Sizes that `error` names
/// are those of a moment: the microVM is given its size back.
fn cannot(what: &str, error: Error) -> Error {
    let reason = match error {
        Error::Memory { reason, .. } | Error::Cpus { reason, .. } => reason,
        other => other.to_string(),
    };
    Error::Agent(format!("the limits stay, since the pod's microVM cannot have {what}: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::surplus::waits;
    use super::*;
    use crate::adopt::tests::{added_of, record_of};
    use crate::files::Files;
    use crate::record::{Added, Cpus, Given, MemoryBounds, Store};

    const MIB: u64 = 1 << 20;

    /// Makes the record of a pod of 192 MiB, with room for 448, and a container for each limit.
    fn pod(limits_mib: &[u64]) -> Record {
        let added = |(at, mib): (usize, &u64)| {
            let limits = Limits { memory_bytes: mib * MIB, ..Limits::default() };
            Added { limits, ..added_of(&format!("c{at}"), SandboxState::Running) }
        };
        Record {
            pod: true,
            memory_bytes: 192 * MIB,
            memory: MemoryBounds::new(192 * MIB, 448 * MIB),
            cpus: Cpus { count: 1, boot: 0, max: 4, chosen: 0 },
            added: limits_mib.iter().enumerate().map(added).collect(),
            ..record_of(SandboxState::Running)
        }
    }

    fn memory(mib: u64) -> Limits {
        Limits { memory_bytes: mib * MIB, ..Limits::default() }
    }

    /// Returns what an update of `c0` gives the microVM, the least that it needs, both in MiB, and
    /// whether the limits are lowered.
    fn planned(record: &Record, asked: Limits) -> (u64, u64, bool) {
        let plan = Plan::new(record, "c0", asked).unwrap();
        (plan.memory.unwrap_or(0) / MIB, plan.least / MIB, plan.lowers)
    }

    #[test]
    fn a_microvm_grows_for_its_limits_and_itself_within_its_room() {
        assert_eq!(planned(&pod(&[32]), memory(64)), (0, 64, false));
        assert_eq!(planned(&pod(&[64]), memory(96)), (224, 96, false));
        assert_eq!(planned(&pod(&[64]), memory(320)), (448, 320, false));
        assert_eq!(planned(&pod(&[64]), memory(400)), (448, 400, false), "the room is its end");
        assert_eq!(planned(&pod(&[64, 100, 0]), memory(100)), (328, 200, false), "all count");
        assert_eq!(planned(&pod(&[96]), memory(48)), (0, 48, true));
        let lifted = Limits { memory_bytes: u64::MAX, ..Limits::default() };
        assert_eq!(planned(&pod(&[96]), lifted), (0, 0, false));
        let fixed = Record { memory: MemoryBounds::new(192 * MIB, 192 * MIB), ..pod(&[64]) };
        assert_eq!(planned(&fixed, memory(96)), (0, 96, false), "without room it stays");
    }

    #[test]
    fn an_update_waits_for_memory_if_kubelet_limits_the_group() {
        assert!(!waits(&pod(&[64])));
        let mut limited = pod(&[64]);
        limited.confinement.control_group = "/kubepods/pod1/one".to_owned();
        assert!(waits(&limited));
    }

    #[test]
    fn an_ended_container_does_not_count() {
        let mut record = pod(&[64, 300]);
        record.added[1].state = SandboxState::Exited;
        assert_eq!(planned(&record, memory(320)), (448, 320, false));
        record.memory_bytes = 448 * MIB;
        assert_eq!(spare(&record), Some(192 * MIB));
        let host_address = "0000:01:10.0".to_owned();
        record.plugged.functions = vec![Given { host_address, ..Given::default() }];
        assert_eq!(spare(&record), None, "a device of hardware reaches it");
    }

    #[test]
    fn huge_pages_are_beside_limits_and_beside_what_a_pod_began_with() {
        let huge = |mib: u64| Limits { huge_page_bytes: mib * MIB, ..Limits::default() };
        let needed = |record: &Record| {
            let sums = Sums::of(record, "", Limits::default());
            (sums.memory / MIB, sums.huge / MIB, sums.needed(192 * MIB) / MIB)
        };
        let mut record = pod(&[64, 32]);
        record.added[0].limits.huge_page_bytes = 6 * MIB + 1;
        assert_eq!(needed(&record), (102, 6, 230));
        record.added[1].limits.memory_bytes = 0;
        assert_eq!(needed(&record), (70, 6, 198), "one of them has no limit");
        record.memory_bytes = 320 * MIB;
        assert_eq!(spare(&record), Some(198 * MIB));
        // An update of other limits may name them, and cannot change them.
        assert_eq!(planned(&record, Limits { memory_bytes: 96 * MIB, ..huge(6) }).1, 102);
        assert!(Plan::new(&pod(&[64]), "c0", huge(0)).is_ok());
        for other in [huge(4), huge(8), Limits { huge_page_bytes: 1, ..huge(0) }] {
            let error = Plan::new(&record, "c0", other).unwrap_err().to_string();
            assert!(error.contains("cannot be changed: it has 6 MiB"), "{error}");
        }
    }

    #[test]
    fn an_ended_container_sets_free_what_the_others_do_not_need() {
        let mut record = pod(&[32, 100, 150]);
        record.memory_bytes = 410 * MIB;
        assert_eq!(spare(&record), None);
        for (ended, left_mib) in [(2, 260), (1, 192)] {
            record.added[ended].state = SandboxState::Exited;
            assert_eq!(spare(&record), Some(left_mib * MIB));
            record.memory_bytes = left_mib * MIB;
        }
        record.added.clear();
        assert_eq!(spare(&record), None, "it keeps what it began with");
    }

    #[test]
    fn limits_beyond_the_room_are_refused_with_its_size() {
        let refused =
            |record: &Record, mib| Plan::new(record, "c0", memory(mib)).unwrap_err().to_string();
        let one = refused(&pod(&[64]), 449);
        assert!(one.contains("449 MiB is more than the 448 MiB"), "{one}");
        let sum = refused(&pod(&[64, 200]), 249);
        assert!(sum.contains("449 MiB together, more than the 448 MiB"), "{sum}");
        // Limits that were too large from the start may be changed within the pod's memory.
        assert_eq!(planned(&pod(&[64, 400]), memory(96)), (448, 448, false));
    }

    #[test]
    fn cpus_come_for_quotas_as_far_as_there_is_room() {
        let cpus = |quota_us| {
            let asked = Limits { cpu_quota_us: quota_us, ..Limits::default() };
            Plan::new(&pod(&[64]), "c0", asked).unwrap().cpus
        };
        assert_eq!((cpus(50_000), cpus(100_000)), (None, None));
        assert_eq!((cpus(100_001), cpus(900_000)), (Some(2), Some(4)));
        assert_eq!(cpus(u64::MAX), None, "a quota that is lifted");
        let mut fixed = pod(&[64]);
        fixed.cpus.max = 1;
        let asked = Limits { cpu_quota_us: 200_000, ..Limits::default() };
        assert_eq!(Plan::new(&fixed, "c0", asked).unwrap().cpus, None);
    }

    #[test]
    fn a_quota_that_is_lowered_sets_cpus_free() {
        let mut record = pod(&[64]);
        record.added[0].limits.cpu_quota_us = 200_000;
        let lowers = |quota_us| {
            let asked = Limits { cpu_quota_us: quota_us, ..Limits::default() };
            Plan::new(&record, "c0", asked).unwrap().lowers
        };
        assert_eq!((lowers(50_000), lowers(300_000), lowers(u64::MAX)), (true, false, false));
    }

    fn sandbox(dir: &std::path::Path) -> Arc<Sandbox> {
        let record = pod(&[]);
        let store = Store::new(dir, &record.id);
        store.create().unwrap();
        Sandbox::new(record, store, Files::start().unwrap().lane())
    }

    #[tokio::test]
    async fn a_record_says_that_limits_change_until_the_last_update_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = sandbox(dir.path());
        let saved = || sandbox.store.load().unwrap().unwrap().changing_limits;
        let first = sandbox.update_of_limits().unwrap();
        begin(&sandbox).await.unwrap();
        assert!(saved());
        let second = sandbox.update_of_limits().unwrap();
        end(&sandbox, 1).await;
        assert!(saved(), "another one is under way");
        drop(second);
        end(&sandbox, 0).await;
        assert!(saved(), "the first one is no caller's own");
        end(&sandbox, 1).await;
        assert!(!saved());
        drop(first);
    }

    #[test]
    fn a_pod_keeps_what_it_began_with_what_a_user_gave_it_and_what_limits_need() {
        let with = |limits: &[u64], has: u64, chosen: u64| {
            let mut record = pod(limits);
            record.memory_bytes = has * MIB;
            record.memory.chosen_bytes = chosen * MIB;
            spare(&record).map(|bytes| bytes / MIB)
        };
        assert_eq!(with(&[48], 448, 0), Some(192));
        assert_eq!(with(&[48, 100], 448, 0), Some(276));
        assert_eq!(with(&[48], 448, 384), Some(384));
        assert_eq!(with(&[48], 192, 0), None);
        assert_eq!(with(&[320], 448, 0), None);
    }
}
