//! Draws a report of control groups.

use anyhow::Result;

use super::{CgroupFigures, CgroupLoad, CgroupReport};
use crate::groups::{Group, Shown, groups, time};

/// Draws `report`: for each load the time for all groups and the 99th percentile of a request, with
/// a bar for each subject.
///
/// # Errors
/// If nothing was measured.
pub fn cgroup_plot(report: &CgroupReport, title: &str) -> Result<String> {
    let of_load = |load: &CgroupLoad| {
        let CgroupLoad { groups, threads } = *load;
        Group::of_load(
            format!("{groups} groups by {threads} threads"),
            &report.subjects,
            |one| report.figures(load, one),
            [("all", all), ("p99 of a request", tail)],
        )
    };
    groups(title, report.plan.loads.iter().flat_map(of_load))
}

fn all(figures: &CgroupFigures) -> Option<Shown> {
    Some(time(figures.total_ns, figures.range_ns))
}

fn tail(figures: &CgroupFigures) -> Option<Shown> {
    Some(time(figures.p99_ns, figures.p99_range_ns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::report::tests::report;
    use crate::svg::tests::well_formed;

    #[test]
    fn every_subject_is_drawn() {
        let text = cgroup_plot(&report(&[("pool", &[4]), ("<create>", &[8])]), "a & b").unwrap();
        well_formed(&text).unwrap();
        for part in ["pool", "&lt;create&gt;", "a &amp; b", "2000 groups by 50", "8.00 ms"] {
            assert!(text.contains(part), "{part}");
        }
        assert_eq!(text.matches("less is better").count(), 2);
        assert!(cgroup_plot(&report(&[]), "x").is_err());
    }
}
