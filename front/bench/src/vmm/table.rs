//! Formats a report of VMMs as tables for a terminal.

use super::{VmmFigures, VmmLoad, VmmReport};
use crate::duration::human;
use crate::turns::foot;

const HEADINGS: [&str; 9] =
    ["", "p50", "p90", "least", "without slots", "CPU time", "memory", "end", "of the first"];

/// Formats one table for each load of `report`: percentiles over rounds, a row for each subject, a
/// newline at the end. Headings are bold if `colour`.
pub fn vmm_table(report: &VmmReport, colour: bool) -> String {
    let slots = |load: &VmmLoad| {
        let said = |ns| format!("KVM's own time for the memory slots: {}\n", human(ns));
        report.slot_ns(load).map(said).unwrap_or_default()
    };
    report.tables(&HEADINGS, colour, |load| rows(report, load), slots)
        + &foot(&report.faults, &report.subjects)
}

fn rows(report: &VmmReport, load: &VmmLoad) -> Vec<[String; 9]> {
    let slots = report.slot_ns(load);
    let mut first = None;
    let row = |name: &String| {
        let figures = report.figures(load, name)?;
        let base = *first.get_or_insert(figures.p50_ns);
        // Two medians of two sets of starts: on a noisy machine the difference may be below zero.
        let without = slots.map(|ns| figures.p50_ns.checked_sub(ns).map_or("–".into(), human));
        Some([
            name.clone(),
            human(figures.p50_ns),
            human(figures.p90_ns),
            human(figures.range_ns.0),
            without.unwrap_or_default(),
            figures.cpu_ns.map_or(String::new(), human),
            memory(&figures),
            human(figures.end_ns),
            format!("{:.2}", figures.p50_ns as f64 / base.max(1) as f64),
        ])
    };
    report.rows(row)
}

/// Formats the private memory of a process.
pub(super) fn memory(figures: &VmmFigures) -> String {
    let mib = |bytes| format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20));
    figures.private_bytes.map_or(String::new(), mib)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::BOLD;
    use crate::vmm::report::tests::report;

    #[test]
    fn rows_are_subjects() {
        let text = vmm_table(&report(&[("native", &[10]), ("bare", &[5])]), false);
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
        for part in ["10.0 ms", "9.00 ms", "2.50 ms", "1.50 MiB", "500 µs", "1.00"] {
            assert!(line("native").contains(part), "{part}: {text}");
        }
        let noisy = vmm_table(&report(&[("native", &[0]), ("bare", &[5])]), false);
        assert!(noisy.lines().any(|line| line.starts_with("native") && line.contains(" – ")));
        assert!(line("bare").ends_with("0.50") && !line("bare").contains("MiB"), "{text}");
        assert!(line("128M").contains("without slots"), "{text}");
        assert!(text.contains("memory slots: 1.00 ms") && text.contains("native: <&>"), "{text}");
        assert!(vmm_table(&report(&[("x", &[1])]), true).contains(BOLD));
    }
}
