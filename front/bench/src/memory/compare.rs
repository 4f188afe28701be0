//! Compares two reports of memory.

use super::table::time;
use super::{MemoryLoad, MemoryReport, Quantity};
use crate::compare::{time_row, time_table};

/// Formats a row for each load, subject and time that both reports have, with the means. A
/// difference counts as real if it exceeds half the 99 % confidence interval of the means'
/// difference (Welch).
pub fn compare_memory(before: &MemoryReport, now: &MemoryReport) -> String {
    let mut rows = Vec::new();
    for load in &now.plan.loads {
        for subject in &now.subjects {
            let row = |quantity: &Quantity| row(before, now, load, (&subject.name, *quantity));
            rows.extend(Quantity::of(load).iter().filter_map(row));
        }
    }
    time_table(&rows)
}

fn row(
    before: &MemoryReport,
    now: &MemoryReport,
    load: &MemoryLoad,
    (subject, quantity): (&str, Quantity),
) -> Option<[String; 6]> {
    let [old, new] = [before, now].map(|report| report.times(load, subject, quantity));
    time_row(format!("{load} {subject}, {}", quantity.name()), &old, &new, time)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::report::tests::report;

    #[test]
    fn differences_are_told_from_noise() {
        let loads = ["128M-4k", "gate-block"];
        let before = report(&loads, &[("pool", &[100, 101, 102]), ("new", &[100, 150, 200])]);
        let now = report(&loads, &[("pool", &[50, 51, 52]), ("new", &[90, 140, 190])]);
        let ends = |text: &str, name: &str, end: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap();
            assert!(line.ends_with(end), "{text}");
        };
        let text = compare_memory(&before, &now);
        ends(&text, "128M-4k pool, ready", "faster");
        ends(&text, "128M-4k pool, touch", "faster");
        ends(&text, "gate-block pool, access", "faster");
        ends(&text, "128M-4k new, ready", "noise");
        ends(&compare_memory(&now, &before), "gate-block pool, access", "slower");
        let few = report(&loads, &[("pool", &[9])]);
        ends(&compare_memory(&few, &now), "128M-4k pool, ready", "needs three rounds");
        assert!(compare_memory(&report(&[], &[]), &now).contains("nothing in common"));
    }
}
