//! Formats a report of idle control groups as tables for a terminal.

use super::report::{BUSY, LOST, P50, P99, WOKEN, percent};
use super::{IdleLoad, IdleReport};
use crate::figure::OverRounds;

const HEADINGS: [&str; 8] =
    ["", "busy", "least, most", "over the first", "lost", "least, most", "p50", "p99"];
/// The figure of RunD-V (section IV.A2).
const PAPER: &str = "RunD-V, as published: 7.6 % of a node's cycles (104 processors, more than \
                     1000 sandboxes, more than 10,000 groups) go to switches and load tracking\n";

/// Formats one table for each load of `report`: medians over rounds, a row for each subject, a
/// newline at the end. Headings are bold if `colour`.
pub fn idle_table(report: &IdleReport, colour: bool) -> String {
    let below = |load: &IdleLoad| woken(report, load);
    let mut text = report.tables(&HEADINGS, colour, |load| rows(report, load), below);
    text.push_str(
        "busy: part of the time of all processors in which they were not idle; lost: part of its \
         time that a program which never sleeps did not have; p50, p99: its interruptions\n",
    );
    text.push_str(PAPER);
    text + &report.foot()
}

fn rows(report: &IdleReport, load: &IdleLoad) -> Vec<[String; 8]> {
    let mut first = None;
    let row = |name: &String| {
        let of = |figure| report.over_rounds(load, name, figure);
        let (busy, lost) = (of(&BUSY)?, of(&LOST)?);
        let base = *first.get_or_insert(busy.median);
        let shown = |figure| report.shown(load, name, figure).unwrap_or_default();
        let ends = |one: OverRounds| format!("{}, {}", percent(one.range.0), percent(one.range.1));
        Some([
            name.clone(),
            percent(busy.median),
            ends(busy),
            format!("{:+.2} %", (busy.median - base) * 100.0),
            percent(lost.median),
            ends(lost),
            shown(&P50),
            shown(&P99),
        ])
    };
    report.rows(row)
}

/// Says how often processes were woken: a host that is too busy wakes them later.
fn woken(report: &IdleReport, load: &IdleLoad) -> String {
    let woken = report.rows(|name| report.over_rounds(load, name, &WOKEN));
    let least = woken.iter().map(|one| one.median).fold(f64::INFINITY, f64::min);
    let asked = u64::from(load.groups) * u64::from(load.wakes);
    format!("wakes in a second: {least:.0} or more, of {asked}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::idle::report::tests::report;
    use crate::pictures::fair;
    use crate::table::BOLD;

    #[test]
    fn rows_are_subjects_beside_the_papers_figure() {
        let text = idle_table(&report(&[("one", &[1]), ("each", &[4])]), false);
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
        for part in ["4.00 %", "+3.00 %", "2.00 %", "4.00 µs", "8.00 µs"] {
            assert!(line("each ").contains(part), "{part}: {text}");
        }
        assert!(line("one ").contains("+0.00 %"), "{text}");
        assert!(text.contains("wakes in a second: 20000 or more, of 20000"), "{text}");
        assert!(line("RunD-V").contains("7.6 %") && text.contains("each: <&>"), "{text}");
        assert!(idle_table(&report(&[("x", &[1])]), true).contains(BOLD));
    }

    #[test]
    fn every_subject_is_drawn() {
        let text = report(&[("one", &[4]), ("<each>", &[8])]).picture("a & b").unwrap();
        fair(&text).unwrap();
        for part in ["one", "&lt;each&gt;", "a &amp; b", "2000 groups, 10 wakes", "8.00 %"] {
            assert!(text.contains(part), "{part}");
        }
        assert_eq!(text.matches("less is better").count(), 2);
        assert!(report(&[]).picture("x").is_err());
    }
}
