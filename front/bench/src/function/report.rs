//! A report of a measurement of functions, with the context needed to judge and repeat it.

use serde::{Deserialize, Serialize};

use super::FunctionLoad;
use crate::measurement::{AnySubject, Measured, Measurement, Plan, Run};
use crate::statistics::{median, range};

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

impl Measured for FunctionMeasured {
    type Load = FunctionLoad;

    const KIND: &'static str = "functions";
}

/// A way to scale that can be measured.
pub type FunctionSubject = AnySubject<FunctionLoad, FunctionMeasured>;
/// The loads and rounds of a measurement.
pub type FunctionPlan = Plan<FunctionLoad>;
/// One turn of one subject.
pub type FunctionRun = Run<FunctionLoad, FunctionMeasured>;
/// All results of one command, stored as JSON.
pub type FunctionReport = Measurement<FunctionLoad, FunctionMeasured>;

/// Medians over the rounds of one subject with one load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FunctionFigures {
    /// Median of the rounds' medians of a request, ns.
    pub p50_ns: f64,
    /// The least and the greatest of the rounds' medians, ns.
    pub p50_range_ns: (f64, f64),
    /// Median of the rounds' 99th percentiles of a request, ns.
    pub p99_ns: f64,
    /// Median of the times until the last answer, ns.
    pub max_ns: f64,
    /// Median of the replicas that were begun.
    pub replicas_made: f64,
    /// The least and the greatest of the rounds' replicas.
    pub replicas_range: (f64, f64),
    /// Median of the sandboxes that were begun.
    pub sandboxes_made: f64,
    /// The least and the greatest of the rounds' sandboxes.
    pub sandboxes_range: (f64, f64),
    /// Median of the memory of VMMs, bytes.
    pub vmm_bytes: f64,
    /// The least and the greatest of the rounds' memory of VMMs, bytes.
    pub vmm_range_bytes: (f64, f64),
    /// Median of the host's memory, bytes.
    pub host_bytes: f64,
}

impl FunctionReport {
    /// Returns medians over the rounds, or `None` if there was no turn.
    pub fn figures(&self, load: &FunctionLoad, subject: &str) -> Option<FunctionFigures> {
        let all = |part: fn(&FunctionMeasured) -> u64| -> Vec<f64> {
            self.turns(load, subject).map(|one| part(one) as f64).collect()
        };
        let middle = |part: fn(&FunctionMeasured) -> u64| median(all(part));
        let medians = all(|one| one.p50_ns);
        (!medians.is_empty()).then(|| FunctionFigures {
            p50_range_ns: range(&medians),
            p50_ns: median(medians),
            p99_ns: middle(|one| one.p99_ns),
            max_ns: middle(|one| one.max_ns),
            replicas_made: middle(|one| one.replicas_made),
            replicas_range: range(&all(|one| one.replicas_made)),
            sandboxes_made: middle(|one| one.sandboxes_made),
            sandboxes_range: range(&all(|one| one.sandboxes_made)),
            vmm_bytes: middle(|one| one.vmm_bytes),
            vmm_range_bytes: range(&all(|one| one.vmm_bytes)),
            host_bytes: middle(|one| one.host_bytes),
        })
    }
}

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
        let both = report.figures(&load, "both").unwrap();
        assert_eq!((both.p50_ns, both.p50_range_ns), (20e6, (10e6, 30e6)));
        assert_eq!((both.p99_ns, both.max_ns), (40e6, 60e6));
        assert_eq!((both.replicas_made, both.sandboxes_made), (7.0, 2.0));
        assert_eq!(report.figures(&load, "none"), None);
        assert_eq!(FunctionReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(FunctionReport::from_json("{}").is_err());
    }
}
