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
        [
            group(report, load, "p50 of a root", |figures| {
                (figures.p50_ns, figures.p50_range_ns, human(figures.p50_ns as u64))
            }),
            group(report, load, "p99 of a root", |figures| {
                let RootFigures { p99_ns, p99_range_ns, cpu_ns, .. } = *figures;
                let text = format!("{}, CPU {}", human(p99_ns as u64), human(cpu_ns as u64));
                (p99_ns, p99_range_ns, text)
            }),
        ]
    };
    groups(title, report.plan.loads.iter().flat_map(of_load))
}

fn group(
    report: &RootReport,
    load: &RootLoad,
    what: &str,
    shown: fn(&RootFigures) -> Shown,
) -> Group {
    let name = format!("{load}: {what}");
    Group::of(name, false, &report.subjects, |one| Some(shown(&report.figures(load, one)?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roots::report::tests::report;
    use crate::svg::tests::well_formed;

    #[test]
    fn every_subject_is_drawn() {
        let text = root_plot(&report(&[("made", &[4]), ("<floor>", &[8])]), "a & b").unwrap();
        well_formed(&text).unwrap();
        for part in ["made", "&lt;floor&gt;", "a &amp; b", "n200-a2", "8.00 ms, CPU 100 µs"] {
            assert!(text.contains(part), "{part}");
        }
        assert_eq!(text.matches("less is better").count(), 2);
        assert!(root_plot(&report(&[]), "x").is_err());
    }
}
