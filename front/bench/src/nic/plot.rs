//! Draws a report of network interfaces.

use anyhow::{Result, ensure};

use super::table::shown;
use super::{NicLoad, NicReport, paper};
use crate::duration::rate;
use crate::groups::{Group, groups};
use crate::panels::{Panel, marks, panels};

/// Draws `report`: for each load a bar for each subject, and below it the paper's bars. If all
/// loads have offered rates, it draws curves instead, as the paper's figure 3: datagrams received
/// over datagrams sent.
///
/// # Errors
/// If nothing was measured.
pub fn nic_plot(report: &NicReport, title: &str) -> Result<String> {
    let loads = &report.plan.loads;
    ensure!(!report.runs.is_empty(), "nothing was measured, so there is nothing to draw");
    if loads.iter().all(|load| load.offered > 0) {
        return curves(report, title);
    }
    let both = |load| report.groups(load).chain([of_paper(report, load)]);
    groups(title, loads.iter().flat_map(both))
}

fn curves(report: &NicReport, title: &str) -> Result<String> {
    let names: Vec<&str> = report.subjects.iter().map(|one| one.name.as_str()).collect();
    let mut kinds: Vec<NicLoad> = report.plan.loads.iter().map(|one| one.without_rate()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let panel = |load: &NicLoad| {
        let curves = names.iter().map(|name| report.curve(load, name)).enumerate();
        let lines: Vec<_> = curves.filter(|(_, points)| !points.is_empty()).collect();
        let last = lines.iter().flat_map(|(_, points)| points).map(|point| point.at);
        let last = last.fold(1.0, f64::max);
        Panel {
            title: format!("{load}: datagrams received a second"),
            more_is_better: true,
            below: "datagrams sent a second",
            label: |value| rate(value, ""),
            ticks: marks(last).map(|at| (at, rate(at, ""))).collect(),
            lines,
        }
    };
    let drawn: Vec<Panel> = kinds.iter().map(panel).collect();
    panels(title, &names, &drawn)
}

/// Returns bars for the subjects that were measured and are in the paper.
fn of_paper(report: &NicReport, load: &NicLoad) -> Group {
    let name = format!("{load}: the paper's (2013, with KVM; some of what was sent)");
    Group::of(name, true, &report.subjects, |subject| {
        report.figures(load, subject)?;
        let length = paper(subject, load)?.rate;
        Some((length, (length, length), shown(load, length)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nic::report::tests::report;
    use crate::pictures::{fair, sound};

    #[test]
    fn every_subject_is_drawn() {
        let subjects = [("base", &[4_000_000][..]), ("<csb>", &[1])];
        let text = nic_plot(&report(&["udp8-gg", "rr-gh"], &subjects), "a & b").unwrap();
        fair(&text).unwrap();
        for part in ["&lt;csb&gt;", "a &amp; b", "udp8-gg", "4.00 Mpps", "the paper", "32.0 kpps"] {
            assert!(text.contains(part), "{part}");
        }
        assert!(nic_plot(&report(&["udp8-gg"], &[]), "x").is_err());
    }

    #[test]
    fn offered_rates_are_curves() {
        let loads = ["udp18-sg-o5k", "udp18-sg-o20k"];
        let text =
            nic_plot(&report(&loads, &[("base", &[4_000]), ("csb", &[5_000])]), "x").unwrap();
        sound(&text).unwrap();
        assert!(text.contains("datagrams sent") && text.contains("10.0 k"), "{text}");
    }
}
