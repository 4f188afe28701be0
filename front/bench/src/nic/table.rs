//! Formats a report of network interfaces as tables for a terminal.

use super::{NicFigures, NicLoad, NicReport, Traffic, paper};
use crate::duration::{human, rate};
use crate::table::titled;
use crate::turns::fault_lines;

const HEADINGS: [&str; 11] = [
    "",
    "rate",
    "spread",
    "sent",
    "of the first",
    "paper",
    "of its first",
    "CPU",
    "exits",
    "kicks",
    "interrupts",
];

/// Formats a rate of a load with its unit: datagrams, bits, or exchanges per second.
pub(super) fn shown(load: &NicLoad, value: f64) -> String {
    match load.traffic {
        Traffic::Udp(_) => rate(value, "pps"),
        Traffic::Tcp(_) => rate(value * 8.0, "bit/s"),
        Traffic::RequestResponse => rate(value, "/s"),
    }
}

/// Formats one table for each load of `report`: medians over rounds, a row for each subject, a
/// newline at the end. Headings are bold if `colour`.
pub fn nic_table(report: &NicReport, colour: bool) -> String {
    let mut text = String::new();
    for load in &report.plan.loads {
        let (mut first, mut of_paper) = (None, None);
        let row = |name: &String| {
            let figures = report.figures(load, name)?;
            let base = *first.get_or_insert(figures.rate);
            let then = paper(name, load);
            of_paper = of_paper.or(then);
            Some(row(load, name, &figures, base, then.zip(of_paper)))
        };
        let names = report.subjects.iter().map(|one| &one.name);
        let rows: Vec<_> = names.filter_map(row).collect();
        if !rows.is_empty() {
            text.push_str(&titled(&load.to_string(), &HEADINGS, &rows, colour));
            text.push('\n');
        }
    }
    text.push_str(
        "CPU: time of the guests' VMMs for each datagram, MiB of a stream, or exchange. Exits, \
         kicks and interrupts: for each frame of the guests, as their functions count them. Paper: \
         Speeding Up Packet I/O in Virtual Machines (2013), tables 4 and 11.\n",
    );
    text.push_str(&fault_lines(&report.faults));
    for subject in &report.subjects {
        text.push_str(&format!("{}: {}\n", subject.name, subject.about));
    }
    text
}

fn row(
    load: &NicLoad,
    name: &str,
    figures: &NicFigures,
    base: f64,
    then: Option<(f64, f64)>,
) -> [String; 11] {
    let ratio = |value: f64, of: f64| format!("{:.2}", value / of.max(f64::MIN_POSITIVE));
    let cpu_ns = match load.traffic {
        Traffic::Tcp(_) => figures.cpu_ns * f64::from(1 << 20),
        Traffic::Udp(_) | Traffic::RequestResponse => figures.cpu_ns,
    };
    let [exits, kicks, interrupts] = match figures.work {
        Some(work) => work.map(|one| format!("{one:.4}")),
        None => Default::default(),
    };
    [
        name.to_owned(),
        shown(load, figures.rate),
        format!("{:.0}%", figures.spread() * 100.0),
        shown(load, figures.sent),
        ratio(figures.rate, base),
        then.map(|(value, _)| shown(load, value)).unwrap_or_default(),
        then.map(|(value, first)| ratio(value, first)).unwrap_or_default(),
        human(cpu_ns as u64),
        exits,
        kicks,
        interrupts,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nic::report::tests::report;
    use crate::table::BOLD;

    #[test]
    fn rows_are_subjects_beside_the_paper() {
        let subjects = [("base", &[20_000][..]), ("csb", &[200_000]), ("polling", &[1])];
        let report = report(&["udp8-gg", "tcp1460-gh", "rr-gh"], &subjects);
        let text = nic_table(&report, false);
        let lines: Vec<Vec<&str>> = text
            .lines()
            .filter(|line| line.starts_with("csb "))
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(lines[0][1..3], ["200", "kpps"], "{text}");
        assert!(text.contains("1.53 Mpps") && text.contains("47.69"), "{text}");
        assert!(text.contains("0.5000") && text.contains("polling: <&>"), "{text}");
        assert_eq!(lines[1][1..3], ["1.60", "Mbit/s"], "{text}");
        assert_eq!(lines[2][1..3], ["400", "k/s"], "{text}");
        assert!(nic_table(&report, true).contains(BOLD));
    }
}
