//! A report of a measurement of functions, with the context needed to judge and repeat it.

use serde::{Deserialize, Serialize};

use super::FunctionLoad;
use crate::figure::{Figure, time};
use crate::measurement::{AnySubject, Measured, Measurement, Plan};

/// The result of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionMeasured {
    /// Median time from a request to its answer, ns.
    pub p50_ns: u64,
    /// 99th percentile of that time, ns.
    pub p99_ns: u64,
    /// The longest time, ns.
    pub max_ns: u64,
    /// Replicas that were begun in the burst, those in new sandboxes among them.
    pub replicas_made: u64,
    /// Sandboxes that were begun in the burst.
    pub sandboxes_made: u64,
    /// PSS of the VMMs of all of the function's sandboxes after the burst, guests included, bytes.
    pub vmm_bytes: u64,
    /// Decrease of the host's available memory (`MemAvailable`) from before the function to after
    /// the burst, bytes.
    pub host_bytes: u64,
}

/// A figure of functions.
type FunctionFigure = Figure<FunctionLoad, FunctionMeasured>;

/// The median of a request, ns.
pub(super) const P50: FunctionFigure =
    FunctionFigure::less("p50", "median latency", |_, turn| Some(turn.p50_ns as f64), time);
/// The replicas that were begun.
pub(super) const REPLICAS_MADE: FunctionFigure = FunctionFigure::less(
    "replicas made",
    "replicas made",
    |_, turn| Some(turn.replicas_made as f64),
    number,
);
/// The sandboxes that were begun.
pub(super) const SANDBOXES_MADE: FunctionFigure = FunctionFigure::less(
    "sandboxes made",
    "sandboxes made",
    |_, turn| Some(turn.sandboxes_made as f64),
    number,
);
/// The memory of the VMMs. It is in MiB already, so that the marks of an axis are round.
pub(super) const VMMS: FunctionFigure = FunctionFigure::less(
    "VMMs MiB",
    "memory of the VMMs, MiB",
    |_, turn| Some(mib(turn.vmm_bytes)),
    number,
);

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Formats a number. Those that are not whole have tenths.
fn number(value: f64) -> String {
    let whole = (value - value.round()).abs() < 1e-6;
    if whole { format!("{value:.0}") } else { format!("{value:.1}") }
}

impl Measured for FunctionMeasured {
    type Load = FunctionLoad;

    const KIND: &'static str = "functions";
    const SHOWS: &'static str = "Bursts of requests to a function that scales";

    fn figures(_: &FunctionLoad) -> &'static [FunctionFigure] {
        const COMPARED: &[FunctionFigure] = &[P50];
        COMPARED
    }

    fn further(_: &FunctionLoad) -> &'static [FunctionFigure] {
        const P99: FunctionFigure =
            FunctionFigure::less("p99", "p99", |_, turn| Some(turn.p99_ns as f64), time);
        const ALL: FunctionFigure =
            FunctionFigure::less("all", "all", |_, turn| Some(turn.max_ns as f64), time);
        const HOST: FunctionFigure = FunctionFigure::less(
            "host MiB",
            "memory of the host",
            |_, turn| Some(mib(turn.host_bytes)),
            number,
        );
        const FURTHER: &[FunctionFigure] = &[P99, ALL, REPLICAS_MADE, SANDBOXES_MADE, VMMS, HOST];
        FURTHER
    }
}

/// A way to scale that can be measured.
pub type FunctionSubject = AnySubject<FunctionLoad, FunctionMeasured>;
/// The loads and rounds of a measurement.
pub type FunctionPlan = Plan<FunctionLoad>;
/// All results of one command, stored as JSON.
pub type FunctionReport = Measurement<FunctionLoad, FunctionMeasured>;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::json::SavedReport;

    /// Makes a report of subjects with these median latencies in milliseconds, round by round, with
    /// each of the loads.
    pub(crate) fn report(loads: &[&str], subjects: &[(&str, &[u64])]) -> FunctionReport {
        FunctionReport::sample("bench function", loads, subjects, |_, _, ms| FunctionMeasured {
            p50_ns: ms * 1_000_000,
            p99_ns: ms * 2_000_000,
            max_ns: ms * 3_000_000,
            replicas_made: 7,
            sandboxes_made: 2,
            vmm_bytes: 100 << 20,
            host_bytes: 120 << 20,
        })
    }

    #[test]
    fn figures_are_medians_and_survive_json() {
        let report = report(&["s4-q24"], &[("both", &[30, 10, 20]), ("none", &[])]);
        let load = report.plan.loads[0];
        let p50 = report.over_rounds(&load, "both", &P50).unwrap();
        assert_eq!((p50.median, p50.range), (20e6, (10e6, 30e6)));
        let further = FunctionMeasured::further(&load).iter();
        let medians = further.map(|one| report.over_rounds(&load, "both", one).unwrap().median);
        assert_eq!(medians.collect::<Vec<_>>(), [40e6, 60e6, 7.0, 2.0, 100.0, 120.0]);
        assert_eq!(report.over_rounds(&load, "none", &P50), None);
        assert_eq!(FunctionReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(FunctionReport::from_json("{}").is_err());
    }
}
