//! Formats a report of sockets as tables for a terminal.

use super::{App, Parts, SocketFigures, SocketLoad, SocketReport, Traffic};
use crate::duration::human;
use crate::table::titled;
use crate::turns::foot;

const RATE: [&str; 11] = [
    "",
    "Gbit/s",
    "spread",
    "messages/s",
    "of the first",
    "cores",
    "cores for 10 Gbit/s",
    "s for a GiB",
    "programs'",
    "engines'",
    "switches a message",
];
const LATENCY: [&str; 9] = [
    "",
    "p50",
    "spread",
    "p99",
    "p99.9",
    "of the first",
    "round trips/s",
    "cores",
    "switches a trip",
];
const IDLE: [&str; 4] = ["", "cores", "switches/s", "memory a pair"];

/// Formats one table for each load of `report`: medians over rounds, a row for each subject, a
/// newline at the end. Headings are bold if `colour`.
pub fn socket_table(report: &SocketReport, colour: bool) -> String {
    let mut text = String::new();
    for load in &report.plan.loads {
        let rows: Vec<_> = rows(report, load).collect();
        if rows.is_empty() {
            continue;
        }
        let title = load.to_string();
        text.push_str(&match load.traffic {
            Traffic::Idle => titled(&title, &IDLE, &each(&rows, idle), colour),
            Traffic::Pingpong(_) => titled(&title, &LATENCY, &each(&rows, latency), colour),
            Traffic::Stream | Traffic::Window => titled(&title, &RATE, &each(&rows, rate), colour),
        });
        text.push_str(&parts(report, load));
        text.push('\n');
    }
    text.push_str(&apps(report, colour));
    text + &foot(&report.faults, &report.subjects)
}

/// Formats a line for each subject whose engines' parts were measured alone.
fn parts(report: &SocketReport, load: &SocketLoad) -> String {
    let line = |name: &str| {
        let (parts, ratio) = report.parts(load, name)?;
        let Parts { copy, seal, open, transport } = parts;
        Some(format!(
            "{name}, ns a byte alone: 2 copies {copy:.3} each, sealing {seal:.3}, opening \
             {open:.3}, transport {transport:.3}, sum {:.3}; the engines' CPU is {ratio:.2} of \
             it\n",
            parts.sum()
        ))
    };
    report.subjects.iter().filter_map(|subject| line(&subject.name)).collect()
}

/// Formats a table for each program that was run.
fn apps(report: &SocketReport, colour: bool) -> String {
    let mut text = String::new();
    for app in App::ALL {
        let mut first = None;
        let rows = report.subjects.iter().filter_map(|subject| {
            let [rate, spread, cores] = report.app(app, &subject.name)?;
            let base = *first.get_or_insert(rate);
            Some([
                subject.name.clone(),
                format!("{rate:.1}"),
                percent(spread),
                ratio(rate, base),
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

type Row = (String, SocketFigures);

fn rows<'a>(report: &'a SocketReport, load: &'a SocketLoad) -> impl Iterator<Item = Row> + 'a {
    let figures = |name: &str| report.figures(load, name);
    report.subjects.iter().filter_map(move |one| Some((one.name.clone(), figures(&one.name)?)))
}

/// Returns the cells of each row; `cells` gets the row's figures and those of the first row.
fn each<const N: usize>(
    rows: &[Row],
    cells: fn(&SocketFigures, &SocketFigures) -> [String; N],
) -> Vec<[String; N]> {
    let row = |(name, figures): &Row| {
        let mut row = cells(figures, &rows[0].1);
        row[0].clone_from(name);
        row
    };
    rows.iter().map(row).collect()
}

/// Formats the ratio of `figure` to `first`.
fn ratio(figure: f64, first: f64) -> String {
    format!("{:.2}", figure / first.max(f64::MIN_POSITIVE))
}

fn percent(part: f64) -> String {
    format!("{:.0}%", part * 100.0)
}

fn rate(figures: &SocketFigures, first: &SocketFigures) -> [String; 11] {
    let [all, programs, engines] = figures.seconds_per_gib().map(|time| format!("{time:.3}"));
    [
        String::new(),
        format!("{:.2}", figures.bytes * 8.0 / 1e9),
        percent(figures.spread),
        format!("{:.0}", figures.messages),
        ratio(figures.bytes, first.bytes),
        format!("{:.2}", figures.cores),
        format!("{:.3}", figures.cores_per_10_gbits()),
        all,
        programs,
        engines,
        format!("{:.4}", figures.switches),
    ]
}

fn latency(figures: &SocketFigures, first: &SocketFigures) -> [String; 9] {
    let [p50, p99, p999] = figures.latency.unwrap_or_default();
    let [base, ..] = first.latency.unwrap_or_default();
    let time = |ns: f64| human(ns as u64);
    [
        String::new(),
        time(p50),
        percent(figures.spread),
        time(p99),
        time(p999),
        ratio(p50, base),
        format!("{:.0}", figures.messages),
        format!("{:.2}", figures.cores),
        format!("{:.2}", figures.switches),
    ]
}

fn idle(figures: &SocketFigures, _: &SocketFigures) -> [String; 4] {
    let memory = figures.memory.unwrap_or_default();
    [
        String::new(),
        format!("{:.4}", figures.cores),
        format!("{:.0}", figures.switches),
        format!("{memory:.0} bytes"),
    ]
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
        for cell in ["stream-128k-c1", "8.00", "32.00", "4.00", "5.000", "tcp: <&>"] {
            assert!(text.contains(cell), "{cell}: {text}");
        }
        let text = socket_table(&report("pingpong-64b-asleep", &[("tcp", &[10_000])]), true);
        assert!(text.contains("100 µs") && text.contains(BOLD), "{text}");
        let text = socket_table(&report("idle-c1024", &[("tcp", &[1])]), false);
        assert!(text.contains("1024 bytes"), "{text}");
    }
}
