//! Formats a report of packets as tables for a terminal.

use super::report::NEIGHBOUR;
use super::work::{paper_table, work_table};
use super::{PacketLoad, PacketReport};

/// Formats a table for each load of `report`, with a newline at the end. Neighbours' losses, the
/// work of e1000 functions and the paper's rates follow each. Headings are bold if `colour`.
pub fn packet_table(report: &PacketReport, colour: bool) -> String {
    let below = |load: &PacketLoad| {
        let further = [work_table(report, load, colour), paper_table(report, load, colour)];
        let further = further.into_iter().filter(|table| !table.is_empty());
        neighbours(report, load) + &further.map(|table| format!("\n{table}")).collect::<String>()
    };
    report.figure_tables(colour, below) + &report.foot()
}

/// Formats a line for each subject that had a neighbour.
fn neighbours(report: &PacketReport, load: &PacketLoad) -> String {
    let line = |name: &String| {
        let share = (NEIGHBOUR.text)(report.over_rounds(load, name, &NEIGHBOUR)?.range.0);
        Some(format!("{name}: {share} of its neighbour's frames arrived in the worst round\n"))
    };
    report.rows(line).concat()
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
            text.contains("64b-p2") && text.contains("40.0 Mpps") && text.contains("0.500"),
            "{text}"
        );
        assert!(text.contains("switch: 100.00% of its neighbour's frames"), "{text}");
        assert!(text.contains("10.2 Gbit/s") && text.contains("link: <&>"), "{text}");
        assert!(packet_table(&report(&[("x", &[1])]), true).contains(BOLD));
    }
}
