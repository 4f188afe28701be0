//! Compares two reports of starts by several ways.

use super::{Arm, ArmsReport, Point};
use crate::compare::{time_row, time_table};
use crate::duration::human;

/// Formats a row for each number of sandboxes and each way that both reports have, with the mean
/// time of a sandbox. A difference counts as real if it exceeds half the 99 % confidence interval
/// of the difference of the rounds' means (Welch).
pub fn compare_arms(before: &ArmsReport, now: &ArmsReport) -> String {
    let rows: Vec<_> = now.points.iter().flat_map(|point| rows(before, now, *point)).collect();
    time_table(&rows)
}

/// Returns the rows of a point. The ways have the point's name behind theirs if there are several.
fn rows(before: &ArmsReport, now: &ArmsReport, point: Point) -> Vec<[String; 6]> {
    let (was, is) = (before.at(point), now.at(point));
    let row = |arm: &Arm| {
        let name = match now.points.len() {
            1 => arm.name().to_owned(),
            _ => format!("{arm}, {}", now.name_of(point)),
        };
        time_row(name, &was.means(*arm), &is.means(*arm), |ns| human(ns as u64))
    };
    now.arms.iter().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arms::report::tests::{report, two_points};

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
    #[test]
    fn equal_numbers_of_sandboxes_are_compared() {
        let none = [(Arm::None, [[100, 100], [102, 102]])];
        let text = compare_arms(&report(&none), &two_points(&none));
        let rows: Vec<_> = text.lines().filter(|line| line.starts_with("none")).collect();
        assert!(rows.len() == 1 && rows[0].starts_with("none, 2 at once"), "{text}");
        assert!(rows[0].contains("1.00"), "{text}");
    }
}
