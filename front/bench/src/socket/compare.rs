//! Compares two reports of sockets.

use super::SocketReport;
use crate::compare::{rate_row, rate_table};
use crate::duration::human;

/// Formats a row for each load and subject that both reports have: gigabits per second, or the
/// median round trip. A difference counts as real if it exceeds the spread of the rounds of both
/// reports; a single round has no known spread.
pub fn compare_sockets(before: &SocketReport, now: &SocketReport) -> String {
    let mut rows = Vec::new();
    for load in &now.plan.loads {
        for subject in &now.subjects {
            let both = before.figures(load, &subject.name).zip(now.figures(load, &subject.name));
            let Some((old, new)) = both.filter(|(old, _)| old.main() > 0.0) else { continue };
            let ratio = new.main() / old.main();
            let noise = old.spread.max(new.spread);
            let rounds = before.plan.rounds.min(now.plan.rounds);
            let show = |figures: &super::SocketFigures| match figures.latency {
                Some([p50, ..]) => human(p50 as u64),
                None => format!("{:.2}", figures.bytes * 8.0 / 1e9),
            };
            let name = format!("{load} {}", subject.name);
            rows.push(rate_row(name, [show(&old), show(&new)], ratio, noise, rounds));
        }
    }
    rate_table(&rows)
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
