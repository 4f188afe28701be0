//! Draws a report of packets.

use anyhow::Result;

use super::{PacketLoad, PacketReport};
use crate::groups::{Bar, groups};

/// Draws `report`, with a row for each subject of each load, with a bar for its frames per second.
///
/// # Errors
/// If nothing was measured.
pub fn packet_plot(report: &PacketReport, title: &str) -> Result<String> {
    let loads = report.plan.loads.iter();
    groups(title, &loads.map(|load| (load.to_string(), bars(report, load))).collect::<Vec<_>>())
}

fn bars(report: &PacketReport, load: &PacketLoad) -> Vec<Bar> {
    let bar = |(colour, name): (usize, &String)| {
        let figures = report.figures(load, name)?;
        let (mpps, gbits) = (figures.delivered / 1e6, figures.bits / 1e9);
        let text = format!("{mpps:.2} Mpps, {gbits:.1} Gbit/s");
        Some(Bar { colour, name: name.clone(), length: figures.delivered, text })
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
