//! A report of a measurement of attachments, with the context needed to judge and repeat it.

use serde::{Deserialize, Serialize};

use super::AttachLoad;
use crate::figure::{Figure, time};
use crate::measurement::{AnySubject, Measured, Measurement, Plan};

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

/// A figure of attachments.
type AttachFigure = Figure<AttachLoad, AttachMeasured>;

/// The time until the last owner had its VF, ns.
pub(super) const ALL: AttachFigure = AttachFigure::less(
    "all attached",
    "until the last owner has its VF",
    |_, turn| Some(turn.all_ns as f64),
    time,
);
/// The median over the owners, ns.
const P50: AttachFigure = AttachFigure {
    beside: &[AttachFigure { text: |ns| format!("p99 {}", time(ns)), ..P99 }],
    ..AttachFigure::less(
        "p50 of one",
        "until one owner has its VF, p50",
        |_, turn| Some(turn.p50_ns as f64),
        time,
    )
};
const P99: AttachFigure =
    AttachFigure::less("p99 of one", "p99 of one", |_, turn| Some(turn.p99_ns as f64), time);
/// The time until all VFs were ready again, ns, if there is a pool.
const REFILL: AttachFigure =
    AttachFigure::less("refill", "refill", |_, turn| Some(turn.refill_ns? as f64), time);

impl Measured for AttachMeasured {
    type Load = AttachLoad;

    const KIND: &'static str = "attachments";
    const SHOWS: &'static str = "Virtual functions for many owners at once, hollow devices";

    fn figures(_: &AttachLoad) -> &'static [AttachFigure] {
        const COMPARED: &[AttachFigure] = &[ALL, P50];
        COMPARED
    }

    fn further(_: &AttachLoad) -> &'static [AttachFigure] {
        const CPU: AttachFigure =
            AttachFigure::less("CPU", "processor time", |_, turn| Some(turn.cpu_ns as f64), time);
        const FURTHER: &[AttachFigure] = &[P99, CPU, REFILL];
        FURTHER
    }
}

/// A way to a VF that can be measured.
pub type AttachSubject = AnySubject<AttachLoad, AttachMeasured>;
/// The loads and rounds of a measurement.
pub type AttachPlan = Plan<AttachLoad>;
/// All results of one command, stored as JSON.
pub type AttachReport = Measurement<AttachLoad, AttachMeasured>;

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
        let of = |subject, figure| report.over_rounds(&load, subject, figure);
        let all = of("pool", &ALL).unwrap();
        assert_eq!((all.median, all.range), (20e6, (10e6, 30e6)));
        assert_eq!(of("pool", &P50).unwrap().range, (5e6, 15e6));
        assert_eq!(of("pool", &REFILL).unwrap().median, 50e6);
        assert_eq!((of("one-lock", &REFILL), of("none", &ALL)), (None, None));
        assert_eq!(AttachReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(AttachReport::from_json("{}").is_err());
    }
}
