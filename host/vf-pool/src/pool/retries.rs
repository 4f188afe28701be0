//! Tries of VFs that failed.

use std::time::{Duration, Instant};

use super::Inner;
use crate::table::{DeviceOperation, Table};
use crate::{Device, Standing};

/// The tries of a VF that has failed: it is opened, reset and scrubbed once more in the background,
/// and returns to the pool when that succeeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retries {
    /// The pause before the first try. Each pause is twice as long as the one before it.
    pub first: Duration,
    /// The longest pause.
    pub longest: Duration,
    /// The number of tries. A VF that fails the last one stays out of the pool until it is resumed
    /// or its devset is reset, and is tried as often then.
    pub most: u32,
}

impl Retries {
    /// No tries at all.
    pub const NONE: Self = Self { first: Duration::ZERO, longest: Duration::ZERO, most: 0 };

    /// Returns the pause before the next try of a VF that had so many, or `None` after the last.
    fn pause(self, tries: u32) -> Option<Duration> {
        let factor = 1_u32.checked_shl(tries).unwrap_or(u32::MAX);
        let pause = self.first.saturating_mul(factor).min(self.longest);
        (tries < self.most).then_some(pause)
    }
}

impl<D: Device> Inner<D> {
    /// Plans the next try of a VF, if it has failed and is to be tried again.
    pub(super) fn plan_try(&self, vf: u32) {
        let retries = self.settings.retries;
        let pause = |tries| retries.pause(tries);
        let planned = self.shelf.table().plan_try(vf, Instant::now(), pause);
        if let Some(at) = planned {
            self.queue.plan_try(vf, at);
        }
    }

    /// Makes a change to a VF in the table, and queues the job that `change` returns. Before the
    /// job, takes the VF off the owner that has it from an earlier process, if it was adopted too
    /// late. A VF that is opened again is not drained any more for the next process, either.
    pub(super) fn end_adoption(
        &self,
        vf: u32,
        change: impl FnOnce(&mut Table) -> Option<DeviceOperation>,
    ) {
        // Under one lock: the adoption may end at any time, and a VF that fails after the look but
        // before the change would be closed or opened as if it were the owner's still.
        let (had_owner, job) = {
            let mut table = self.shelf.table();
            (table.end_adoption(vf), change(&mut table))
        };
        if had_owner {
            self.shelf.detach(vf);
        }
        if had_owner || matches!(job, Some(DeviceOperation::Open(_))) {
            self.note(vf, Some(Standing::Returning));
        }
        self.queue.push(job);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let (first, longest) = (Duration::from_secs(1), Duration::from_secs(6));
        let retries = Retries { first, longest, most: 50 };
        let seconds: Vec<_> = (0..5).map(|tries| retries.pause(tries).unwrap().as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 6, 6]);
        assert_eq!((retries.pause(49), retries.pause(50)), (Some(longest), None));
        assert_eq!(Retries::NONE.pause(0), None);
    }
}
