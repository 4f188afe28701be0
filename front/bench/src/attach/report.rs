//! A report of a measurement of attachments, with the context needed to judge and repeat it.

use serde::{Deserialize, Serialize};

use super::AttachLoad;
use crate::measurement::{AnySubject, Measured, Measurement, Plan, Run};
use crate::statistics::{median, range};

/// The result of a turn: all owners have their VFs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachMeasured {
    /// Time from the common start until the last owner had its VF, ns.
    pub all_ns: u64,
    /// Median over the owners of the time until each had its VF, ns.
    pub p50_ns: u64,
    /// 99th percentile of that, ns.
    pub p99_ns: u64,
    /// Processors' time of the process meanwhile, ns.
    pub cpu_ns: u64,
    /// Resets that VFs had meanwhile.
    pub resets: u64,
    /// Time from the return of all VFs until all were ready again, ns. `None` without a pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refill_ns: Option<u64>,
    /// Processors' time of that, ns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refill_cpu_ns: Option<u64>,
}

impl Measured for AttachMeasured {
    type Load = AttachLoad;

    const KIND: &'static str = "attachments";
}

/// A way to a VF that can be measured.
pub type AttachSubject = AnySubject<AttachLoad, AttachMeasured>;
/// The loads and rounds of a measurement.
pub type AttachPlan = Plan<AttachLoad>;
/// One turn of one subject.
pub type AttachRun = Run<AttachLoad, AttachMeasured>;
/// All results of one command, stored as JSON.
pub type AttachReport = Measurement<AttachLoad, AttachMeasured>;

/// Medians over the rounds of one subject with one load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttachFigures {
    /// Time until the last owner had its VF, ns.
    pub all_ns: f64,
    /// The least and the greatest of that time, ns.
    pub range_ns: (f64, f64),
    /// Median over the owners, ns.
    pub p50_ns: f64,
    /// The least and the greatest of the rounds' medians, ns.
    pub p50_range_ns: (f64, f64),
    /// 99th percentile over the owners, ns.
    pub p99_ns: f64,
    /// Processors' time, ns.
    pub cpu_ns: f64,
    /// Time until all VFs were ready again, ns, if there is a pool.
    pub refill_ns: Option<f64>,
}

impl AttachReport {
    /// Returns medians over the rounds, or `None` if there was no turn.
    pub fn figures(&self, load: &AttachLoad, subject: &str) -> Option<AttachFigures> {
        let turns = self.turns(load, subject);
        turns.clone().next()?;
        let all = |value: fn(&AttachMeasured) -> u64| -> Vec<f64> {
            turns.clone().map(|one| value(one) as f64).collect()
        };
        let (times, middles) = (all(|one| one.all_ns), all(|one| one.p50_ns));
        let refills: Vec<f64> =
            turns.clone().filter_map(|one| one.refill_ns).map(|ns| ns as f64).collect();
        Some(AttachFigures {
            range_ns: range(&times),
            all_ns: median(times),
            p50_range_ns: range(&middles),
            p50_ns: median(middles),
            p99_ns: median(all(|one| one.p99_ns)),
            cpu_ns: median(all(|one| one.cpu_ns)),
            refill_ns: (!refills.is_empty()).then(|| median(refills)),
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::json::SavedReport;

    /// Makes a report of subjects with these times in milliseconds, round by round. A subject
    /// called `pool` has a refill of 50 ms.
    pub(crate) fn report(subjects: &[(&str, &[u64])]) -> AttachReport {
        AttachReport::sample("bench attach", &["n200-1024k-100ms"], subjects, |_, (name, _), ms| {
            let ns = ms * 1_000_000;
            AttachMeasured {
                all_ns: ns,
                p50_ns: ns / 2,
                p99_ns: ns,
                cpu_ns: 1_000_000,
                resets: 0,
                refill_ns: (name == "pool").then_some(50_000_000),
                refill_cpu_ns: None,
            }
        })
    }

    #[test]
    fn figures_are_medians_and_survive_json() {
        let report = report(&[("pool", &[30, 10, 20]), ("one-lock", &[500]), ("none", &[])]);
        let load = report.plan.loads[0];
        let pool = report.figures(&load, "pool").unwrap();
        assert_eq!((pool.all_ns, pool.range_ns), (20e6, (10e6, 30e6)));
        assert_eq!((pool.p50_ns, pool.refill_ns), (10e6, Some(50e6)));
        assert_eq!(pool.p50_range_ns, (5e6, 15e6));
        assert_eq!(report.figures(&load, "one-lock").unwrap().refill_ns, None);
        assert_eq!(report.figures(&load, "none"), None);
        assert_eq!(AttachReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(AttachReport::from_json("{}").is_err());
    }
}
