//! Compares two reports of idle control groups.

use super::IdleReport;

/// Formats a row for each load and subject that both reports have, with the mean time in a second
/// for which the host's processors are not idle. A difference counts as real if it exceeds half the
/// 99 % confidence interval of the means' difference (Welch).
pub fn compare_idle(before: &IdleReport, now: &IdleReport) -> String {
    now.compare_times(before, |one| one.each_second(one.busy_ns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::idle::report::tests::report;

    #[test]
    fn differences_are_told_from_noise() {
        let before = report(&[("one", &[10, 10, 10]), ("each", &[20, 21, 22])]);
        let now = report(&[("one", &[10, 10, 10]), ("each", &[40, 41, 42])]);
        let text = compare_idle(&before, &now);
        let line = |name: &str| text.lines().find(|line| line.contains(name)).unwrap();
        assert!(line("each").ends_with("slower"), "{text}");
        assert!(line("one").contains("1.00"), "{text}");
        assert!(compare_idle(&report(&[]), &now).contains("nothing in common"));
    }
}
