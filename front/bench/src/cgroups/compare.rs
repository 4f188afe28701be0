//! Compares two reports of control groups.

use super::CgroupReport;

/// Formats a row for each load and subject that both reports have, with the mean time for
/// all groups. A difference counts as real if it exceeds half the 99 % confidence interval of the
/// means' difference (Welch).
pub fn compare_cgroups(before: &CgroupReport, now: &CgroupReport) -> String {
    now.compare_times(before, |one| one.total_ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::report::tests::report;

    #[test]
    fn differences_are_told_from_noise() {
        let before = report(&[("create", &[100, 101, 102]), ("pool", &[100, 150, 200])]);
        let now = report(&[("create", &[50, 51, 52]), ("pool", &[90, 140, 190])]);
        let line = |text: &str, name: &str| {
            text.lines().find(|line| line.contains(name)).unwrap().to_owned()
        };
        let text = compare_cgroups(&before, &now);
        assert!(line(&text, "create").ends_with("faster"), "{text}");
        assert!(line(&text, "pool").ends_with("noise"), "{text}");
        let back = compare_cgroups(&now, &before);
        assert!(line(&back, "create").ends_with("slower"), "{back}");
        let few = compare_cgroups(&report(&[("create", &[9])]), &now);
        assert!(line(&few, "create").ends_with("needs three rounds"), "{few}");
        assert!(compare_cgroups(&report(&[]), &now).contains("nothing in common"));
    }
}
