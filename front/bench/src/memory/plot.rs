//! Draws a report of memory.

use anyhow::Result;

use super::table::time;
use super::{MemoryLoad, MemoryReport, Quantity};
use crate::groups::{Group, groups};

/// Draws `report`: for each load and each time that is measured with it a bar for each subject.
///
/// # Errors
/// If nothing was measured.
pub fn memory_plot(report: &MemoryReport, title: &str) -> Result<String> {
    let of_load =
        |load| Quantity::of(load).iter().map(move |quantity| group(report, load, *quantity));
    groups(title, report.plan.loads.iter().flat_map(of_load))
}

fn group(report: &MemoryReport, load: &MemoryLoad, quantity: Quantity) -> Group {
    let what = match quantity {
        Quantity::Ready => "from the request until memory may be touched",
        Quantity::Touch => "from then until all pages that are touched were written to",
        Quantity::Fault => "the first touch of a page",
        Quantity::Access => "one access of a device",
    };
    Group::of(format!("{load}: {what}"), false, &report.subjects, |subject| {
        let figures = report.figures(load, subject, quantity)?;
        Some((figures.median_ns, figures.range_ns, time(figures.median_ns)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::report::tests::report;
    use crate::pictures::fair;

    #[test]
    fn every_subject_is_drawn() {
        let report = report(&["128M-2m", "gate-word"], &[("new", &[4]), ("<pool>", &[8])]);
        let text = memory_plot(&report, "a & b").unwrap();
        fair(&text).unwrap();
        for part in ["new", "&lt;pool&gt;", "a &amp; b", "128M-2m", "8.00 µs", "8.0 ns"] {
            assert!(text.contains(part), "{part}");
        }
        assert_eq!(text.matches("less is better").count(), 3);
    }

    #[test]
    fn nothing_measured_is_an_error() {
        assert!(memory_plot(&report(&["gate-pin"], &[]), "x").is_err());
    }
}
