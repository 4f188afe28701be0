//! Updates of the limits of a pod as a whole: the memory and CPU time that all of its containers
//! may use together. Kubernetes' pods can have such limits.
//!
//! The guest's kernel does not keep them. The host's control group of the pod does, and the pod's
//! microVM gets the size for them. Containers without a limit of their own share that size.
//!
//! If all containers have limits, the microVM's size follows these alone, and the pod's limit
//! changes nothing. For the order of kubelet's steps when it lowers limits is:
//! 1. it updates the containers; each update ends after the memory that it set free has gone back
//!    to the host ([`super::surplus`]);
//! 2. it lowers the limit of the pod's control group on the host, with which a microVM that had not
//!    shrunk would be ended by the kernel;
//! 3. it tells the pod's limit, which arrives here.
//!
//! So in step 1 the pod still has its old limit. If that counted, the microVM would not shrink in
//! time for step 2.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::super::quota;
use super::super::request::{fits, limits};
use super::super::sums::Sums;
use super::{GivenBack, Plan, begin, end, give_back_spare, most, undo};
use crate::node::Node;
use crate::record::{Limits, Record, SandboxState};
use crate::sandbox::Sandbox;
use crate::v1::Resources;
use crate::{Error, Result};

/// The number of permits of [`Sandbox::update_of_limits`] that an update holds itself, for [`end`].
const OWN: usize = 1;
/// The name for [`Sums`] if the limits of no container change: no container has this name.
const NO_CONTAINER: &str = "";

impl Node {
    /// Changes the limits of a pod that runs, of memory and CPU time, and the size of its microVM
    /// with them. Returns the memory that the pod gave back. Other limits are ignored. Waits for
    /// its turn. The change goes on to its end if the caller stops waiting.
    ///
    /// # Errors
    /// [`Error::Invalid`], also if the pod cannot have as much memory; [`Error::WrongState`] if it
    /// does not run; [`Error::Busy`] if too many updates wait; [`Error::Agent`] if the guest or the
    /// VMM refuses; errors of saving the record. The microVM is given its size back then.
    pub(crate) async fn update_pod(
        &self,
        sandbox: &Arc<Sandbox>,
        asked: &Resources,
    ) -> Result<GivenBack> {
        let Limits { memory_bytes, cpu_quota_us, .. } = limits(Some(asked))?;
        let asked = Limits { memory_bytes, cpu_quota_us, ..Limits::default() };
        if asked == Limits::default() {
            let why = "the update names no limit of memory or CPU time, and a pod has no other";
            return Err(Error::Invalid(why.to_owned()));
        }
        check_runs(sandbox)?;
        let place = sandbox.update_of_limits()?;
        let updated = self.guests.spawn(take_turn(Arc::clone(sandbox), asked, place)).await;
        updated.unwrap_or_else(|error| Err(Error::Agent(error.to_string())))
    }
}

/// Fails unless the pod runs.
fn check_runs(sandbox: &Sandbox) -> Result<()> {
    match sandbox.state() {
        SandboxState::Running => Ok(()),
        _ => Err(sandbox.wrong_state("the limits of a pod that runs can be changed")),
    }
}

/// Makes an update when its turn comes, and returns the memory that the pod gave back. Holds
/// `place`, its permit, until that is done.
async fn take_turn(
    sandbox: Arc<Sandbox>,
    asked: Limits,
    place: OwnedSemaphorePermit,
) -> Result<GivenBack> {
    let turn = sandbox.wait_to_change_size().await;
    let lowers = update(&sandbox, asked).await;
    if !matches!(lowers, Ok(true)) {
        // It failed, or set nothing free.
        end(&sandbox, OWN).await;
        return lowers.map(|_| GivenBack::default());
    }
    // The task that gives memory back waits for a turn of its own.
    drop(turn);
    give_back_spare(&sandbox, place).await
}

/// Makes an update: the microVM grows, then the limits are recorded. If either fails, the microVM
/// gets its size back. Returns whether the pod's containers may use less than before.
async fn update(sandbox: &Arc<Sandbox>, asked: Limits) -> Result<bool> {
    check_runs(sandbox)?;
    let plan = sandbox.look(|record| Plan::of_pod(record, asked))?;
    let before = sandbox.look(|record| (record.memory_bytes, record.cpus.count));
    begin(sandbox).await?;
    let updated = async {
        plan.grow(sandbox).await?;
        sandbox.update(|record| record.limits = limits_after(record, asked)).await
    };
    if let Err(error) = updated.await {
        undo(sandbox, before).await;
        return Err(error);
    }
    if !plan.lowers {
        quota::allow(sandbox).await;
    }
    Ok(plan.lowers)
}

/// Returns the limits of a pod after an update. A memory limit above the microVM's room, which is
/// accepted while all containers have limits, is lowered to the room. Kept as asked, it would block
/// lifting a container's limit later, since the pod would then need more memory than it can have.
fn limits_after(record: &Record, asked: Limits) -> Limits {
    let limits = record.limits.changed_by(asked);
    Limits { memory_bytes: limits.memory_bytes.min(most(record)), ..limits }
}

impl Plan {
    /// Plans an update of the limits of the pod itself. Those of its containers stay.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a microVM that is to have more cannot have as much memory.
    fn of_pod(record: &Record, asked: Limits) -> Result<Self> {
        let limits = record.limits.changed_by(asked);
        let unchanged = Limits::default();
        let before = Sums::of(record, NO_CONTAINER, unchanged);
        let after = Sums::within(record, limits, NO_CONTAINER, unchanged);
        if after.memory > before.memory {
            fits(limits, most(record))?;
        }
        Ok(Self::between(record, &before, &after, asked))
    }
}

#[cfg(test)]
mod tests {
    use super::super::surplus::spare;
    use super::*;
    use crate::adopt::tests::{added_of, record_of};
    use crate::record::{Added, Cpus, MemoryBounds};

    const MIB: u64 = 1 << 20;

    fn memory(mib: u64) -> Limits {
        Limits { memory_bytes: mib * MIB, ..Limits::default() }
    }

    /// Makes the record of a pod of 192 MiB, with room for 448 and for 4 CPUs, whose own limit is
    /// 64 MiB, and a container for each limit in MiB; 0 is none.
    fn pod(limits_mib: &[u64]) -> Record {
        let added = |mib: &u64| {
            let limits = memory(*mib);
            Added { limits, ..added_of("c", SandboxState::Running) }
        };
        Record {
            pod: true,
            memory_bytes: 192 * MIB,
            memory: MemoryBounds::new(192 * MIB, 448 * MIB),
            cpus: Cpus { count: 1, boot: 0, max: 4, chosen: 0 },
            limits: memory(64),
            added: limits_mib.iter().map(added).collect(),
            ..record_of(SandboxState::Running)
        }
    }

    /// Returns what an update gives a microVM in MiB, and whether it lowers the limits.
    fn planned(record: &Record, asked: Limits) -> (u64, bool) {
        let plan = Plan::of_pod(record, asked).unwrap();
        (plan.memory.unwrap_or(0) / MIB, plan.lowers)
    }

    #[test]
    fn a_microvm_has_the_size_for_the_pods_limit_if_a_container_has_none() {
        assert_eq!(planned(&pod(&[0]), memory(200)), (328, false));
        assert_eq!(planned(&pod(&[]), memory(200)), (328, false), "containers may come");
        assert_eq!(planned(&pod(&[32, 0]), memory(448)), (448, false), "the room is its end");
        assert_eq!(planned(&pod(&[100, 0]), memory(90)), (0, false), "one has more already");
        assert_eq!(planned(&pod(&[0]), memory(32)), (0, true));
        assert_eq!(planned(&pod(&[0]), memory(64)), (0, false), "the same again");
    }

    #[test]
    fn the_limits_of_containers_that_all_have_some_decide_alone() {
        assert_eq!(planned(&pod(&[64, 32]), memory(300)), (0, false));
        assert_eq!(planned(&pod(&[64, 32]), memory(1)), (0, false));
        // Of no use to such containers, and of no harm.
        assert_eq!(planned(&pod(&[64]), memory(9000)), (0, false));
        let large = Record { limits: limits_after(&pod(&[64]), memory(9000)), ..pod(&[64]) };
        let lifted = Limits { memory_bytes: u64::MAX, ..Limits::default() };
        assert_eq!(Plan::new(&large, "c", lifted).unwrap().memory, Some(448 * MIB));
        assert_eq!(limits_after(&large, lifted), Limits::default());
        let mut record = pod(&[64]);
        (record.memory_bytes, record.limits) = (448 * MIB, memory(300));
        assert_eq!(spare(&record), Some(192 * MIB), "kubelet tells the pod's limit later");
        record.added[0].limits = Limits::default();
        assert_eq!(spare(&record), Some(428 * MIB));
    }

    #[test]
    fn a_limit_beyond_the_room_is_refused_with_its_size() {
        let refused = Plan::of_pod(&pod(&[0]), memory(449)).unwrap_err().to_string();
        assert!(refused.contains("449 MiB is more than the 448 MiB"), "{refused}");
        let fixed = Record { memory: MemoryBounds::new(192 * MIB, 192 * MIB), ..pod(&[0]) };
        let refused = Plan::of_pod(&fixed, memory(193)).unwrap_err().to_string();
        assert!(refused.contains("more than the 192 MiB") && !refused.contains('\n'), "{refused}");
        assert_eq!(planned(&fixed, memory(100)), (0, false), "without room it stays");
    }

    #[test]
    fn cpus_come_for_the_pods_quota_as_far_as_there_is_room() {
        let cpus = |quota_us| {
            let asked = Limits { cpu_quota_us: quota_us, ..Limits::default() };
            Plan::of_pod(&pod(&[0]), asked).unwrap().cpus
        };
        assert_eq!((cpus(100_000), cpus(100_001), cpus(900_000)), (None, Some(2), Some(4)));
    }
}
