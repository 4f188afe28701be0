//! A report of a measurement of control groups, with the context needed to judge and repeat it.

use super::CgroupLoad;
use super::subjects::CgroupMeasured;
use crate::measurement::{AnySubject, Measured, Measurement, Plan, Run};
use crate::statistics::percentile;

impl Measured for CgroupMeasured {
    type Load = CgroupLoad;

    const KIND: &'static str = "control groups";
}

/// A way to a group that can be measured.
pub type CgroupSubject = AnySubject<CgroupLoad, CgroupMeasured>;
/// The loads and rounds of a measurement.
pub type CgroupPlan = Plan<CgroupLoad>;
/// One turn of one subject.
pub type CgroupRun = Run<CgroupLoad, CgroupMeasured>;
/// All results of one command, stored as JSON.
pub type CgroupReport = Measurement<CgroupLoad, CgroupMeasured>;

/// Medians over the rounds of one subject with one load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupFigures {
    /// Median of the time for all groups, ns.
    pub total_ns: u64,
    /// The least and the greatest of that time, ns.
    pub range_ns: (u64, u64),
    /// Median of the rounds' medians of a request, ns.
    pub p50_ns: u64,
    /// Median of the rounds' 99th percentiles of a request, ns.
    pub p99_ns: u64,
    /// The least and the greatest of the rounds' 99th percentiles, ns.
    pub p99_range_ns: (u64, u64),
    /// Median of the CPU time to fill the pool, ns.
    pub refill_ns: Option<u64>,
}

impl CgroupReport {
    /// Returns medians over the rounds, or `None` if there was no turn.
    pub fn figures(&self, load: &CgroupLoad, subject: &str) -> Option<CgroupFigures> {
        let sorted = |part: fn(&CgroupMeasured) -> u64| {
            let mut values: Vec<u64> = self.turns(load, subject).map(part).collect();
            values.sort_unstable();
            values
        };
        let (totals, tails) = (sorted(|one| one.total_ns), sorted(|one| one.p99_ns));
        let refills = sorted(|one| one.refill_ns.unwrap_or(0));
        let has_pool = self.turns(load, subject).any(|one| one.refill_ns.is_some());
        Some(CgroupFigures {
            range_ns: (*totals.first()?, *totals.last()?),
            p99_range_ns: (*tails.first()?, *tails.last()?),
            total_ns: percentile(&totals, 50),
            p50_ns: percentile(&sorted(|one| one.p50_ns), 50),
            p99_ns: percentile(&tails, 50),
            refill_ns: has_pool.then(|| percentile(&refills, 50)),
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::json::SavedReport;

    /// Makes a report of subjects with these total times in milliseconds, round by round. A subject
    /// called `pool` has a refill of 1 ms.
    pub(crate) fn report(subjects: &[(&str, &[u64])]) -> CgroupReport {
        CgroupReport::sample("bench cgroups", &["2000-t50"], subjects, |_, (name, _), ms| {
            CgroupMeasured {
                total_ns: ms * 1_000_000,
                p50_ns: ms * 1_000,
                p99_ns: ms * 10_000,
                refill_ns: (name == "pool").then_some(1_000_000),
            }
        })
    }

    #[test]
    fn figures_are_medians_and_survive_json() {
        let report = report(&[("create", &[30, 10, 20]), ("pool", &[5]), ("none", &[])]);
        let load = report.plan.loads[0];
        let create = report.figures(&load, "create").unwrap();
        assert_eq!((create.total_ns, create.p50_ns, create.p99_ns), (20_000_000, 20_000, 200_000));
        assert_eq!(create.range_ns, (10_000_000, 30_000_000));
        assert_eq!((create.p99_range_ns, create.refill_ns), ((100_000, 300_000), None));
        assert_eq!(report.figures(&load, "pool").unwrap().refill_ns, Some(1_000_000));
        assert_eq!(report.figures(&load, "none"), None);
        assert_eq!(CgroupReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(CgroupReport::from_json("{}").is_err());
    }
}
