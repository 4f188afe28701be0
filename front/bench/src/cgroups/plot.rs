//! Draws a report of control groups.

use anyhow::Result;

use super::{CgroupFigures, CgroupLoad, CgroupReport};
use crate::duration::human;
use crate::groups::{Group, groups};

/// Draws `report`: for each load the time for all groups and the 99th percentile of a request, with
/// a bar for each subject.
///
/// # Errors
/// If nothing was measured.
pub fn cgroup_plot(report: &CgroupReport, title: &str) -> Result<String> {
    let of_load = |load: &CgroupLoad| {
        let CgroupLoad { groups, threads } = *load;
        let what = format!("{groups} groups by {threads} threads");
        [
            group(report, load, format!("{what}: all"), |one| (one.total_ns, one.range_ns)),
            group(report, load, format!("{what}: p99 of a request"), |one| {
                (one.p99_ns, one.p99_range_ns)
            }),
        ]
    };
    groups(title, report.plan.loads.iter().flat_map(of_load))
}

fn group(
    report: &CgroupReport,
    load: &CgroupLoad,
    name: String,
    shown: fn(&CgroupFigures) -> (u64, (u64, u64)),
) -> Group {
    Group::of(name, false, &report.subjects, |one| {
        let (ns, (least, most)) = shown(&report.figures(load, one)?);
        Some((ns as f64, (least as f64, most as f64), human(ns)))
    })
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
