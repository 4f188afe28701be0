//! A report of a measurement of roots, with the context needed to judge and repeat it.

use serde::{Deserialize, Serialize};

use super::{DiskUse, RootLoad};
use crate::measurement::{AnySubject, Measured, Measurement, Plan, Run};
use crate::statistics::{median, range};

/// The result of a turn: each owner has read from its root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootMeasured {
    /// Median over the owners of the time from the common start until each had read, ns.
    pub p50_ns: u64,
    /// 99th percentile of that, ns.
    pub p99_ns: u64,
    /// The time until the last owner had read, ns.
    pub most_ns: u64,
    /// Median of the time from when a thread began with a request until its owner had read, ns.
    pub service_p50_ns: u64,
    /// 99th percentile of that, ns.
    pub service_p99_ns: u64,
    /// Processors' time of the process from the common start until the last owner had read, ns.
    pub cpu_ns: u64,
    /// Processors' time before, for what was made ahead, and after, for the removal, ns.
    pub other_cpu_ns: u64,
    /// Use of the disk of image and template between the common start and the last read. `None` if
    /// there are no counters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskUse>,
}

impl Measured for RootMeasured {
    type Load = RootLoad;

    const KIND: &'static str = "roots";
}

/// A way to a root that can be measured.
pub type RootSubject = AnySubject<RootLoad, RootMeasured>;
/// The loads and rounds of a measurement.
pub type RootPlan = Plan<RootLoad>;
/// One turn of one subject.
pub type RootRun = Run<RootLoad, RootMeasured>;
/// All results of one command, stored as JSON.
pub type RootReport = Measurement<RootLoad, RootMeasured>;

/// Medians over the rounds of one subject with one load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RootFigures {
    /// Median over the owners, ns.
    pub p50_ns: f64,
    /// The least and the greatest of the rounds' medians, ns.
    pub p50_range_ns: (f64, f64),
    /// 99th percentile over the owners, ns.
    pub p99_ns: f64,
    /// The least and the greatest of the rounds' 99th percentiles, ns.
    pub p99_range_ns: (f64, f64),
    /// The time until the last owner had read, ns.
    pub most_ns: f64,
    /// 99th percentile of the time that a request was worked on, ns.
    pub service_p99_ns: f64,
    /// Processors' time of one root from the request on, ns.
    pub cpu_ns: f64,
    /// Processors' time of one root ahead of the request and for its removal, ns.
    pub other_cpu_ns: f64,
    /// Requests of the disk per second, if they were counted.
    pub iops: Option<f64>,
    /// Bytes of the disk per second, if they were counted.
    pub bytes_per_second: Option<f64>,
}

impl RootReport {
    /// Returns medians over the rounds, or `None` if there was no turn.
    pub fn figures(&self, load: &RootLoad, subject: &str) -> Option<RootFigures> {
        let turns: Vec<RootMeasured> = self.turns(load, subject).copied().collect();
        let all = |value: fn(&RootMeasured) -> u64| -> Vec<f64> {
            turns.iter().map(|one| value(one) as f64).collect()
        };
        let rate = |value: fn(DiskUse) -> Option<u64>| -> Option<f64> {
            let rate = |one: &RootMeasured| {
                Some(value(one.disk?)? as f64 * 1e9 / one.most_ns.max(1) as f64)
            };
            let rates: Vec<f64> = turns.iter().filter_map(rate).collect();
            (!rates.is_empty()).then(|| median(rates))
        };
        let (middles, tails) = (all(|one| one.p50_ns), all(|one| one.p99_ns));
        let each = |values: Vec<f64>| median(values) / f64::from(load.owners.max(1));
        (!turns.is_empty()).then(|| RootFigures {
            p50_range_ns: range(&middles),
            p99_range_ns: range(&tails),
            p50_ns: median(middles),
            p99_ns: median(tails),
            most_ns: median(all(|one| one.most_ns)),
            service_p99_ns: median(all(|one| one.service_p99_ns)),
            cpu_ns: each(all(|one| one.cpu_ns)),
            other_cpu_ns: each(all(|one| one.other_cpu_ns)),
            iops: rate(|disk| disk.requests),
            bytes_per_second: rate(|disk| Some(disk.bytes)),
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::json::SavedReport;

    /// Makes a report of subjects with these 99th percentiles in milliseconds, round by round. The
    /// disk does 1 request of 4 KiB in a millisecond.
    pub(crate) fn report(subjects: &[(&str, &[u64])]) -> RootReport {
        RootReport::sample("bench roots", &["n200-a2"], subjects, |_, _, ms| {
            let ns = ms * 1_000_000;
            RootMeasured {
                p50_ns: ns / 2,
                p99_ns: ns,
                most_ns: 2 * ns,
                service_p50_ns: 1_000,
                service_p99_ns: 2_000,
                cpu_ns: 20_000_000,
                other_cpu_ns: 0,
                disk: Some(DiskUse { requests: Some(2 * ms), bytes: 8192 * ms }),
            }
        })
    }

    #[test]
    fn figures_are_medians_and_survive_json() {
        let mut report = report(&[("made", &[30, 10, 20]), ("floor", &[2]), ("none", &[])]);
        let load = report.plan.loads[0];
        let made = report.figures(&load, "made").unwrap();
        assert_eq!((made.p50_ns, made.p99_ns, made.most_ns), (10e6, 20e6, 40e6));
        assert_eq!((made.p50_range_ns, made.p99_range_ns), ((5e6, 15e6), (10e6, 30e6)));
        assert_eq!((made.service_p99_ns, made.cpu_ns, made.other_cpu_ns), (2e3, 1e5, 0.0));
        assert_eq!((made.iops, made.bytes_per_second), (Some(1e3), Some(4096e3)));
        assert_eq!(report.figures(&load, "none"), None);
        assert_eq!(RootReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        report.runs.iter_mut().for_each(|run| run.measured.disk = None);
        let floor = report.figures(&load, "floor").unwrap();
        assert_eq!((floor.p99_ns, floor.iops, floor.bytes_per_second), (2e6, None, None));
        assert_eq!(RootReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(RootReport::from_json("{}").is_err());
    }
}
