//! A report of a measurement of idle control groups, with the context needed to judge and repeat
//! it.

use super::{IdleLoad, IdleMeasured};
use crate::measurement::{AnySubject, Measured, Measurement, Plan, Run};
use crate::statistics::{median, range};

impl Measured for IdleMeasured {
    type Load = IdleLoad;

    const KIND: &'static str = "idle control groups";
}

/// Groups that can be measured.
pub type IdleSubject = AnySubject<IdleLoad, IdleMeasured>;
/// The loads and rounds of a measurement.
pub type IdlePlan = Plan<IdleLoad>;
/// One turn of one subject.
pub type IdleRun = Run<IdleLoad, IdleMeasured>;
/// All results of one command, stored as JSON.
pub type IdleReport = Measurement<IdleLoad, IdleMeasured>;

/// Medians over the rounds of one subject with one load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IdleFigures {
    /// The part of the processors' time in which they were not idle, 0 to 1.
    pub busy: f64,
    /// The least and the greatest of the rounds.
    pub busy_range: (f64, f64),
    /// The part of its time that a program which never sleeps lost, 0 to 1.
    pub lost: f64,
    /// The least and the greatest of the rounds.
    pub lost_range: (f64, f64),
    /// The median of its interruptions, ns.
    pub p50_ns: f64,
    /// The 99th percentile of its interruptions, ns.
    pub p99_ns: f64,
    /// Wakes of all processes together in a second.
    pub woken: f64,
}

impl IdleReport {
    /// Returns medians over the rounds, or `None` if there was no turn.
    pub fn figures(&self, load: &IdleLoad, subject: &str) -> Option<IdleFigures> {
        let all = |part: fn(&IdleMeasured) -> f64| -> Vec<f64> {
            self.turns(load, subject).map(part).collect()
        };
        let busy = all(|one| part_of(one.busy_ns, one.window_ns, one.processors));
        let lost = all(|one| part_of(one.lost_ns, one.window_ns, 1));
        (!busy.is_empty()).then(|| IdleFigures {
            busy_range: range(&busy),
            lost_range: range(&lost),
            busy: median(busy),
            lost: median(lost),
            p50_ns: median(all(|one| one.p50_ns as f64)),
            p99_ns: median(all(|one| one.p99_ns as f64)),
            woken: median(all(|one| one.woken_in_1000s as f64)) / 1000.0,
        })
    }
}

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
        let each = report.figures(&load, "each").unwrap();
        assert_eq!((each.busy, each.busy_range), (0.02, (0.01, 0.03)));
        assert_eq!((each.lost, each.lost_range), (0.01, (0.005, 0.015)));
        assert_eq!((each.p50_ns, each.p99_ns, each.woken), (2_000.0, 4_000.0, 20_000.0));
        assert_eq!(report.figures(&load, "none"), None);
        assert_eq!(percent(each.busy), "2.00 %");
        let one = report.runs[0].measured;
        assert_eq!(one.each_second(one.busy_ns), 60_000_000);
        assert_eq!(IdleReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(IdleReport::from_json("{}").is_err());
    }
}
