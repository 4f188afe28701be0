//! Compares two reports of network interfaces.

use super::NicReport;
use super::table::shown;
use crate::compare::{ComparedRate, compare_rates};

/// Formats a row for each load and subject that both reports have. A difference counts as real if
/// it exceeds the spread of the rounds of both reports; a single round has no known spread.
pub fn compare_nics(before: &NicReport, now: &NicReport) -> String {
    let rounds = before.plan.rounds.min(now.plan.rounds);
    compare_rates(&now.plan.loads, &now.subjects, rounds, |load, subject| {
        let rate = |report: &NicReport| {
            let figures = report.figures(load, subject)?;
            let text = shown(load, figures.rate);
            Some(ComparedRate { value: figures.rate, text, spread: figures.spread() })
        };
        Some([rate(before)?, rate(now)?])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nic::report::tests::report;

    #[test]
    fn differences_are_told_from_noise() {
        let report =
            |csb: &[u64], virtio: &[u64]| report(&["udp8-gh"], &[("csb", csb), ("virtio", virtio)]);
        let before = report(&[100, 101, 102], &[100, 150, 200]);
        let now = report(&[150, 151, 152], &[130, 180, 230]);
        let ends = |text: &str, name: &str, end: &str| {
            let line = text.lines().find(|line| line.contains(name)).unwrap();
            assert!(line.ends_with(end), "{text}");
        };
        let text = compare_nics(&before, &now);
        ends(&text, "csb", "faster");
        ends(&text, "virtio", "noise");
        ends(&compare_nics(&now, &before), "csb", "slower");
        assert!(compare_nics(&report(&[], &[]), &now).contains("nothing in common"));
    }
}
