//! Compares two reports of packets.

use super::PacketReport;
use crate::compare::{ComparedRate, compare_rates};

/// Formats a row for each load and subject that both reports have. A difference counts as real if
/// it exceeds the spread of the rounds of both reports; a single round has no known spread.
pub fn compare_packets(before: &PacketReport, now: &PacketReport) -> String {
    let rounds = before.plan.rounds.min(now.plan.rounds);
    compare_rates(&now.plan.loads, &now.subjects, rounds, |load, subject| {
        let rate = |report: &PacketReport| {
            let figures = report.figures(load, subject)?;
            let (value, spread) = (figures.delivered, figures.spread());
            Some(ComparedRate { value, text: format!("{:.2}", value / 1e6), spread })
        };
        Some([rate(before)?, rate(now)?])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::report::tests::report;

    #[test]
    fn differences_are_told_from_noise() {
        let before = report(&[("switch", &[100, 101, 102]), ("link", &[100, 150, 200])]);
        let now = report(&[("switch", &[150, 151, 152]), ("link", &[130, 180, 230])]);
        let text = compare_packets(&before, &now);
        let line = |name: &str| text.lines().find(|line| line.contains(name)).unwrap().to_owned();
        assert!(line("switch").ends_with("faster") && line("link").ends_with("noise"), "{text}");
        let back = compare_packets(&now, &before);
        assert!(
            back.lines().any(|line| line.contains("switch") && line.ends_with("slower")),
            "{back}"
        );
        assert!(compare_packets(&report(&[]), &now).contains("nothing in common"));
    }
}
