//! Draws a report of roots.

use anyhow::Result;

use super::{RootFigures, RootLoad, RootReport};
use crate::duration::human;
use crate::groups::{Group, Shown, groups};

/// Draws `report`: for each load the median and the 99th percentile of the time from the request to
/// the second read, with a bar for each subject.
///
/// # Errors
/// If nothing was measured.
pub fn root_plot(report: &RootReport, title: &str) -> Result<String> {
    let of_load = |load: &RootLoad| {
        let figures = |one: &str| report.figures(load, one);
        Group::of_load(
            load,
            &report.subjects,
            figures,
            [("p50 of a root", median), ("p99 of a root", tail)],
        )
    };
    groups(title, report.plan.loads.iter().flat_map(of_load))
}

fn median(figures: &RootFigures) -> Option<Shown> {
    let RootFigures { p50_ns, p50_range_ns, .. } = *figures;
    Some((p50_ns, p50_range_ns, human(p50_ns as u64)))
}

fn tail(figures: &RootFigures) -> Option<Shown> {
    let RootFigures { p99_ns, p99_range_ns, cpu_ns, .. } = *figures;
    let text = format!("{}, CPU {}", human(p99_ns as u64), human(cpu_ns as u64));
    Some((p99_ns, p99_range_ns, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pictures::fair;
    use crate::roots::report::tests::report;

    #[test]
    fn every_subject_is_drawn() {
        let text = root_plot(&report(&[("made", &[4]), ("<floor>", &[8])]), "a & b").unwrap();
        fair(&text).unwrap();
        for part in ["made", "&lt;floor&gt;", "a &amp; b", "n200-a2", "8.00 ms, CPU 100 µs"] {
            assert!(text.contains(part), "{part}");
        }
        assert_eq!(text.matches("less is better").count(), 2);
        assert!(root_plot(&report(&[]), "x").is_err());
    }
}
