//! A report of a measurement of idle control groups, with the context needed to judge and repeat
//! it.

use super::{IdleLoad, IdleMeasured};
use crate::figure::{Figure, time};
use crate::measurement::{AnySubject, Measured, Measurement, Plan};

/// A figure of idle control groups.
type IdleFigure = Figure<IdleLoad, IdleMeasured>;

/// The part of the processors' time in which they were not idle, 0 to 1.
pub(super) const BUSY: IdleFigure = IdleFigure::less(
    "busy",
    "processors not idle",
    |_, turn| Some(part_of(turn.busy_ns, turn.window_ns, turn.processors)),
    percent,
);
/// The part of its time that a program which never sleeps lost, 0 to 1.
pub(super) const LOST: IdleFigure = IdleFigure::less(
    "lost",
    "lost to a program that never sleeps",
    |_, turn| Some(part_of(turn.lost_ns, turn.window_ns, 1)),
    percent,
);
/// The median of its interruptions, ns.
pub(super) const P50: IdleFigure =
    IdleFigure::less("p50", "median interruption", |_, turn| Some(turn.p50_ns as f64), time);
/// The 99th percentile of its interruptions, ns.
pub(super) const P99: IdleFigure =
    IdleFigure::less("p99", "p99 of an interruption", |_, turn| Some(turn.p99_ns as f64), time);
/// Wakes of all processes together in a second.
pub(super) const WOKEN: IdleFigure = IdleFigure::more(
    "woken",
    "wakes a second",
    |_, turn| Some(turn.woken_in_1000s as f64 / 1000.0),
    |wakes| format!("{wakes:.0}"),
);

impl Measured for IdleMeasured {
    type Load = IdleLoad;

    const KIND: &'static str = "idle control groups";
    const SHOWS: &'static str = "Control groups whose processes sleep, and what they cost the host";

    fn figures(_: &IdleLoad) -> &'static [IdleFigure] {
        const COMPARED: &[IdleFigure] = &[BUSY, LOST];
        COMPARED
    }

    fn title(load: &IdleLoad) -> String {
        format!("{} groups, {} wakes of each in a second", load.groups, load.wakes)
    }
}

/// Groups that can be measured.
pub type IdleSubject = AnySubject<IdleLoad, IdleMeasured>;
/// The loads and rounds of a measurement.
pub type IdlePlan = Plan<IdleLoad>;
/// All results of one command, stored as JSON.
pub type IdleReport = Measurement<IdleLoad, IdleMeasured>;

/// Returns which part a time is of that of some processors.
fn part_of(ns: u64, window_ns: u64, processors: u32) -> f64 {
    ns as f64 / (window_ns.max(1) as f64 * f64::from(processors.max(1)))
}

/// Formats a part as percent.
pub(super) fn percent(part: f64) -> String {
    format!("{:.2} %", part * 100.0)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::json::SavedReport;

    /// Makes a report of subjects that kept two processors busy for these parts of a second of
    /// both, in percent, round by round. A program lost half of that.
    pub(crate) fn report(subjects: &[(&str, &[u64])]) -> IdleReport {
        IdleReport::sample("bench cgroups --idle", &["2000-w10"], subjects, |_, _, percent| {
            IdleMeasured {
                processors: 2,
                window_ns: 2_000_000_000,
                busy_ns: percent * 40_000_000,
                woken_in_1000s: 20_000_000,
                lost_ns: percent * 10_000_000,
                p50_ns: percent * 1_000,
                p99_ns: percent * 2_000,
            }
        })
    }

    #[test]
    fn figures_are_parts_of_the_processors_and_survive_json() {
        let report = report(&[("each", &[3, 1, 2]), ("none", &[])]);
        let load = report.plan.loads[0];
        let of = |figure| report.over_rounds(&load, "each", figure).unwrap();
        assert_eq!((of(&BUSY).median, of(&BUSY).range), (0.02, (0.01, 0.03)));
        assert_eq!((of(&LOST).median, of(&LOST).range), (0.01, (0.005, 0.015)));
        assert_eq!((of(&P50).median, of(&P99).median), (2_000.0, 4_000.0));
        assert_eq!(of(&WOKEN).median, 20_000.0);
        assert_eq!(report.over_rounds(&load, "none", &BUSY), None);
        assert_eq!(percent(of(&BUSY).median), "2.00 %");
        assert_eq!(IdleReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(IdleReport::from_json("{}").is_err());
    }
}
