//! Formats a report of sockets as tables for a terminal.

use super::{App, Parts, SocketLoad, SocketReport};
use crate::figure::ratio;
use crate::table::titled;

/// Formats a table for each load of `report`, and a newline at the end. The parts of engines' work
/// follow each, and the rates of programs follow all. Headings are bold if `colour`.
pub fn socket_table(report: &SocketReport, colour: bool) -> String {
    let tables = report.figure_tables(colour, |load| parts(report, load));
    tables + &apps(report, colour) + &report.foot()
}

/// Formats a line for each subject whose engines' parts were measured alone.
fn parts(report: &SocketReport, load: &SocketLoad) -> String {
    let line = |name: &String| {
        let (parts, ratio) = report.parts(load, name)?;
        let Parts { copy, seal, open, transport } = parts;
        Some(format!(
            "{name}, ns a byte alone: 2 copies {copy:.3} each, sealing {seal:.3}, opening \
             {open:.3}, transport {transport:.3}, sum {:.3}; the engines' CPU is {ratio:.2} of \
             it\n",
            parts.sum()
        ))
    };
    report.rows(line).concat()
}

/// Formats a table for each program that was run.
fn apps(report: &SocketReport, colour: bool) -> String {
    let mut text = String::new();
    for app in App::ALL {
        let mut first = None;
        let rows = report.subjects.iter().filter_map(|subject| {
            let (rate, cores) = report.app(app, &subject.name)?;
            let base = *first.get_or_insert(rate.median);
            Some([
                subject.name.clone(),
                format!("{:.1}", rate.median),
                rate.spread_text(),
                ratio(rate.median, base),
                format!("{cores:.2}"),
            ])
        });
        let rows: Vec<[String; 5]> = rows.collect();
        if !rows.is_empty() {
            let (name, unit) = app.names();
            let headings = ["", unit, "spread", "of the first", "servers' cores"];
            text.push_str(&titled(name, &headings, &rows, colour));
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;
    use crate::table::BOLD;

    #[test]
    fn rows_are_subjects() {
        let both: [(&str, &[u64]); 2] = [("tcp", &[1_000_000_000]), ("slipway", &[4_000_000_000])];
        let text = socket_table(&report("stream-128k-c1", &both), false);
        for cell in ["stream-128k-c1", "8.00 G", "32.0 G", "4.000", "5.000", "tcp: <&>"] {
            assert!(text.contains(cell), "{cell}: {text}");
        }
        let text = socket_table(&report("pingpong-64b-asleep", &[("tcp", &[10_000])]), true);
        assert!(text.contains("100 µs") && text.contains(BOLD), "{text}");
        let text = socket_table(&report("idle-c1024", &[("tcp", &[1])]), false);
        assert!(text.contains("1024 bytes"), "{text}");
        // Sockets at rest may take no time at all, to which nothing has a ratio.
        let rest: [(&str, &[u64]); 2] = [("tcp", &[0, 0, 1_000_000]), ("slipway", &[1_000])];
        let text = socket_table(&report("idle-c1024", &rest), false);
        assert_eq!(text.lines().filter(|line| line.contains(" - ")).count(), 2, "{text}");
        assert!(text.lines().all(|line| line.len() < 120), "{text}");
    }
}
