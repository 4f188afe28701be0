//! A report of a measurement of memory, with the context needed to judge and repeat it.

use serde::{Deserialize, Serialize};

use self::MemoryMeasured::{Accessed, Given, Set};
use super::MemoryLoad;
use crate::duration::human;
use crate::figure::Figure;
use crate::measurement::{AnySubject, Measured, Measurement, Plan};

/// The result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryMeasured {
    /// A sandbox took memory and touched all of it, which was zeros.
    Given {
        /// Time from the request until the memory could be touched, ns.
        ready_ns: u64,
        /// Time from then until each page was written to, ns.
        touch_ns: u64,
    },
    /// A sandbox took memory and touched some of it, which was as it is to begin.
    Set {
        /// Time from the request until the memory could be touched, ns.
        ready_ns: u64,
        /// Time from then until all of these pages were written to, ns.
        touch_ns: u64,
        /// The median of the times of a page's first touch, ns.
        fault_ns: u64,
        /// The memory that the sandbox had of its own then, bytes.
        own_bytes: u64,
    },
    /// A device accessed memory.
    Accessed {
        /// The number of accesses, at least 1.
        count: u64,
        /// Time of all accesses together, ns.
        elapsed_ns: u64,
    },
}

/// A figure of memory.
type MemoryFigure = Figure<MemoryLoad, MemoryMeasured>;

/// The time from the request until memory may be touched.
pub(super) const READY: MemoryFigure = MemoryFigure::less(
    "ready",
    "from the request until memory may be touched",
    |_, measured| match *measured {
        Given { ready_ns, .. } | Set { ready_ns, .. } => Some(ready_ns as f64),
        Accessed { .. } => None,
    },
    time,
);
/// The time from then until each page was written to.
const TOUCH: MemoryFigure = MemoryFigure::less(
    "touch",
    "from then until all pages that are touched were written to",
    |_, measured| match *measured {
        Given { touch_ns, .. } | Set { touch_ns, .. } => Some(touch_ns as f64),
        Accessed { .. } => None,
    },
    time,
);
/// The time of the first touch of one page.
const FAULT: MemoryFigure = MemoryFigure::less(
    "fault",
    "the first touch of a page",
    |_, measured| match *measured {
        Set { fault_ns, .. } => Some(fault_ns as f64),
        Given { .. } | Accessed { .. } => None,
    },
    time,
);
/// The memory that sandboxes have of their own after they touched some.
const OWN: MemoryFigure = MemoryFigure::less(
    "own MiB",
    "memory of its own",
    |_, measured| match *measured {
        Set { own_bytes, .. } => Some(own_bytes as f64),
        Given { .. } | Accessed { .. } => None,
    },
    |bytes| format!("{:.2}", bytes / f64::from(1 << 20)),
);
/// The time of one access of a device.
const ACCESS: MemoryFigure = MemoryFigure::less(
    "access",
    "one access of a device",
    |_, measured| match *measured {
        Accessed { count, elapsed_ns } => Some(elapsed_ns as f64 / count.max(1) as f64),
        Given { .. } | Set { .. } => None,
    },
    time,
);

impl Measured for MemoryMeasured {
    type Load = MemoryLoad;

    const KIND: &'static str = "memory";
    const SHOWS: &'static str = "Recycled memory for sandboxes";

    fn figures(load: &MemoryLoad) -> &'static [MemoryFigure] {
        const GIVEN: &[MemoryFigure] = &[READY, TOUCH];
        const SET: &[MemoryFigure] = &[READY, TOUCH, FAULT];
        const GATE: &[MemoryFigure] = &[ACCESS];
        match load {
            MemoryLoad::Give { .. } => GIVEN,
            MemoryLoad::Set { .. } => SET,
            MemoryLoad::Gate(_) => GATE,
        }
    }

    fn further(load: &MemoryLoad) -> &'static [MemoryFigure] {
        const SET: &[MemoryFigure] = &[OWN];
        if matches!(load, MemoryLoad::Set { .. }) { SET } else { &[] }
    }

    fn is_gate(load: &MemoryLoad) -> bool {
        matches!(load, MemoryLoad::Gate(_))
    }
}

/// Memory that can be measured.
pub type MemorySubject = AnySubject<MemoryLoad, MemoryMeasured>;
/// The loads and rounds of a measurement.
pub type MemoryPlan = Plan<MemoryLoad>;
/// All results of one command, stored as JSON.
pub type MemoryReport = Measurement<MemoryLoad, MemoryMeasured>;

/// Formats a time of `ns` nanoseconds: below a microsecond with one more digit, since differences
/// of accesses are small.
fn time(ns: f64) -> String {
    if ns < 1000.0 { format!("{ns:.1} ns") } else { human(ns as u64) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::json::SavedReport;
    use crate::pictures::fair;

    /// Makes a report of subjects with these times in microseconds, round by round: of memory until
    /// it is ready, and ten times as long until it is touched, and the same number of nanoseconds
    /// for an access.
    pub(crate) fn report(loads: &[&str], subjects: &[(&str, &[u64])]) -> MemoryReport {
        MemoryReport::sample("bench memory", loads, subjects, |load, _, &us| match *load {
            MemoryLoad::Give { bytes, .. } => {
                Given { ready_ns: us * 1000, touch_ns: us * 10_000 * (bytes >> 20) }
            }
            MemoryLoad::Set { pages, .. } => Set {
                ready_ns: us * 1000,
                touch_ns: us * pages,
                fault_ns: us,
                own_bytes: pages << 12,
            },
            MemoryLoad::Gate(_) => Accessed { count: 1000, elapsed_ns: us * 1000 },
        })
    }

    #[test]
    fn figures_are_medians_and_survive_json() {
        let report = report(&["128M-4k", "gate-pin"], &[("pool", &[30, 10, 20]), ("none", &[])]);
        let [give, gate] = report.plan.loads[..] else { panic!("two loads") };
        let of = |load, name, figure| report.over_rounds(load, name, figure);
        let ready = of(&give, "pool", &READY).unwrap();
        assert_eq!((ready.median, ready.range), (20_000.0, (10_000.0, 30_000.0)));
        assert_eq!(of(&gate, "pool", &ACCESS).unwrap().median, 20.0);
        assert_eq!(of(&gate, "pool", &TOUCH), None);
        assert_eq!(of(&give, "none", &READY), None);
        assert_eq!(MemoryReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(MemoryReport::from_json("{}").is_err());
    }

    #[test]
    fn a_report_of_an_earlier_version_is_read() {
        let text = r#"{"format":1,"environment":{"machine":"","kernel":"","accelerator":"none",
            "version":"","commit":null},"command":"bench memory",
            "plan":{"loads":["128M-4k","gate-pin"],"rounds":1,"gate_rounds":6},
            "subjects":[{"name":"pool","about":""}],
            "runs":[{"subject":"pool","load":"128M-4k","round":0,
                "measured":{"given":{"ready_ns":3,"touch_ns":4}}}],
            "faults":[],"left_out":[{"subject":"new","load":"gate-pin","reason":"none"}]}"#;
        let report = MemoryReport::from_json(text).unwrap();
        assert_eq!((report.plan.gate_rounds, report.plan.times), (Some(6), None));
        assert_eq!(report.left_out[0].load, "gate-pin");
        assert_eq!(report.over_rounds(&report.plan.loads[0], "pool", &TOUCH).unwrap().median, 4.0);
    }

    #[test]
    fn every_subject_is_drawn() {
        let drawn = report(&["128M-2m", "gate-word"], &[("new", &[4]), ("<pool>", &[8])]);
        let text = drawn.picture("a & b").unwrap();
        fair(&text).unwrap();
        for part in ["new", "&lt;pool&gt;", "a &amp; b", "128M-2m", "8.00 µs", "8.0 ns"] {
            assert!(text.contains(part), "{part}");
        }
        assert_eq!(text.matches("less is better").count(), 3);
        assert!(report(&["gate-pin"], &[]).picture("x").is_err(), "nothing was measured");
    }
}
