//! Draws a report of idle control groups.

use anyhow::Result;

use super::report::percent;
use super::{IdleFigures, IdleLoad, IdleReport};
use crate::groups::{Group, Shown, groups};

/// Draws `report`: for each load the part of the processors' time that is not idle, and the part
/// that a program which never sleeps loses, with a bar for each subject.
///
/// # Errors
/// If nothing was measured.
pub fn idle_plot(report: &IdleReport, title: &str) -> Result<String> {
    let of_load = |load: &IdleLoad| {
        let IdleLoad { groups, wakes } = *load;
        Group::of_load(
            format!("{groups} groups, {wakes} wakes of each in a second"),
            &report.subjects,
            |one| report.figures(load, one),
            [("processors not idle", busy), ("lost to a program that never sleeps", lost)],
        )
    };
    groups(title, report.plan.loads.iter().flat_map(of_load))
}

fn busy(figures: &IdleFigures) -> Option<Shown> {
    Some((figures.busy, figures.busy_range, percent(figures.busy)))
}

fn lost(figures: &IdleFigures) -> Option<Shown> {
    Some((figures.lost, figures.lost_range, percent(figures.lost)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::idle::report::tests::report;
    use crate::pictures::fair;

    #[test]
    fn every_subject_is_drawn() {
        let text = idle_plot(&report(&[("one", &[4]), ("<each>", &[8])]), "a & b").unwrap();
        fair(&text).unwrap();
        for part in ["one", "&lt;each&gt;", "a &amp; b", "2000 groups, 10 wakes", "8.00 %"] {
            assert!(text.contains(part), "{part}");
        }
        assert_eq!(text.matches("less is better").count(), 2);
        assert!(idle_plot(&report(&[]), "x").is_err());
    }
}
