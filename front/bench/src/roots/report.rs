//! A report of a measurement of roots, with the context needed to judge and repeat it.

use serde::{Deserialize, Serialize};

use super::{DiskUse, RootLoad};
use crate::duration::rate;
use crate::figure::{Figure, time};
use crate::measurement::{AnySubject, Measured, Measurement, Plan};

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

/// A figure of roots.
type RootFigure = Figure<RootLoad, RootMeasured>;

/// The 99th percentile over the owners, ns.
pub(super) const P99: RootFigure = RootFigure {
    beside: &[RootFigure { text: |ns| format!("CPU {}", time(ns)), ..CPU }],
    ..RootFigure::less("p99", "p99 of a root", |_, turn| Some(turn.p99_ns as f64), time)
};
/// Processors' time of one root from the request on, ns.
const CPU: RootFigure = RootFigure::less(
    "CPU each",
    "processor time",
    |load, turn| Some(each(turn.cpu_ns, load)),
    time,
);

/// Returns the part of one of the owners of a load.
fn each(ns: u64, load: &RootLoad) -> f64 {
    ns as f64 / f64::from(load.owners.max(1))
}

/// Returns a number for each second until the last owner had read.
fn each_second(count: u64, turn: &RootMeasured) -> f64 {
    count as f64 * 1e9 / turn.most_ns.max(1) as f64
}

impl Measured for RootMeasured {
    type Load = RootLoad;

    const KIND: &'static str = "roots";
    const SHOWS: &'static str = "Roots for many owners at once, until image and layer are read";

    fn figures(_: &RootLoad) -> &'static [RootFigure] {
        const P50: RootFigure =
            RootFigure::less("p50", "p50 of a root", |_, turn| Some(turn.p50_ns as f64), time);
        const COMPARED: &[RootFigure] = &[P50, P99];
        COMPARED
    }

    fn further(_: &RootLoad) -> &'static [RootFigure] {
        const FURTHER: &[RootFigure] = &[
            RootFigure::less("most", "the last root", |_, turn| Some(turn.most_ns as f64), time),
            RootFigure::less(
                "p99 of work",
                "p99 of the work on a root",
                |_, turn| Some(turn.service_p99_ns as f64),
                time,
            ),
            CPU,
            RootFigure::less(
                "CPU beside",
                "processor time before and after",
                |load, turn| Some(each(turn.other_cpu_ns, load)),
                time,
            ),
            RootFigure::less(
                "disk",
                "requests of the disk a second",
                |_, turn| Some(each_second(turn.disk?.requests?, turn)),
                |requests| rate(requests, "IOPS"),
            ),
            RootFigure::less(
                "of the disk",
                "bytes of the disk a second",
                |_, turn| Some(each_second(turn.disk?.bytes, turn)),
                |bytes| rate(bytes, "B/s"),
            ),
        ];
        FURTHER
    }
}

/// A way to a root that can be measured.
pub type RootSubject = AnySubject<RootLoad, RootMeasured>;
/// The loads and rounds of a measurement.
pub type RootPlan = Plan<RootLoad>;
/// All results of one command, stored as JSON.
pub type RootReport = Measurement<RootLoad, RootMeasured>;

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
        let of = |report: &RootReport, figure: &RootFigure| {
            report.over_rounds(&load, "made", figure).map(|one| one.median)
        };
        let p99 = report.over_rounds(&load, "made", &P99).unwrap();
        assert_eq!((p99.median, p99.range), (20e6, (10e6, 30e6)));
        let further = RootMeasured::further(&load);
        let medians: Vec<_> = further.iter().map(|one| of(&report, one).unwrap()).collect();
        assert_eq!(medians, [40e6, 2e3, 1e5, 0.0, 1e3, 4096e3]);
        assert_eq!(report.over_rounds(&load, "none", &P99), None);
        assert_eq!(RootReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        report.runs.iter_mut().for_each(|run| run.measured.disk = None);
        assert_eq!((of(&report, &P99), of(&report, &further[4])), (Some(20e6), None));
        assert_eq!(RootReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(RootReport::from_json("{}").is_err());
    }
}
