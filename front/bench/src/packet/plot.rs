//! Draws a report of packets.

use anyhow::Result;

use super::{Mode, PacketLoad, PacketReport};
use crate::duration::rate;
use crate::groups::{Bar, Group, groups};

/// Draws `report`: bars of its figures, and below those of e1000 functions the rates of *Speeding
/// Up Packet I/O in Virtual Machines*.
///
/// # Errors
/// If nothing was measured.
pub fn packet_plot(report: &PacketReport, title: &str) -> Result<String> {
    let paper = |load: &PacketLoad| Group {
        name: format!("{load}: the paper's frames a second (2013, guest to guest, figure 4)"),
        more_is_better: true,
        bars: paper_bars(report, load),
    };
    let both = |load| report.groups(load).chain([paper(load)]);
    groups(title, report.plan.loads.iter().flat_map(both))
}

/// Returns a bar for each way to drive an e1000 that was measured and is in the paper.
fn paper_bars(report: &PacketReport, load: &PacketLoad) -> Vec<Bar> {
    let bar = |mode: Mode| {
        let subject = report.subjects.iter().position(|one| one.name == mode.name())?;
        report.turns(load, mode.name()).next()?;
        let length = mode.paper(load)?;
        let (name, text) = (mode.name().to_owned(), rate(length, "pps"));
        Some(Bar { subject, name, length, range: (length, length), text, modelled: false })
    };
    Mode::ALL.into_iter().filter_map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::report::tests::report;
    use crate::pictures::fair;

    #[test]
    fn every_subject_is_drawn() {
        let text =
            packet_plot(&report(&[("link", &[4_000_000]), ("<switch>", &[1])]), "a & b").unwrap();
        fair(&text).unwrap();
        for name in ["link", "&lt;switch&gt;", "a &amp; b", "64b-p2", "4.00 Mpps"] {
            assert!(text.contains(name), "{name}");
        }
        assert!(packet_plot(&report(&[]), "x").is_err());
        assert!(!text.contains("the paper"), "{text}");
        let text = packet_plot(&report(&[("e1000-csb", &[5_000_000])]), "x").unwrap();
        assert!(text.contains("the paper") && text.contains("1.53 Mpps"), "{text}");
    }
}
