//! Formats a report of roots as tables for a terminal.

use super::report::P99;
use super::{RootLoad, RootReport};

/// RunD-V's figures, of its section VI.A.
const PAPER: &str = "RunD-V, 200 at once: 207 ms on average, 4500 IOPS and 100 MB/s; with its \
                     template 0.2 ms, 1500 IOPS and 8 MB/s\n";

/// Formats one table for each load of `report`: medians over rounds, a row for each subject, then
/// how the subjects compare. Headings are bold if `colour`.
pub fn root_table(report: &RootReport, colour: bool) -> String {
    let below = |load: &RootLoad| said(load) + &compared(report, load);
    report.figure_tables(colour, below) + PAPER + &report.foot()
}

/// Formats what the load is.
fn said(load: &RootLoad) -> String {
    let RootLoad { owners, at_once, cold } = *load;
    let order = match at_once {
        0 => "each served by a thread of its own".to_owned(),
        some => format!("served in their order, {some} at once"),
    };
    let cached = if cold { "; the files are not in the page cache" } else { "" };
    format!("{owners} owners ask at the same time, {order}{cached}.\n")
}

/// Formats how much later than the floor the other subjects are there.
fn compared(report: &RootReport, load: &RootLoad) -> String {
    let p99 = |subject: &str| report.over_rounds(load, subject, &P99).map(|one| one.median);
    let Some(floor) = p99("floor") else { return String::new() };
    let beside = |name: &str| {
        let times = p99(name)? / floor.max(1.0);
        Some(format!("The p99 of {name} is {times:.2} times that of two reads alone.\n"))
    };
    ["made", "ready"].into_iter().filter_map(beside).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pictures::fair;
    use crate::roots::report::tests::report;
    use crate::table::BOLD;

    #[test]
    fn rows_are_subjects_and_the_comparisons_are_said() {
        let text = root_table(&report(&[("made", &[100]), ("floor", &[20])]), false);
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
        let parts = ["50.0 ms", "100 ms", "200 ms", "2.00 µs", "100 µs", "1.00 kIOPS", "4.10 MB/s"];
        for part in parts {
            assert!(line("made").contains(part), "{part}: {text}");
        }
        assert!(line("n200-a2").contains("p99 of work"), "{text}");
        assert!(text.contains("200 owners ask at the same time, served in their order, 2 at"));
        assert!(text.contains("The p99 of made is 5.00 times that of two reads alone."), "{text}");
        assert!(text.contains("made: <&>") && text.contains("RunD-V, 200 at once"), "{text}");
        assert!(root_table(&report(&[("ready", &[1])]), true).contains(BOLD));
        let load: RootLoad = "n3-cold".parse().unwrap();
        assert!(said(&load).contains("a thread of its own; the files are not in the page cache."));
    }

    #[test]
    fn every_subject_is_drawn() {
        let text = report(&[("made", &[4]), ("<floor>", &[8])]).picture("a & b").unwrap();
        fair(&text).unwrap();
        for part in ["made", "&lt;floor&gt;", "a &amp; b", "n200-a2", "8.00 ms, CPU 100 µs"] {
            assert!(text.contains(part), "{part}");
        }
        assert_eq!(text.matches("less is better").count(), 2);
        assert!(report(&[]).picture("x").is_err());
    }
}
