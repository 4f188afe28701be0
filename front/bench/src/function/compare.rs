//! Compares two reports of functions.

use super::FunctionReport;

/// Formats a row for each load and subject that both reports have, with the mean of the rounds'
/// median latencies. A difference counts as real if it exceeds half the 99 % confidence interval of
/// the means' difference (Welch).
pub fn compare_functions(before: &FunctionReport, now: &FunctionReport) -> String {
    now.compare_times(before, |one| one.p50_ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::function::report::tests::report;

    #[test]
    fn differences_are_told_from_noise() {
        let before = report(&["s4-q24"], &[("both", &[100, 101, 102])]);
        let now = report(&["s4-q24"], &[("both", &[50, 51, 52])]);
        let text = compare_functions(&before, &now);
        assert!(text.lines().any(|line| line.ends_with("faster")), "{text}");
        let other = report(&["s4-q8"], &[("both", &[1])]);
        assert!(compare_functions(&other, &now).contains("nothing in common"));
    }
}
