//! Formats a report of network interfaces as tables for a terminal.

use super::{NicFigures, NicLoad, NicMeasured, NicReport, PaperFigure, Traffic, paper};
use crate::duration::human;
use crate::measurement::Measured;
use crate::turns::foot;

const HEADINGS: [&str; 11] = [
    "",
    "rate",
    "spread",
    "sent",
    "of base",
    "paper",
    "of base",
    "CPU",
    "exits",
    "kicks",
    "interrupts",
];

/// Formats a rate of a load with its unit: datagrams, bits, or exchanges per second.
pub(super) fn shown(load: &NicLoad, value: f64) -> String {
    NicMeasured::figures(load).first().map_or_else(String::new, |figure| (figure.text)(value))
}

/// Formats one table for each load of `report`: medians over rounds, a row for each subject, a
/// newline at the end. Headings are bold if `colour`.
pub fn nic_table(report: &NicReport, colour: bool) -> String {
    let rows = |load: &NicLoad| {
        let base = base(report, load);
        report.rows(|name| Some(row(load, name, &report.figures(load, name)?, base)))
    };
    let mut text = report.tables(&HEADINGS, colour, rows, |_| String::new());
    text.push_str(
        "CPU: time of the guests' VMMs for each datagram, MiB of a stream, or exchange. Exits, \
         kicks and interrupts: for each frame of the guests, as their functions count them. Not in \
         the CPU time: the daemon's, which serves Slipway's functions. Paper: Speeding Up Packet \
         I/O in Virtual Machines (2013), tables 4 and 11; * what was sent, and not all received.\n",
    );
    text + &foot(&report.faults, &report.subjects)
}

/// Returns the rate of the subject to which the others are compared, and the paper's of the same:
/// the first that the paper has, or else the first.
fn base(report: &NicReport, load: &NicLoad) -> Option<(f64, Option<f64>)> {
    let measured = report.subjects.iter().filter_map(|subject| {
        let rate = report.figures(load, &subject.name)?.rate;
        Some((rate, paper(&subject.name, load).map(|then| then.rate)))
    });
    let all: Vec<_> = measured.collect();
    all.iter().find(|(_, then)| then.is_some()).or(all.first()).copied()
}

fn row(
    load: &NicLoad,
    name: &str,
    figures: &NicFigures,
    base: Option<(f64, Option<f64>)>,
) -> [String; 11] {
    let ratio = |value: f64, of: f64| match of > 0.0 {
        true => format!("{:.2}", value / of),
        false => "-".to_owned(),
    };
    let spread = figures.spread().map(|spread| format!("{:.0}%", spread * 100.0));
    let then = paper(name, load);
    let star = |then: &PaperFigure| if then.only_sent { "*" } else { "" };
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
        spread.unwrap_or_else(|| "-".to_owned()),
        shown(load, figures.sent),
        base.map(|(first, _)| ratio(figures.rate, first)).unwrap_or_default(),
        then.map(|then| shown(load, then.rate) + star(&then)).unwrap_or_default(),
        then.zip(base.and_then(|(_, first)| first))
            .map(|(then, first)| ratio(then.rate, first))
            .unwrap_or_default(),
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
        let subjects =
            [("stock", &[7][..]), ("base", &[20_000]), ("csb", &[200_000]), ("polling", &[1])];
        let report = report(&["udp8-gg", "tcp1460-gh", "rr-gh"], &subjects);
        let text = nic_table(&report, false);
        let lines: Vec<Vec<&str>> = text
            .lines()
            .filter(|line| line.starts_with("csb "))
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(lines[0][1..3], ["200", "kpps"], "{text}");
        assert_eq!(lines[0][6..10], ["10.00", "1.53", "Mpps*", "47.69"], "{text}");
        assert!(text.contains("0.5000") && text.contains("polling: <&>"), "{text}");
        assert_eq!(lines[1][1..3], ["1.60", "Mbit/s"], "{text}");
        assert_eq!(lines[2][1..3], ["400", "k/s"], "{text}");
        assert!(nic_table(&report, true).contains(BOLD));
    }

    #[test]
    fn an_interface_that_received_nothing_has_no_ratio_to_it() {
        let subjects = [("base", &[0, 0, 1][..]), ("csb", &[200_000])];
        let text = nic_table(&report(&["udp8-gg"], &subjects), false);
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
        assert_eq!(line("base ").split_whitespace().nth(3), Some("-"), "{text}");
        assert!(line("csb ").contains("  -  ") && line("csb ").len() < 200, "{text}");
    }
}
