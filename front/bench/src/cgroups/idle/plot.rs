//! Draws a report of idle control groups.

use anyhow::Result;

use super::report::percent;
use super::{IdleFigures, IdleLoad, IdleReport};
use crate::groups::{Group, groups};

/// Draws `report`: for each load the part of the processors' time that is not idle, and the part
/// that a program which never sleeps loses, with a bar for each subject.
///
/// # Errors
/// If nothing was measured.
pub fn idle_plot(report: &IdleReport, title: &str) -> Result<String> {
    let of_load = |load: &IdleLoad| {
        let IdleLoad { groups, wakes } = *load;
        let what = format!("{groups} groups, {wakes} wakes of each in a second");
        [
            group(report, load, format!("{what}: processors not idle"), |one| {
                (one.busy, one.busy_range)
            }),
            group(report, load, format!("{what}: lost to a program that never sleeps"), |one| {
                (one.lost, one.lost_range)
            }),
        ]
    };
    groups(title, report.plan.loads.iter().flat_map(of_load))
}

fn group(
    report: &IdleReport,
    load: &IdleLoad,
    name: String,
    shown: fn(&IdleFigures) -> (f64, (f64, f64)),
) -> Group {
    Group::of(name, false, &report.subjects, |one| {
        let (part, range) = shown(&report.figures(load, one)?);
        Some((part, range, percent(part)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::idle::report::tests::report;
    use crate::svg::tests::well_formed;

    #[test]
    fn every_subject_is_drawn() {
        let text = idle_plot(&report(&[("one", &[4]), ("<each>", &[8])]), "a & b").unwrap();
        well_formed(&text).unwrap();
        for part in ["one", "&lt;each&gt;", "a &amp; b", "2000 groups, 10 wakes", "8.00 %"] {
            assert!(text.contains(part), "{part}");
        }
        assert_eq!(text.matches("less is better").count(), 2);
        assert!(idle_plot(&report(&[]), "x").is_err());
    }
}
