//! Formats a report of packets as tables for a terminal.

use super::PacketReport;
use super::work::{paper_table, work_table};
use crate::table::titled;
use crate::turns::foot;

const HEADINGS: [&str; 7] =
    ["", "Mpps", "spread", "Gbit/s", "offered", "of the first", "neighbour's share"];

/// Formats one table for each load of `report`: medians over rounds, a row for each subject, a
/// newline at the end. The work of e1000 functions and the paper's rates follow in tables of their
/// own. Headings are bold if `colour`.
pub fn packet_table(report: &PacketReport, colour: bool) -> String {
    let mut text = String::new();
    for load in &report.plan.loads {
        let mut first = None;
        let rows = report.subjects.iter().filter_map(|subject| {
            let figures = report.figures(load, &subject.name)?;
            let base = *first.get_or_insert(figures.delivered);
            Some([
                subject.name.clone(),
                format!("{:.2}", figures.delivered / 1e6),
                format!("{:.0}%", figures.spread() * 100.0),
                format!("{:.1}", figures.bits / 1e9),
                format!("{:.2}", figures.sent / 1e6),
                format!("{:.2}", figures.delivered / base.max(f64::MIN_POSITIVE)),
                figures.neighbour.map_or(String::new(), |share| format!("{:.2}%", share * 100.0)),
            ])
        });
        let rows: Vec<[String; 7]> = rows.collect();
        if rows.is_empty() {
            continue;
        }
        text.push_str(&titled(&load.to_string(), &HEADINGS, &rows, colour));
        text.push('\n');
        for further in [work_table(report, load, colour), paper_table(report, load, colour)] {
            if !further.is_empty() {
                text.push_str(&further);
                text.push('\n');
            }
        }
    }
    text + &foot(&report.faults, &report.subjects)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::report::tests::report;
    use crate::table::BOLD;

    #[test]
    fn rows_are_subjects() {
        let text =
            packet_table(&report(&[("link", &[40_000_000]), ("switch", &[20_000_000])]), false);
        assert!(
            text.contains("64b-p2") && text.contains("40.00") && text.contains("0.50"),
            "{text}"
        );
        assert!(text.contains("100.00%"), "{text}");
        assert!(text.contains("10.2") && text.contains("link: <&>"), "{text}");
        assert!(packet_table(&report(&[("x", &[1])]), true).contains(BOLD));
    }
}
