//! Draws a report of attachments.

use anyhow::Result;

use super::{AttachFigures, AttachLoad, AttachReport};
use crate::duration::human;
use crate::groups::{Group, Shown, groups};

/// Draws `report`: for each load the time until all owners had their VFs and the time of one owner,
/// with a bar for each subject.
///
/// # Errors
/// If nothing was measured.
pub fn attach_plot(report: &AttachReport, title: &str) -> Result<String> {
    let of_load = |load: &AttachLoad| {
        let figures = |one: &str| report.figures(load, one);
        Group::of_load(
            load,
            &report.subjects,
            figures,
            [("until the last owner has its VF", all), ("until one owner has its VF, p50", one)],
        )
    };
    groups(title, report.plan.loads.iter().flat_map(of_load))
}

fn all(figures: &AttachFigures) -> Option<Shown> {
    Some((figures.all_ns, figures.range_ns, human(figures.all_ns as u64)))
}

fn one(figures: &AttachFigures) -> Option<Shown> {
    let AttachFigures { p50_ns, p99_ns, .. } = *figures;
    let text = format!("{}, p99 {}", human(p50_ns as u64), human(p99_ns as u64));
    Some((p50_ns, (p50_ns, p99_ns), text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::report::tests::report;
    use crate::svg::tests::well_formed;

    #[test]
    fn every_subject_is_drawn() {
        let text = attach_plot(&report(&[("pool", &[4]), ("<one>", &[8])]), "a & b").unwrap();
        well_formed(&text).unwrap();
        for part in ["pool", "&lt;one&gt;", "a &amp; b", "n200-1024k-100ms", "8.00 ms"] {
            assert!(text.contains(part), "{part}");
        }
        assert_eq!(text.matches("less is better").count(), 2);
        assert!(attach_plot(&report(&[]), "x").is_err());
    }
}
