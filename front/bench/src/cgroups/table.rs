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
    text + &report.foot()
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
        assert!(cgroup_table(&report(&[("x", &[1])]), true).contains(BOLD));
    }
}
