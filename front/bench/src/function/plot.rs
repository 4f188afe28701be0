//! Draws a report of functions, as RunD-V's figures 16 to 18.

use anyhow::Result;

use super::report::{P50, REPLICAS_MADE, SANDBOXES_MADE, VMMS};
use super::{FunctionLoad, FunctionMeasured, FunctionReport};
use crate::curves::{Axis, over};
use crate::figure::Figure;
use crate::panels::panels;

/// The figures that panels show.
const SHOWN: [Figure<FunctionLoad, FunctionMeasured>; 4] =
    [P50, VMMS, SANDBOXES_MADE, REPLICAS_MADE];

const SANDBOXES: Axis<FunctionLoad> = Axis {
    name: "sandboxes there",
    of: |load| load.sandboxes.into(),
    words: |count| format!("{count} sandboxes there"),
};
const REQUESTS: Axis<FunctionLoad> = Axis {
    name: "requests at once",
    of: |load| load.requests.into(),
    words: |count| format!("{count} requests at once"),
};

/// Draws `report`: latency, memory, and what was made, over the sandboxes that were there for each
/// number of requests, and over the requests for each number of sandboxes, as far as there are
/// several; a curve for each subject.
///
/// # Errors
/// If nothing was measured.
pub fn function_plot(report: &FunctionReport, title: &str) -> Result<String> {
    let loads = &report.plan.loads;
    let mut all = over(loads, &SANDBOXES, &REQUESTS, 2);
    all.extend(over(loads, &REQUESTS, &SANDBOXES, 2));
    if all.is_empty() {
        all = over(loads, &REQUESTS, &SANDBOXES, 1);
    }
    let shown =
        all.iter().flat_map(|over| SHOWN.iter().filter_map(move |one| report.panel(over, one)));
    let subjects: Vec<&str> = report.subjects.iter().map(|one| one.name.as_str()).collect();
    panels(title, &subjects, &shown.collect::<Vec<_>>())
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
