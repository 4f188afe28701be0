//! Huge pages of a pod's containers: the memory of the pod's microVM for them.
//!
//! The guest's kernel makes them, in its own memory (the agent's `huge_pages`). The memory that
//! kubelet names for a pod leaves them out, so the microVM is given as much more before the guest
//! creates a container that has some, and gives it back after the container's end.

use std::sync::Arc;

use super::sums::{OVERHEAD, Sums};
use super::update::{LONGEST, end, give_back_memory};
use crate::record::{Limits, Record, SandboxState};
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::{Error, Result, cgroup, resize};

/// Gives the microVM the memory that the huge pages of a container need. The container's record is
/// live. Waits until no other call changes the microVM's size.
///
/// # Errors
/// [`Error::Invalid`] if the microVM, or the control group that it is in, cannot have so much;
/// [`Error::Agent`] if the guest or the VMM does not follow.
pub(super) async fn join(target: &Target) -> Result<()> {
    if huge_bytes(target) == 0 {
        return Ok(());
    }
    let sandbox = &target.sandbox;
    let _turn = sandbox.wait_to_change_size().await;
    match sandbox.look(Growth::of)? {
        Some(growth) => growth.run(sandbox).await,
        None => Ok(()),
    }
}

/// Notes that the memory of a container's huge pages is to go back to the host, before the record
/// with the container's end is saved: the next daemon gives it back otherwise.
pub(super) fn note_leave(target: &Target) {
    if huge_bytes(target) > 0 {
        target.sandbox.note(|record| record.changing_limits = true);
    }
}

/// Has the microVM give the memory of an ended container's huge pages back to the host, in a task
/// of its own.
pub(super) fn leave(target: &Target) {
    let (sandbox, bytes) = (&target.sandbox, huge_bytes(target));
    if bytes == 0 || sandbox.state() != SandboxState::Running {
        return;
    }
    let sandbox = Arc::clone(sandbox);
    // Not one of the updates that may wait: those would be refused, and may give nothing back.
    tokio::spawn(async move {
        give_back_memory(&sandbox, bytes, None).await;
        end(&sandbox, 0).await;
    });
}

fn huge_bytes(target: &Target) -> u64 {
    target.look_added(|added| added.map_or(0, |added| added.limits.huge_bytes()))
}

/// The memory that a microVM is given, bytes.
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
        let (has, most) = (record.memory_bytes, record.memory.max_bytes.max(record.memory_bytes));
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
        let wanted = sums.needed(record.memory.boot_bytes).min(most);
        Ok((wanted > has).then_some(Self { wanted, least }))
    }

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
    use crate::record::{Added, MemoryBounds};

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
    fn huge_pages_beyond_the_room_are_refused_with_what_gives_more() {
        let error = Growth::of(&pod(384, 64, 194)).unwrap_err().to_string();
        assert!(error.contains("194 MiB of huge pages") && error.contains("386 MiB of memory"));
        assert!(error.contains("can have 384 MiB") && error.contains("dev.slipway.max-memory"));
        assert!(!error.contains('\n'), "{error}");
    }
}
