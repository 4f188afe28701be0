//! Draws a report of packets.

use anyhow::Result;

use super::{PacketLoad, PacketReport};
use crate::duration::rate;
use crate::groups::{Bar, Group, groups};

/// Draws `report`, with a row for each subject of each load, with a bar for its frames per second.
///
/// # Errors
/// If nothing was measured.
pub fn packet_plot(report: &PacketReport, title: &str) -> Result<String> {
    let group = |load: &PacketLoad| Group {
        name: format!("{load}: frames delivered a second"),
        more_is_better: true,
        bars: bars(report, load),
    };
    let all = report.plan.loads.iter().map(group).filter(|group| !group.bars.is_empty());
    groups(title, &all.collect::<Vec<_>>())
}

fn bars(report: &PacketReport, load: &PacketLoad) -> Vec<Bar> {
    let bar = |(subject, name): (usize, &String)| {
        let figures = report.figures(load, name)?;
        let (frames, bits) = (rate(figures.delivered, "pps"), rate(figures.bits, "bit/s"));
        Some(Bar {
            subject,
            name: name.clone(),
            length: figures.delivered,
            range: figures.range,
            text: format!("{frames}, {bits}"),
        })
    };
    report.subjects.iter().map(|one| &one.name).enumerate().filter_map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::report::tests::report;
    use crate::svg::tests::well_formed;

    #[test]
    fn every_subject_is_drawn() {
        let text =
            packet_plot(&report(&[("link", &[4_000_000]), ("<switch>", &[1])]), "a & b").unwrap();
        well_formed(&text).unwrap();
        for name in ["link", "&lt;switch&gt;", "a &amp; b", "64b-p2", "4.00 Mpps"] {
            assert!(text.contains(name), "{name}");
        }
        assert!(packet_plot(&report(&[]), "x").is_err());
    }
}
