//! Draws a report of control groups.

use anyhow::Result;

use super::paper::creation_ns;
use super::{CgroupFigures, CgroupLoad, CgroupReport};
use crate::duration::human;
use crate::groups::{Group, Shown, groups, time};

/// Draws `report`: for each load the time for all groups and the 99th percentile of a request, with
/// a bar for each subject, and RunD-V's times for creation where it has that load.
///
/// # Errors
/// If nothing was measured.
pub fn cgroup_plot(report: &CgroupReport, title: &str) -> Result<String> {
    let of_load = |load: &CgroupLoad| {
        let CgroupLoad { groups, threads } = *load;
        let name = format!("{groups} groups by {threads} threads");
        let [all, tail] = Group::of_load(
            &name,
            &report.subjects,
            |one| report.figures(load, one),
            [("all", all), ("p99 of a request", tail)],
        );
        [all, tail, of_paper(report, load, &name)]
    };
    groups(title, report.plan.loads.iter().flat_map(of_load))
}

/// Returns bars for the subjects that were measured and are in the paper.
fn of_paper(report: &CgroupReport, load: &CgroupLoad, name: &str) -> Group {
    let name = format!("{name}: creation of all in RunD-V's paper (section VI.B)");
    Group::of(name, false, &report.subjects, |one| {
        report.figures(load, one)?;
        let ns = creation_ns(one, load)?;
        Some((ns, (ns, ns), human(ns as u64)))
    })
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
    use crate::pictures::fair;

    #[test]
    fn every_subject_is_drawn() {
        let text = cgroup_plot(&report(&[("pool", &[4]), ("<create>", &[8])]), "a & b").unwrap();
        fair(&text).unwrap();
        for part in ["pool", "&lt;create&gt;", "a &amp; b", "2000 groups by 50", "8.00 ms"] {
            assert!(text.contains(part), "{part}");
        }
        assert_eq!(text.matches("less is better").count(), 2);
        assert!(!text.contains("paper"), "{text}");
        let text = cgroup_plot(&report(&[("mkdir", &[4]), ("take", &[8])]), "x").unwrap();
        assert_eq!(text.matches("less is better").count(), 3);
        assert!(text.contains("RunD-V&apos;s paper") && text.contains("100 ms"), "{text}");
        assert!(cgroup_plot(&report(&[]), "x").is_err());
    }
}
