//! Compares two reports of starts by several ways.

use super::{Arm, ArmsReport};
use crate::compare::{time_row, time_table};
use crate::duration::human;

/// Formats a row for each way that both reports have, with the mean time of a sandbox. A difference
/// counts as real if it exceeds half the 99 % confidence interval of the difference of the rounds'
/// means (Welch).
pub fn compare_arms(before: &ArmsReport, now: &ArmsReport) -> String {
    let row = |arm: &Arm| {
        let show = |ns| human(ns as u64);
        time_row(arm.name().to_owned(), &before.means(*arm), &now.means(*arm), show)
    };
    let rows: Vec<_> = now.arms.iter().filter_map(row).collect();
    time_table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arms::report::tests::report;

    #[test]
    fn ways_of_both_reports_are_compared() {
        let now = report(&[(Arm::None, [[100, 100], [101, 101]]), (Arm::Pool, [[1, 1], [2, 2]])]);
        let before = report(&[(Arm::None, [[200, 200], [202, 202]])]);
        let text = compare_arms(&before, &now);
        assert!(
            text.lines().any(|line| line.starts_with("none") && line.contains("2.00")),
            "{text}"
        );
        assert!(!text.contains("pool"), "{text}");
        assert!(compare_arms(&report(&[]), &now).contains("nothing in common"));
    }
}
