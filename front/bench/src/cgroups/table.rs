//! Formats a report of control groups as tables for a terminal.

use super::paper::pool_ns;
use super::{CgroupLoad, CgroupReport};
use crate::duration::human;

/// Formats one table for each load of `report`: medians over rounds, a row for each subject, a
/// newline at the end. Headings are bold if `colour`.
pub fn cgroup_table(report: &CgroupReport, colour: bool) -> String {
    let mut text = report.figure_tables(colour, published);
    text.push_str(
        "all: from the first request to the end of the last; p50, p99: of a request; refill: CPU \
         time to make the pool's groups before the turn\n",
    );
    text.push_str(favour(report.extra.favours_moves));
    text + &report.foot()
}

/// Formats the differences between two reports, with a note if only one host favoured moves.
pub fn cgroup_differences(before: &CgroupReport, now: &CgroupReport) -> String {
    let [old, new] = [before, now].map(|report| report.extra.favours_moves);
    let differ = old.zip(new).is_some_and(|(old, new)| old != new);
    let note = "note: the host favours moves (favordynmods) in one of the two reports only\n";
    now.compare(before) + if differ { note } else { "" }
}

/// Formats whether the host favoured moves of processes by others, or nothing if that is unknown.
fn favour(favours_moves: Option<bool>) -> &'static str {
    match favours_moves {
        Some(true) => "moves: the host favours them (favordynmods)\n",
        Some(false) => "moves: the host does not favour them (no favordynmods)\n",
        None => "",
    }
}

/// Formats RunD-V's figure for a load, if it has one.
fn published(load: &CgroupLoad) -> String {
    let line = |ns: f64| {
        let time = human(ns as u64);
        format!(
            "RunD-V, as published (section VI.B): {time} for the creation of all with its pool, \
             94 % less than without\n"
        )
    };
    pool_ns(load).map(line).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::report::tests::report;
    use crate::table::BOLD;

    #[test]
    fn rows_are_subjects() {
        let text = cgroup_table(&report(&[("create", &[10]), ("pool", &[5])]), false);
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
        for part in ["5.00 ms", "0.500", "50.0 µs", "1.00 ms"] {
            assert!(line("pool").contains(part), "{part}: {text}");
        }
        assert!(line("create").contains("1.000"), "{text}");
        assert!(text.contains("2000-t50") && text.contains("create: <&>"), "{text}");
        assert!(line("RunD-V").contains("100 ms for the creation of all"), "{text}");
        assert_eq!(published(&"50-t4".parse().unwrap()), "");
        assert!(!text.contains("moves: "), "{text}");
        assert!(cgroup_table(&report(&[("x", &[1])]), true).contains(BOLD));
    }

    #[test]
    fn the_foot_says_whether_the_host_favours_moves() {
        let foot = |favours| {
            let mut report = report(&[("create", &[10])]);
            report.extra.favours_moves = Some(favours);
            cgroup_table(&report, false)
        };
        assert!(foot(true).contains("moves: the host favours them"), "{}", foot(true));
        assert!(foot(false).contains("moves: the host does not favour"), "{}", foot(false));
    }

    #[test]
    fn reports_that_differ_in_favouring_moves_are_told_apart() {
        let favours = |favours_moves| {
            let mut report = report(&[("create", &[10, 11])]);
            report.extra.favours_moves = favours_moves;
            report
        };
        let note = |before, now| {
            cgroup_differences(&favours(before), &favours(now)).contains("note: the host favours")
        };
        assert!(note(Some(false), Some(true)) && note(Some(true), Some(false)));
        assert!(!note(Some(true), Some(true)) && !note(None, Some(true)));
    }
}
