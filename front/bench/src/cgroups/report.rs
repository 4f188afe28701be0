//! A report of a measurement of control groups, with the context needed to judge and repeat it.

use serde::{Deserialize, Serialize};

use super::CgroupLoad;
use super::subjects::CgroupMeasured;
use crate::figure::{Figure, time};
use crate::measurement::{AnySubject, Measured, Measurement, Plan};

/// A figure of control groups.
type CgroupFigure = Figure<CgroupLoad, CgroupMeasured>;

/// The time for all groups, ns.
const ALL: CgroupFigure =
    CgroupFigure::less("all", "all", |_, turn| Some(turn.total_ns as f64), time);
/// The 99th percentile of a request, ns.
const P99: CgroupFigure =
    CgroupFigure::less("p99", "p99 of a request", |_, turn| Some(turn.p99_ns as f64), time);
/// The median of a request, ns.
const P50: CgroupFigure =
    CgroupFigure::less("p50", "p50 of a request", |_, turn| Some(turn.p50_ns as f64), time);
/// The CPU time to fill the pool, ns.
const REFILL: CgroupFigure =
    CgroupFigure::less("refill", "refill", |_, turn| Some(turn.refill_ns? as f64), time);

impl Measured for CgroupMeasured {
    type Load = CgroupLoad;

    const KIND: &'static str = "control groups";
    const SHOWS: &'static str = "Control groups, from request to a process inside";

    fn figures(_: &CgroupLoad) -> &'static [CgroupFigure] {
        const COMPARED: &[CgroupFigure] = &[ALL, P99];
        COMPARED
    }

    fn further(_: &CgroupLoad) -> &'static [CgroupFigure] {
        const FURTHER: &[CgroupFigure] = &[P50, REFILL];
        FURTHER
    }

    fn title(load: &CgroupLoad) -> String {
        format!("{} groups by {} threads", load.groups, load.threads)
    }
}

/// A way to a group that can be measured.
pub type CgroupSubject = AnySubject<CgroupLoad, CgroupMeasured>;
/// The loads and rounds of a measurement.
pub type CgroupPlan = Plan<CgroupLoad>;
/// All results of one command, stored as JSON.
pub type CgroupReport = Measurement<CgroupLoad, CgroupMeasured, CgroupExtra>;

/// Facts about the host that reports of control groups alone have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupExtra {
    /// `true` if the host favoured moves of processes by others when the measurement began. `None`
    /// in earlier reports, and if the host's mounts could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub favours_moves: Option<bool>,
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
        let of = |subject, figure| report.over_rounds(&load, subject, figure);
        let all = of("create", &ALL).unwrap();
        assert_eq!((all.median, all.range), (20e6, (10e6, 30e6)));
        assert_eq!(of("create", &P50).unwrap().median, 20e3);
        assert_eq!(of("create", &P99).unwrap().range, (100e3, 300e3));
        assert_eq!(of("pool", &REFILL).unwrap().median, 1e6);
        assert_eq!((of("create", &REFILL), of("none", &ALL)), (None, None));
        assert_eq!(CgroupReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(CgroupReport::from_json("{}").is_err());
    }

    #[test]
    fn whether_the_host_favours_moves_survives_json() {
        let mut report = report(&[("create", &[30])]);
        assert!(!report.to_json().unwrap().contains("favours_moves"));
        report.extra.favours_moves = Some(true);
        let text = report.to_json().unwrap();
        assert!(text.contains("\"favours_moves\":true"), "{text}");
        assert_eq!(CgroupReport::from_json(&text).unwrap(), report);
    }
}
