//! The sums of the limits of a pod's containers, for which its microVM has the size.

use crate::record::{Limits, Record};

/// The memory that a pod's guest has beside its containers' limits, bytes: for its kernel and its
/// agent. containerd's shim makes pods with as much.
pub const OVERHEAD: u64 = 128 << 20;

/// The sums of the limits of a pod's live containers. If one of them has no limit, the sum is at
/// least the limit of the pod itself: such containers share that.
pub struct Sums {
    /// The limits of memory and the huge pages, bytes, without those of containers that have memory
    /// of their own.
    pub memory: u64,
    /// The huge pages among that, bytes.
    pub huge: u64,
    /// The CPU time in each period, microseconds.
    pub quota_us: u64,
    /// Set if a container has no limit of memory.
    is_open: bool,
}

impl Sums {
    /// Adds up the limits, those of the container `name` as `asked` changes them. With an empty
    /// `name`, which no container has, adds them up as they are.
    pub fn of(record: &Record, name: &str, asked: Limits) -> Self {
        Self::within(record, record.limits, name, asked)
    }

    /// Adds up the limits as [`Sums::of`] does, as if the pod itself had the limits `of_pod`.
    pub fn within(record: &Record, of_pod: Limits, name: &str, asked: Limits) -> Self {
        let live = record.added.iter().filter(|one| one.state.is_live());
        let all = live.map(|one| match one.name == name {
            true => one.limits.changed_by(asked),
            false => one.limits,
        });
        let all: Vec<Limits> = all.collect();
        // Memory that is bound to a container is none of what the others share.
        let live = record.added.iter().filter(|one| one.state.is_live());
        let sharing = live.zip(&all).filter(|(one, _)| one.region.is_none());
        let sharing: Vec<Limits> = sharing.map(|(_, limits)| *limits).collect();
        let huge = all.iter().fold(0, |sum: u64, one| sum.saturating_add(one.huge_bytes()));
        Self {
            memory: sum(&sharing, |one| one.memory_bytes, of_pod).saturating_add(huge),
            huge,
            quota_us: sum(&all, |one| one.cpu_quota_us, of_pod),
            is_open: sharing.iter().any(|one| one.memory_bytes == 0),
        }
    }

    /// Returns the memory that the limits need with the guest's kernel, bytes. A container without
    /// one may use what the pod began with, `boot` bytes: huge pages are beside that.
    pub fn needed(&self, boot: u64) -> u64 {
        let limited = self.memory.saturating_add(OVERHEAD);
        match self.is_open {
            true => limited.max(boot.saturating_add(self.huge)),
            false => limited,
        }
    }
}

/// Returns the sum of a limit of containers, or that of their pod if it is more and there is no
/// container, or one without the limit. 0 stands for no limit.
fn sum(all: &[Limits], limit: fn(&Limits) -> u64, of_pod: Limits) -> u64 {
    let total = all.iter().map(limit).fold(0, u64::saturating_add);
    match !all.is_empty() && all.iter().all(|one| limit(one) > 0) {
        true => total,
        false => total.max(limit(&of_pod)),
    }
}
