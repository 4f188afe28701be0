//! Compares two reports of VMMs.

use super::VmmReport;

/// Formats a row for each load and subject that both reports have, with the mean time to the
/// guest's byte. A difference counts as real if it exceeds half the 99 % confidence interval of the
/// means' difference (Welch).
pub fn compare_vmms(before: &VmmReport, now: &VmmReport) -> String {
    now.compare_times(before, |one| one.byte_ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vmm::report::tests::report;

    #[test]
    fn differences_are_told_from_noise() {
        let before = report(&[("native", &[100, 101, 102]), ("bare", &[100, 150, 200])]);
        let now = report(&[("native", &[50, 51, 52]), ("bare", &[90, 140, 190])]);
        let line = |text: &str, name: &str| {
            text.lines().find(|line| line.contains(name)).unwrap().to_owned()
        };
        let text = compare_vmms(&before, &now);
        assert!(line(&text, "native").ends_with("faster"), "{text}");
        assert!(line(&text, "bare").ends_with("noise"), "{text}");
        let back = compare_vmms(&now, &before);
        assert!(line(&back, "native").ends_with("slower"), "{back}");
        let few = compare_vmms(&report(&[("native", &[9])]), &now);
        assert!(line(&few, "native").ends_with("needs three rounds"), "{few}");
        assert!(compare_vmms(&report(&[]), &now).contains("nothing in common"));
    }
}
