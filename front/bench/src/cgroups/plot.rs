//! Draws a report of control groups.

use anyhow::Result;

use super::paper::creation_ns;
use super::{CgroupLoad, CgroupMeasured, CgroupReport};
use crate::duration::human;
use crate::groups::{Group, groups};
use crate::measurement::Measured;

/// Draws `report`: for each load the time for all groups and the 99th percentile of a request, with
/// a bar for each subject, and RunD-V's times for creation where it has that load.
///
/// # Errors
/// If nothing was measured.
pub fn cgroup_plot(report: &CgroupReport, title: &str) -> Result<String> {
    let both = |load| report.groups(load).chain([of_paper(report, load)]);
    groups(title, report.plan.loads.iter().flat_map(both))
}

/// Returns bars for the subjects that were measured and are in the paper.
fn of_paper(report: &CgroupReport, load: &CgroupLoad) -> Group {
    let title = CgroupMeasured::title(load);
    let name = format!("{title}: creation of all in RunD-V's paper (section VI.B)");
    Group::of(name, false, &report.subjects, |one| {
        report.turns(load, one).next()?;
        let ns = creation_ns(one, load)?;
        Some((ns, (ns, ns), human(ns as u64)))
    })
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
