//! Compares two reports of attachments.

use super::AttachReport;

/// Formats a row for each load and subject that both reports have, with the mean time until all
/// owners had their VFs. A difference counts as real if it exceeds half the 99 % confidence
/// interval of the means' difference (Welch).
pub fn compare_attaches(before: &AttachReport, now: &AttachReport) -> String {
    now.compare_times(before, |one| one.all_ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::report::tests::report;

    #[test]
    fn differences_are_told_from_noise() {
        let before = report(&[("pool", &[100, 101, 102]), ("vf-locks", &[100, 150, 200])]);
        let now = report(&[("pool", &[50, 51, 52]), ("vf-locks", &[90, 140, 190])]);
        let ends = |text: &str, name: &str, end: &str| {
            let line = text.lines().find(|line| line.contains(name)).unwrap();
            assert!(line.ends_with(end), "{text}");
        };
        let text = compare_attaches(&before, &now);
        ends(&text, "pool", "faster");
        ends(&text, "vf-locks", "noise");
        ends(&compare_attaches(&now, &before), "pool", "slower");
        ends(&compare_attaches(&report(&[("pool", &[9])]), &now), "pool", "needs three rounds");
        assert!(compare_attaches(&report(&[]), &now).contains("nothing in common"));
    }
}
