//! Draws a report of functions, as RunD-V's figures 16 to 18.

use std::collections::BTreeSet;

use anyhow::Result;

use super::report::{P50, REPLICAS_MADE, SANDBOXES_MADE, VMMS};
use super::{FunctionLoad, FunctionMeasured, FunctionReport};
use crate::figure::Figure;
use crate::panels::{CurvePoint, Panel, panels};

/// The figures that panels show.
const SHOWN: [Figure<FunctionLoad, FunctionMeasured>; 4] =
    [P50, VMMS, SANDBOXES_MADE, REPLICAS_MADE];

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
    figure: &Figure<FunctionLoad, FunctionMeasured>,
    (below, grows): Axis,
    what: &str,
) -> Panel {
    let lines = report.subjects.iter().enumerate().map(|(subject, described)| {
        let point = |load: &FunctionLoad| {
            let one = report.over_rounds(load, &described.name, figure)?;
            Some(CurvePoint { at: f64::from(grows(load)), value: one.median, range: one.range })
        };
        (subject, loads.iter().filter_map(point).collect())
    });
    let tick = |load: &FunctionLoad| (f64::from(grows(load)), grows(load).to_string());
    Panel {
        title: format!("{}, {what}", figure.about),
        more_is_better: figure.more_is_better,
        below,
        label: figure.text,
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
