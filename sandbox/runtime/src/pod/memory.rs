//! The memory of a pod's microVM, which follows the limits of its containers.
//!
//! A pod with room for memory has as much as the limits of its live containers and their huge pages
//! need together with the guest's kernel, between what it began with and the most that it can have.
//! Before a container begins, the microVM is given what is missing ([`join`]). After a container
//! has ended, what no limit needs any more goes back to the host ([`leave`]): the guest gives it
//! up first, then the limit of the VMM's control group is lowered.
//!
//! The guest is asked for memory that is free, never for what its programs use. What stays is asked
//! for again after the end of the next container, after an update of limits, and by the next
//! daemon. A size that a user chose (`slipway update POD --memory`) stays.
//!
//! The guest's kernel makes huge pages in its own memory (the agent's `huge_pages`). The memory
//! that kubelet names for a pod leaves them out, so a container that has some does not begin
//! without memory for them. Any other container begins all the same.
//!
//! Memory that a container has for its own is that of the module `bound`.

use std::sync::Arc;

use super::sums::{OVERHEAD, Sums};
use super::update::{LONGEST, floor, give_back_memory, most, needed, spare};
use crate::node::Node;
use crate::record::{Limits, Record, SandboxState};
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::{Error, Result, cgroup, resize};

/// Gives the microVM the memory that the limits need with those of a container which is about to
/// begin. The container's record is live. Waits until no other call changes the microVM's size.
///
/// # Errors
/// For huge pages only: [`Error::Invalid`] if the microVM, or the control group that it is in,
/// cannot have so much; [`Error::Agent`] if the guest or the VMM does not follow.
pub(super) async fn join(target: &Target) -> Result<()> {
    let sandbox = &target.sandbox;
    let limits = target.look_added(|added| added.map(|one| one.limits)).unwrap_or_default();
    if limits.huge_bytes() > 0 {
        let _turn = sandbox.wait_to_change_size().await;
        return match sandbox.look(Growth::of)? {
            Some(growth) => growth.run(sandbox).await,
            None => Ok(()),
        };
    }
    if limits.memory_bytes > 0 && sandbox.look(may_lack) {
        grow(target).await;
    }
    Ok(())
}

/// Has a task give the memory of a pod back that its containers' limits do not need any more.
pub(super) fn leave(node: &Node, sandbox: &Arc<Sandbox>) {
    // A growth that is under way may count the container that has just ended, and is recorded at
    // its end only: with room, the task looks when it has the turn.
    let may_have = sandbox.look(|record| spare(record).is_some() || record.memory.room() > 0);
    if !may_have || sandbox.state() != SandboxState::Running || sandbox.is_stopping() {
        return;
    }
    let of_task = Arc::clone(sandbox);
    sandbox.returns.spawn(&node.guests, async move {
        give_back_memory(&of_task, None).await;
    });
}

/// Returns whether the limits of a pod with room need more than it keeps without them. A pod with a
/// function of hardware, which would give nothing back, does not grow by itself.
fn may_lack(record: &Record) -> bool {
    let follows = record.memory.room() > 0 && !record.plugged.has_hardware();
    follows && needed(record) > floor(record)
}

/// Gives the microVM the memory that the limits need. A microVM that does not get all of it shares
/// out what it has: the container begins even so.
async fn grow(target: &Target) {
    let sandbox = &target.sandbox;
    // Memory of an ended container that is about to go must not count as there.
    let _turn = sandbox.wait_to_change_size().await;
    // kubelet raises the limit above a pod's group for updates, and not for starts.
    let above = cgroup::most_above(sandbox).await.unwrap_or(u64::MAX);
    let Some(wanted) = sandbox.look(|record| missing(record, above)) else { return };
    if let Err(error) = resize::change_to(sandbox, wanted, LONGEST).await {
        tracing::warn!(container = target.name(), %error, "its pod has less than the limits need");
    }
}

/// Returns the bytes that a pod is given for the limits of its containers, at most `above`, or
/// `None` if it has enough.
fn missing(record: &Record, above: u64) -> Option<u64> {
    let wanted = needed(record).min(most(record)).min(above);
    (wanted > record.memory_bytes).then_some(wanted)
}

/// The memory that a microVM is given for huge pages, bytes.
#[derive(Debug)]
struct Growth {
    /// The memory that it is to have.
    wanted: u64,
    /// The memory without which the limits and the guest's kernel cannot be.
    least: u64,
}

impl Growth {
    /// Returns what the microVM of a pod lacks for the huge pages of its containers, or `None` if
    /// it has enough.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it cannot have the least that they need.
    fn of(record: &Record) -> Result<Option<Self>> {
        let (has, most) = (record.memory_bytes, most(record));
        let sums = Sums::of(record, "", Limits::default());
        let least = sums.memory.saturating_add(OVERHEAD);
        if least > most {
            return Err(Error::Invalid(format!(
                "the limits of the pod's containers, {} MiB of huge pages among them, and the \
                 guest's kernel need {} MiB of memory, and the pod's microVM can have {} MiB: \
                 begin such a pod with more (dev.slipway.memory), or with more room \
                 (dev.slipway.max-memory, or pod_max_memory_percent of the node)",
                sums.huge >> 20,
                least.div_ceil(1 << 20),
                most >> 20
            )));
        }
        let wanted = needed(record).min(most);
        Ok((wanted > has).then_some(Self { wanted, least }))
    }

    /// Gives the microVM the memory, or at least `least`, which is enough.
    ///
    /// # Errors
    /// As for huge pages in [`join`].
    async fn run(self, sandbox: &Arc<Sandbox>) -> Result<()> {
        let Self { wanted, least } = self;
        cgroup::check_above(sandbox, wanted).await?;
        let Err(error) = resize::change_to(sandbox, wanted, LONGEST).await else { return Ok(()) };
        if sandbox.look(|record| record.memory_bytes) >= least {
            tracing::warn!(sandbox = sandbox.name, %error, "little is left beside its huge pages");
            return Ok(());
        }
        let reason = match error {
            Error::Memory { reason, .. } => reason,
            other => other.to_string(),
        };
        let wanted = wanted >> 20;
        Err(Error::Agent(format!(
            "for the container's huge pages the pod's microVM needs {wanted} MiB of memory, and \
             cannot have them: {reason}"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::{added_of, record_of};
    use crate::record::{Added, Given, MemoryBounds};

    const MIB: u64 = 1 << 20;

    /// Makes the record of a pod of 192 MiB and room up to `most` MiB, with a container that has
    /// these limits of memory and huge pages, in MiB.
    fn pod(most: u64, memory: u64, huge: u64) -> Record {
        let (memory_bytes, huge_page_bytes) = (memory * MIB, huge * MIB);
        let limits = Limits { memory_bytes, huge_page_bytes, ..Limits::default() };
        Record {
            pod: true,
            memory_bytes: 192 * MIB,
            memory: MemoryBounds::new(192 * MIB, most * MIB),
            added: vec![Added { limits, ..added_of("c", SandboxState::Starting) }],
            ..record_of(SandboxState::Running)
        }
    }

    /// Returns the memory that the microVM is given, and the least, in MiB.
    fn growth(record: &Record) -> Option<(u64, u64)> {
        Growth::of(record).unwrap().map(|one| (one.wanted / MIB, one.least / MIB))
    }

    #[test]
    fn a_microvm_grows_by_the_huge_pages_of_its_containers() {
        assert_eq!(growth(&pod(384, 64, 64)), Some((256, 256)));
        assert_eq!(growth(&pod(384, 0, 64)), Some((256, 192)), "beside what it began with");
        assert_eq!(growth(&pod(224, 0, 64)), Some((224, 192)), "as far as there is room");
        assert_eq!(growth(&pod(192, 0, 64)), None, "it has the least, and no room");
        assert_eq!(growth(&pod(384, 32, 32)), None, "it has what the limits need");
        let mut ended = pod(384, 64, 64);
        ended.added[0].state = SandboxState::Exited;
        assert_eq!(growth(&ended), None);
    }

    #[test]
    fn a_microvm_grows_by_limits_within_its_room_and_the_limit_above() {
        let given =
            |record: &Record, above: u64| missing(record, above * MIB).map(|bytes| bytes / MIB);
        for (limit, expected) in [(64, None), (65, Some(193)), (200, Some(328)), (900, Some(448))] {
            let record = pod(448, limit, 0);
            assert_eq!(given(&record, 4096), expected, "{limit} MiB");
            assert_eq!(may_lack(&record), expected.is_some(), "{limit} MiB");
        }
        assert_eq!(given(&pod(448, 200, 0), 256), Some(256));
        assert_eq!(given(&pod(448, 200, 0), 100), None, "it keeps what it has");
        assert!(!may_lack(&pod(192, 200, 0)), "without room");
        let mut chosen = pod(448, 200, 0);
        (chosen.memory_bytes, chosen.memory.chosen_bytes) = (328 * MIB, 328 * MIB);
        assert!(!may_lack(&chosen), "it keeps what a user gave it");
        chosen.added.push(chosen.added[0].clone());
        assert!(may_lack(&chosen));
        let host_address = "0000:01:10.0".to_owned();
        chosen.plugged.functions = vec![Given { host_address, ..Given::default() }];
        assert!(!may_lack(&chosen), "a device of hardware reaches all of it");
    }

    #[test]
    fn huge_pages_beyond_the_room_are_refused_with_what_gives_more() {
        let error = Growth::of(&pod(384, 64, 194)).unwrap_err().to_string();
        assert!(error.contains("194 MiB of huge pages") && error.contains("386 MiB of memory"));
        assert!(error.contains("can have 384 MiB") && error.contains("dev.slipway.max-memory"));
        assert!(!error.contains('\n'), "{error}");
    }
}
