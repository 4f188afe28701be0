//! A report of a measurement of VMMs, with the context needed to judge and repeat it.

use serde::{Deserialize, Serialize};

use super::VmmLoad;
use crate::figure::{Figure, mib, time};
use crate::measurement::{AnySubject, Measured, Measurement, Plan};
use crate::statistics::percentile;
use crate::turns::Described;

/// The result of a turn: one start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmmMeasured {
    /// Time from before the process was made to the guest's byte, ns; of a fork with functions,
    /// until it has its disks.
    pub byte_ns: u64,
    /// Time from the signal that kills the VMM until nothing is left of its process, ns.
    pub end_ns: u64,
    /// Private dirty memory of the process, guest memory left out, in bytes. `None` if the VM is
    /// in no process of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub private_bytes: Option<u64>,
    /// Processor time until then, ns: of the process, and of a fork's driver, pool and plane.
    /// `None` if the VM is in no process of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_ns: Option<u64>,
    /// Time that KVM took for the memory slots, ns. `None` if that was not seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot_ns: Option<u64>,
}

/// A figure of VMMs.
type VmmFigure = Figure<VmmLoad, VmmMeasured>;

/// The time to the guest's byte, ns.
pub(super) const BYTE: VmmFigure = VmmFigure::less(
    "byte",
    "from start to the guest's first byte",
    |_, turn| Some(turn.byte_ns as f64),
    time,
);
/// The processor time until the guest's byte, ns, if the subject has a process.
pub(super) const CPU: VmmFigure = VmmFigure::less(
    "CPU time",
    "processor time until then",
    |_, turn| Some(turn.cpu_ns? as f64),
    time,
);
/// The private memory in bytes, if the subject has a process.
pub(super) const PRIVATE: VmmFigure = VmmFigure::less(
    "memory",
    "private memory of the process, guest memory left out",
    |_, turn| Some(turn.private_bytes? as f64),
    mib,
);
/// The time to the end of the process, ns.
pub(super) const END: VmmFigure =
    VmmFigure::less("end", "the end", |_, turn| Some(turn.end_ns as f64), time);
/// KVM's own time for the memory slots, ns, if that was seen.
const SLOT: VmmFigure =
    VmmFigure::less("slots", "memory slots", |_, turn| Some(turn.slot_ns? as f64), time);

impl Measured for VmmMeasured {
    type Load = VmmLoad;

    const KIND: &'static str = "VMMs";
    const SHOWS: &'static str = "VMMs, from start to a guest's first byte";
    const TURN: &'static str = "start";

    fn figures(_: &VmmLoad) -> &'static [VmmFigure] {
        const COMPARED: &[VmmFigure] = &[BYTE, CPU, PRIVATE];
        COMPARED
    }
}

/// A VMM that can be measured.
pub type VmmSubject = AnySubject<VmmLoad, VmmMeasured>;
/// The loads and rounds of a measurement.
pub type VmmPlan = Plan<VmmLoad>;
/// All results of one command, stored as JSON.
pub type VmmReport = Measurement<VmmLoad, VmmMeasured>;

impl VmmReport {
    /// Returns the 90th percentile over the rounds of the time to the guest's byte, ns.
    pub(super) fn p90_ns(&self, load: &VmmLoad, subject: &str) -> u64 {
        let mut times: Vec<u64> = self.turns(load, subject).map(|turn| turn.byte_ns).collect();
        times.sort_unstable();
        percentile(&times, 90)
    }

    /// Returns the median of KVM's own time for a guest's memory slots, ns, or `None` if no subject
    /// saw it.
    pub(super) fn slot_ns(&self, load: &VmmLoad) -> Option<f64> {
        let seen = |one: &Described| self.over_rounds(load, &one.name, &SLOT);
        self.subjects.iter().find_map(seen).map(|one| one.median)
    }
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
        let of = |subject, figure| report.over_rounds(&load, subject, figure);
        let median = |subject, figure| of(subject, figure).map(|one| one.median);
        let byte = of("native", &BYTE).unwrap();
        assert_eq!((byte.median, byte.range), (20e6, (10e6, 30e6)));
        assert_eq!(report.p90_ns(&load, "native"), 30_000_000);
        assert_eq!(median("native", &PRIVATE), Some(f64::from(3 << 19)));
        assert_eq!((median("native", &CPU), median("native", &SLOT)), (Some(2.5e6), None));
        assert_eq!((median("bare", &PRIVATE), report.slot_ns(&load)), (None, Some(1e6)));
        assert_eq!(of("none", &BYTE), None);
        assert_eq!(VmmReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(VmmReport::from_json("{}").is_err());
    }
}
