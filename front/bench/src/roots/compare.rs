//! Compares two reports of roots.

use super::RootReport;

/// Formats a row for each load and subject that both reports have, with the mean of the rounds'
/// 99th percentiles. A difference counts as real if it exceeds half the 99 % confidence interval of
/// the means' difference (Welch).
pub fn compare_roots(before: &RootReport, now: &RootReport) -> String {
    now.compare_times(before, |one| one.p99_ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roots::report::tests::report;

    #[test]
    fn differences_are_told_from_noise() {
        let before = report(&[("made", &[100, 101, 102]), ("ready", &[100, 150, 200])]);
        let now = report(&[("made", &[50, 51, 52]), ("ready", &[90, 140, 190])]);
        let ends = |text: &str, name: &str, end: &str| {
            let line = text.lines().find(|line| line.contains(name)).unwrap();
            assert!(line.ends_with(end), "{text}");
        };
        let text = compare_roots(&before, &now);
        ends(&text, "made", "faster");
        ends(&text, "ready", "noise");
        ends(&compare_roots(&now, &before), "made", "slower");
        ends(&compare_roots(&report(&[("made", &[9])]), &now), "made", "needs three rounds");
        assert!(compare_roots(&report(&[]), &now).contains("nothing in common"));
    }
}
