//! Draws a report of functions, as RunD-V's figures 16 to 18.

use std::collections::BTreeSet;

use anyhow::Result;

use super::{FunctionFigures, FunctionLoad, FunctionReport};
use crate::duration::human;
use crate::panels::{CurvePoint, Label, Panel, panels};

/// A figure that a panel shows: its name, its labels, its value and the range of that.
type Shown = (&'static str, Label, fn(&FunctionFigures) -> (f64, (f64, f64)));

const SHOWN: [Shown; 4] = [
    ("median latency", |ns| human(ns as u64), |one| (one.p50_ns, one.p50_range_ns)),
    ("memory of the VMMs, MiB", number, |one| {
        // In MiB already, so that the marks of the axis are round.
        let range = one.vmm_range_bytes;
        (mib(one.vmm_bytes), (mib(range.0), mib(range.1)))
    }),
    ("sandboxes made", number, |one| (one.sandboxes_made, one.sandboxes_range)),
    ("replicas made", number, |one| (one.replicas_made, one.replicas_range)),
];

fn mib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 20)
}

/// Formats a mark of an axis that counts. Marks below one are tenths and more.
fn number(value: f64) -> String {
    let whole = (value - value.round()).abs() < 1e-6;
    if whole { format!("{value:.0}") } else { format!("{value:.1}") }
}

/// A number of loads, and its name.
type Axis = (&'static str, fn(&FunctionLoad) -> u32);

const SANDBOXES: Axis = ("sandboxes there", |load| load.sandboxes);
const REQUESTS: Axis = ("requests at once", |load| load.requests);

/// Draws `report`: latency, memory, and what was made, over the sandboxes that were there for each
/// number of requests, and over the requests for each number of sandboxes, as far as there are
/// several; a curve for each subject.
///
/// # Errors
/// If nothing was measured.
pub fn function_plot(report: &FunctionReport, title: &str) -> Result<String> {
    let mut all = over(report, SANDBOXES, REQUESTS, 2);
    all.extend(over(report, REQUESTS, SANDBOXES, 2));
    if all.is_empty() {
        all = over(report, REQUESTS, SANDBOXES, 1);
    }
    let subjects: Vec<&str> = report.subjects.iter().map(|one| one.name.as_str()).collect();
    panels(title, &subjects, &all)
}

/// Returns panels over `axis` for each value of the other number that `least` loads or more have.
fn over(report: &FunctionReport, axis: Axis, other: Axis, least: usize) -> Vec<Panel> {
    let values: BTreeSet<u32> = report.plan.loads.iter().map(other.1).collect();
    let mut all = Vec::new();
    for value in values {
        let with = report.plan.loads.iter().filter(|load| (other.1)(load) == value);
        let mut loads: Vec<FunctionLoad> = with.copied().collect();
        loads.sort_by_key(axis.1);
        loads.dedup();
        if loads.len() >= least {
            let what = format!("{value} {}", other.0);
            all.extend(SHOWN.iter().map(|shown| panel(report, &loads, shown, axis, &what)));
        }
    }
    all.retain(|panel| panel.lines.iter().any(|(_, points)| !points.is_empty()));
    all
}

fn panel(
    report: &FunctionReport,
    loads: &[FunctionLoad],
    (name, label, value): &Shown,
    (below, grows): Axis,
    what: &str,
) -> Panel {
    let lines = report.subjects.iter().enumerate().map(|(subject, described)| {
        let point = |load: &FunctionLoad| {
            let figures = report.figures(load, &described.name)?;
            let (value, range) = value(&figures);
            Some(CurvePoint { at: f64::from(grows(load)), value, range })
        };
        (subject, loads.iter().filter_map(point).collect())
    });
    let tick = |load: &FunctionLoad| (f64::from(grows(load)), grows(load).to_string());
    Panel {
        title: format!("{name}, {what}"),
        more_is_better: false,
        below,
        label: *label,
        ticks: loads.iter().map(tick).collect(),
        lines: lines.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::function::report::tests::report;
    use crate::pictures::{elements, is_round, sound};

    #[test]
    fn curves_are_over_sandboxes_and_over_requests() {
        let loads = ["s1-q24", "s4-q24", "s4-q8"];
        let report = report(&loads, &[("both", &[4]), ("<horizontal>", &[8])]);
        let text = function_plot(&report, "a & b").unwrap();
        sound(&text).unwrap();
        let parts = [
            "median latency, 24 requests at once",
            "replicas made, 4 sandboxes there",
            "&lt;horizontal&gt;",
            "a &amp; b",
        ];
        for part in parts {
            assert!(text.contains(part), "{part}");
        }
        assert!(!text.contains("1 sandboxes there"), "one point is no curve");
        // Axes that count have round marks, also that of memory.
        let marks = elements(&text).into_iter().filter(|one| one.get("text-anchor") == "end");
        assert!(marks.clone().all(|one| is_round(&one.text)), "{text}");
        assert!(marks.clone().any(|one| one.text == "100"), "100 MiB are a mark");
    }

    #[test]
    fn a_single_load_is_drawn_and_nothing_is_not() {
        let text = function_plot(&report(&["s1-q2"], &[("both", &[4])]), "x").unwrap();
        assert!(text.contains("sandboxes made, 1 sandboxes there"), "{text}");
        assert!(function_plot(&report(&["s1-q2"], &[("both", &[])]), "x").is_err());
    }
}
