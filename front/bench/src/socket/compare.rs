//! Compares two reports of sockets.

use super::SocketReport;
use crate::compare::{ComparedRate, compare_rates};
use crate::duration::human;

/// Formats a row for each load and subject that both reports have: gigabits per second, or the
/// median round trip. A difference counts as real if it exceeds the spread of the rounds of both
/// reports; a single round has no known spread.
pub fn compare_sockets(before: &SocketReport, now: &SocketReport) -> String {
    let rounds = before.plan.rounds.min(now.plan.rounds);
    compare_rates(&now.plan.loads, &now.subjects, rounds, |load, subject| {
        let rate = |report: &SocketReport| {
            let figures = report.figures(load, subject)?;
            let text = match figures.latency {
                Some([p50, ..]) => human(p50 as u64),
                None => format!("{:.2}", figures.bytes * 8.0 / 1e9),
            };
            Some(ComparedRate { value: figures.main(), text, spread: figures.spread })
        };
        let before = rate(before).filter(|rate| rate.value > 0.0)?;
        Some([before, rate(now)?])
    })
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;

    #[test]
    fn differences_are_told_from_noise() {
        for load in ["stream-64b-c1", "pingpong-64b-busy"] {
            let before =
                report(load, &[("tcp", &[1000, 1010, 1020]), ("ours", &[1000, 1500, 2000])]);
            let now = report(load, &[("tcp", &[1500, 1510, 1520]), ("ours", &[1300, 1800, 2300])]);
            let line = |text: &str, name: &str| {
                text.lines().find(|line| line.contains(name)).unwrap().to_owned()
            };
            let text = compare_sockets(&before, &now);
            assert!(line(&text, "tcp").ends_with("faster"), "{text}");
            assert!(line(&text, "ours").ends_with("noise"), "{text}");
            let back = compare_sockets(&now, &before);
            assert!(line(&back, "tcp").ends_with("slower"), "{back}");
            assert!(compare_sockets(&report(load, &[]), &now).contains("nothing in common"));
        }
    }
}
