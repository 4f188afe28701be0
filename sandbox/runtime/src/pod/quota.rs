//! The CPUs of a pod's microVM, which follow the CPU limits of its containers (RunD-V, VII.B).
//!
//! A pod with room for CPUs has as many as the limits of its live containers need together, rounded
//! up, between those that it began with and the most that it can have. Before a container begins,
//! the control group of the VMM gets the time of the CPUs that are missing, then the VMM adds them
//! and the guest brings them online. After a container has ended, the CPUs that no limit needs any
//! more go offline, then away from the VMM, and their time from the control group last.
//!
//! A number of CPUs that a user chose (`slipway update POD --cpus`) stays, whatever the limits are.
//! The number that the pod began with is no choice: from then on the CPUs follow the limits again.

use std::sync::Arc;

use super::sums::Sums;
use crate::guests::Guests;
use crate::node::Node;
use crate::record::{Limits, Record, SandboxState};
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::{Result, cpus};

/// The period of a CPU limit, microseconds.
const PERIOD_US: u64 = 100_000;

/// Gives the microVM the CPUs that the limits need with that of a container which is about to
/// begin. The container's record is live. Waits until no other call changes the microVM's size.
///
/// A microVM that does not get them shares those that it has: the container begins all the same.
pub(super) async fn join(target: &Target) {
    let sandbox = &target.sandbox;
    let is_limited =
        target.look_added(|added| added.is_some_and(|one| one.limits.cpu_quota_us > 0));
    if !is_limited || sandbox.look(|record| !record.cpus.can_grow()) {
        return;
    }
    // CPUs of an ended container that are about to go must not count as there.
    let _turn = sandbox.wait_to_change_size().await;
    let Some(cpus) = sandbox.look(|record| more(record, quota_us(record))) else {
        return allow(sandbox).await;
    };
    if let Err(error) = cpus::change_to(sandbox, cpus).await {
        tracing::warn!(container = target.name(), %error, "its limit of CPU time is on fewer CPUs");
    }
}

/// Has a task take the CPUs of a pod away that its containers' limits do not need any more.
pub(super) fn leave(node: &Node, sandbox: &Arc<Sandbox>) {
    leave_to(&node.guests, sandbox);
}

/// Has a task take the CPUs away, unless one waits for its turn, which sees to this end, too: a
/// guest that does not answer would have as many tasks wait as its containers end.
fn leave_to(guests: &Guests, sandbox: &Arc<Sandbox>) {
    // CPUs that are coming are recorded at the end, and may be for the container that has ended.
    let may_have = sandbox.look(|record| spare(record).is_some() || record.cpus.can_grow());
    if !may_have || sandbox.state() != SandboxState::Running || sandbox.is_stopping() {
        return;
    }
    let of_task = Arc::clone(sandbox);
    sandbox.cpu_returns.spawn(guests, async move { give_back(&of_task).await });
}

/// Takes the CPUs of a pod away that its containers' limits do not need. Waits until no other call
/// changes the microVM's size.
pub(super) async fn give_back(sandbox: &Arc<Sandbox>) {
    let _turn = sandbox.wait_to_change_size().await;
    // An update or another container may have come first, or the pod may have been paused into a
    // file, from which it comes back with a task of its own.
    let Some(kept) = sandbox.look(spare).filter(|_| !sandbox.is_in_file()) else { return };
    if let Err(error) = cut(sandbox, kept).await {
        tracing::info!(sandbox = sandbox.name, %error, "CPUs beyond its limits stay, without time");
    }
}

/// Leaves a pod so many CPUs. Those that its guest does not give up stay without CPU time of their
/// own.
///
/// # Errors
/// The errors of [`cpus::change_to`].
pub(super) async fn cut(sandbox: &Arc<Sandbox>, cpus: u32) -> Result<()> {
    let changed = cpus::change_to(sandbox, cpus).await;
    if changed.is_err()
        && let Err(error) = cpus::limit(sandbox, cpus).await
    {
        tracing::warn!(sandbox = sandbox.name, %error, "its CPU time is not limited");
    }
    changed
}

/// Gives the VMM of a pod the time of the CPUs that suffice for its containers' limits. Those that
/// the guest did not give up are there and have none ([`cut`]), so that none is missing when the
/// limits need them again. The caller has the turn to change the microVM's size.
pub(super) async fn allow(sandbox: &Arc<Sandbox>) {
    let Some(cpus) = sandbox.look(enough) else { return };
    if let Err(error) = cpus::limit(sandbox, cpus).await {
        tracing::warn!(sandbox = sandbox.name, %error, "its CPU time is as before");
    }
}

/// Returns the number of CPUs whose time a running pod is to have. Returns `None` if the pod can
/// have no others than those that it began with.
fn enough(record: &Record) -> Option<u32> {
    record.cpus.can_grow().then(|| spare(record).unwrap_or(record.cpus.count))
}

/// Returns the number of CPUs that a pod is given for quotas of `quota_us` microseconds of each
/// period, as far as it has room. Returns `None` if it has enough, or if a user chose the number.
pub(super) fn more(record: &Record, quota_us: u64) -> Option<u32> {
    let cpus = cpus_of(quota_us).min(record.cpus.max);
    (record.cpus.chosen == 0 && cpus > record.cpus.count).then_some(cpus)
}

/// Returns the number of CPUs that suffice for a running pod, or `None` if it has no more: never
/// fewer than it began with or a user gave it.
pub(super) fn spare(record: &Record) -> Option<u32> {
    let needed = match record.cpus.chosen {
        0 => cpus_of(quota_us(record)),
        chosen => chosen,
    };
    let kept = needed.max(record.cpus.boot);
    (kept < record.cpus.count).then_some(kept)
}

/// Returns the CPU time in each period that the limits of a pod's live containers have together,
/// microseconds.
fn quota_us(record: &Record) -> u64 {
    Sums::of(record, "", Limits::default()).quota_us
}

/// Returns the number of CPUs that quotas need together, which are in microseconds of each period.
fn cpus_of(quota_us: u64) -> u32 {
    u32::try_from(quota_us.div_ceil(PERIOD_US)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::{added_of, record_of, sandbox_of};
    use crate::record::{Added, Cpus};

    /// Makes the record of a pod that began with one CPU, has `has` and can have four, with a
    /// running container for each quota.
    fn pod(quotas_us: &[u64], has: u32) -> Record {
        let added = |quota_us: &u64| {
            let limits = Limits { cpu_quota_us: *quota_us, ..Limits::default() };
            Added { limits, ..added_of("c", SandboxState::Running) }
        };
        Record {
            pod: true,
            cpus: Cpus { count: has, ..Cpus::of_new(1, 4) },
            added: quotas_us.iter().map(added).collect(),
            ..record_of(SandboxState::Running)
        }
    }

    /// Returns the number of CPUs that the pod is given, and the number that it is left.
    fn changes(record: &Record) -> (Option<u32>, Option<u32>) {
        (more(record, quota_us(record)), spare(record))
    }

    #[test]
    fn cpus_are_the_sum_of_the_limits_rounded_up_within_the_pods_bounds() {
        assert_eq!(changes(&pod(&[], 1)), (None, None));
        assert_eq!(changes(&pod(&[100_000], 1)), (None, None));
        assert_eq!(changes(&pod(&[50_000, 50_001], 1)), (Some(2), None), "together");
        assert_eq!(changes(&pod(&[150_000, 0], 1)), (Some(2), None), "one has no limit");
        assert_eq!(changes(&pod(&[300_000, 200_000], 1)), (Some(4), None), "the room is its end");
        assert_eq!(changes(&pod(&[u64::MAX, 1], 1)), (Some(4), None));
        assert_eq!(changes(&pod(&[250_000], 3)), (None, None));
        assert_eq!(changes(&pod(&[50_000, 100_000], 3)), (None, Some(2)));
        assert_eq!(changes(&pod(&[], 4)), (None, Some(1)), "it keeps what it began with");
        let mut fixed = pod(&[300_000], 1);
        fixed.cpus.max = 1;
        assert_eq!(changes(&fixed), (None, None), "without room");
    }

    #[test]
    fn a_container_that_has_ended_needs_no_cpu() {
        let mut record = pod(&[100_000, 200_000], 3);
        assert_eq!(changes(&record), (None, None));
        record.added[1].state = SandboxState::Exited;
        assert_eq!(changes(&record), (None, Some(1)));
        record.added[1].state = SandboxState::Created;
        assert_eq!(changes(&record), (None, None), "it counts before it starts");
    }

    #[test]
    fn cpus_that_a_guest_kept_have_time_when_limits_need_them_again() {
        // The guest gave none of four CPUs up, and had the time of one.
        let kept = |quotas_us: &[u64]| enough(&pod(quotas_us, 4));
        assert_eq!((kept(&[]), kept(&[100_000])), (Some(1), Some(1)));
        assert_eq!(changes(&pod(&[300_000], 4)).0, None, "no CPU is missing");
        assert_eq!((kept(&[300_000]), kept(&[900_000])), (Some(3), Some(4)));
        let mut fixed = pod(&[300_000], 1);
        fixed.cpus.max = 1;
        assert_eq!(enough(&fixed), None);
    }

    #[test]
    fn the_number_that_a_user_chose_stays() {
        let chosen = |quota_us, has, chosen| {
            let mut record = pod(&[quota_us], has);
            record.cpus.chosen = chosen;
            changes(&record)
        };
        assert_eq!(chosen(400_000, 2, 2), (None, None));
        assert_eq!(chosen(50_000, 2, 2), (None, None));
        assert_eq!(chosen(400_000, 3, 2), (None, Some(2)), "limits had more before");
    }

    #[tokio::test]
    async fn one_task_waits_however_many_containers_end() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = sandbox_of(pod(&[], 4), dir.path());
        let guests = Guests::start().unwrap();
        // The guest has not followed an earlier change.
        let _turn = sandbox.wait_to_change_size().await;
        (0..100).for_each(|_| leave_to(&guests, &sandbox));
        assert!(Arc::strong_count(&sandbox) <= 3, "the test's, and those of two tasks");
    }
}
