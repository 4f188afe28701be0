//! A report of a measurement of VMMs, with the context needed to judge and repeat it.

use serde::{Deserialize, Serialize};

use super::VmmLoad;
use crate::measurement::{AnySubject, Measured, Measurement, Plan, Run};
use crate::statistics::percentile;

/// The result of a turn: one start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmmMeasured {
    /// Time from before the process was made to the guest's byte, ns.
    pub byte_ns: u64,
    /// Time from the signal that kills the VMM until nothing is left of its process, ns.
    pub end_ns: u64,
    /// Private dirty memory of the process, guest memory left out, in bytes. `None` if the VM is
    /// in no process of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub private_bytes: Option<u64>,
    /// Processor time until the guest's byte, ns: of the process, and of a fork's driver and pool.
    /// `None` if the VM is in no process of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_ns: Option<u64>,
    /// Time that KVM took for the memory slots, ns. `None` if that was not seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot_ns: Option<u64>,
}

impl Measured for VmmMeasured {
    type Load = VmmLoad;

    const KIND: &'static str = "VMMs";
}

/// A VMM that can be measured.
pub type VmmSubject = AnySubject<VmmLoad, VmmMeasured>;
/// The loads and rounds of a measurement.
pub type VmmPlan = Plan<VmmLoad>;
/// One turn of one subject.
pub type VmmRun = Run<VmmLoad, VmmMeasured>;
/// All results of one command, stored as JSON.
pub type VmmReport = Measurement<VmmLoad, VmmMeasured>;

/// Percentiles over the rounds of one subject with one load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmmFigures {
    /// Median of the time to the guest's byte, ns.
    pub p50_ns: u64,
    /// 90th percentile of that time, ns.
    pub p90_ns: u64,
    /// The least and the greatest of that time, ns.
    pub range_ns: (u64, u64),
    /// Median of the time to the end of the process, ns.
    pub end_ns: u64,
    /// Median of the private memory in bytes, if the subject has a process.
    pub private_bytes: Option<u64>,
    /// The least and the greatest of the rounds' private memory in bytes; zeros without any.
    pub private_range: (u64, u64),
    /// Median of the processor time until the guest's byte, ns, if the subject has a process.
    pub cpu_ns: Option<u64>,
    /// The least and the greatest of the rounds' processor time, ns; zeros without any.
    pub cpu_range_ns: (u64, u64),
    /// Median of KVM's own time for the memory slots, ns, if that was seen.
    pub slot_ns: Option<u64>,
}

impl VmmReport {
    /// Returns percentiles over the rounds, or `None` if there was no turn.
    pub fn figures(&self, load: &VmmLoad, subject: &str) -> Option<VmmFigures> {
        let turns = self.turns(load, subject);
        let times = sorted(turns.clone().map(|one| one.byte_ns));
        Some(VmmFigures {
            p50_ns: percentile(&times, 50),
            p90_ns: percentile(&times, 90),
            range_ns: (*times.first()?, *times.last()?),
            end_ns: percentile(&sorted(turns.clone().map(|one| one.end_ns)), 50),
            private_bytes: median(turns.clone().filter_map(|one| one.private_bytes)),
            private_range: ends(turns.clone().filter_map(|one| one.private_bytes)),
            cpu_ns: median(turns.clone().filter_map(|one| one.cpu_ns)),
            cpu_range_ns: ends(turns.clone().filter_map(|one| one.cpu_ns)),
            slot_ns: median(turns.filter_map(|one| one.slot_ns)),
        })
    }

    /// Returns the median of KVM's own time for a guest's memory slots, ns, or `None` if no subject
    /// saw it.
    pub fn slot_ns(&self, load: &VmmLoad) -> Option<u64> {
        self.subjects.iter().find_map(|subject| self.figures(load, &subject.name)?.slot_ns)
    }
}

fn sorted(values: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values
}

/// Returns the least and the greatest of `values`; zeros for no values.
fn ends(values: impl Iterator<Item = u64> + Clone) -> (u64, u64) {
    (values.clone().min().unwrap_or(0), values.max().unwrap_or(0))
}

fn median(values: impl Iterator<Item = u64>) -> Option<u64> {
    Some(sorted(values)).filter(|values| !values.is_empty()).map(|values| percentile(&values, 50))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::json::SavedReport;

    /// Makes a report of subjects with these times in milliseconds, round by round. A subject
    /// called `bare` has slots of 1 ms and no process.
    pub(crate) fn report(subjects: &[(&str, &[u64])]) -> VmmReport {
        VmmReport::sample("bench vmm", &["128M"], subjects, |_, (name, _), ms| {
            let is_bare = name == "bare";
            VmmMeasured {
                byte_ns: ms * 1_000_000,
                end_ns: 500_000,
                private_bytes: (!is_bare).then_some(3 << 19),
                cpu_ns: (!is_bare).then_some(2_500_000),
                slot_ns: is_bare.then_some(1_000_000),
            }
        })
    }

    #[test]
    fn figures_are_percentiles_and_survive_json() {
        let report = report(&[("native", &[30, 10, 20]), ("bare", &[5]), ("none", &[])]);
        let load = report.plan.loads[0];
        let native = report.figures(&load, "native").unwrap();
        assert_eq!((native.p50_ns, native.p90_ns), (20_000_000, 30_000_000));
        assert_eq!(native.range_ns, (10_000_000, 30_000_000));
        assert_eq!((native.private_bytes, native.slot_ns), (Some(3 << 19), None));
        assert_eq!(native.cpu_ns, Some(2_500_000));
        assert_eq!((native.private_range, native.cpu_range_ns.1), ((3 << 19, 3 << 19), 2_500_000));
        let bare = report.figures(&load, "bare").unwrap();
        assert_eq!((bare.private_bytes, report.slot_ns(&load)), (None, Some(1_000_000)));
        assert_eq!(report.figures(&load, "none"), None);
        assert_eq!(VmmReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(VmmReport::from_json("{}").is_err());
    }
}
