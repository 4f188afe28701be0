//! Formats a report of VMMs as tables for a terminal.

use super::report::{BYTE, CPU, END, PRIVATE};
use super::{VmmLoad, VmmReport};
use crate::duration::human;
use crate::figure::time;

const HEADINGS: [&str; 9] =
    ["", "p50", "p90", "least", "without slots", "CPU time", "memory", "end", "of the first"];

/// Formats one table for each load of `report`: percentiles over rounds, a row for each subject, a
/// newline at the end. Headings are bold if `colour`.
pub fn vmm_table(report: &VmmReport, colour: bool) -> String {
    let slots = |load: &VmmLoad| {
        let said = |ns| format!("KVM's own time for the memory slots: {}\n", time(ns));
        report.slot_ns(load).map(said).unwrap_or_default()
    };
    report.tables(&HEADINGS, colour, |load| rows(report, load), slots) + &report.foot()
}

fn rows(report: &VmmReport, load: &VmmLoad) -> Vec<[String; 9]> {
    let slots = report.slot_ns(load);
    let mut first = None;
    let row = |name: &String| {
        let byte = report.over_rounds(load, name, &BYTE)?;
        let base = *first.get_or_insert(byte.median);
        // Two medians of two sets of starts: on a noisy machine the difference may be below zero.
        let without = slots.map(|ns| byte.median - ns);
        let without = without.map(|ns| if ns < 0.0 { "–".to_owned() } else { time(ns) });
        let shown = |figure| report.shown(load, name, figure).unwrap_or_default();
        Some([
            name.clone(),
            time(byte.median),
            human(report.p90_ns(load, name)),
            time(byte.range.0),
            without.unwrap_or_default(),
            shown(&CPU),
            shown(&PRIVATE),
            shown(&END),
            format!("{:.2}", byte.median / base.max(1.0)),
        ])
    };
    report.rows(row)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pictures::fair;
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

    #[test]
    fn every_subject_is_drawn() {
        let text = report(&[("bare", &[4]), ("<native>", &[8])]).picture("a & b").unwrap();
        fair(&text).unwrap();
        for part in ["bare", "&lt;native&gt;", "a &amp; b", "128M", "8.00 ms", "1.50 MiB"] {
            assert!(text.contains(part), "{part}");
        }
        assert_eq!(text.matches("less is better").count(), 3);
        assert!(report(&[]).picture("x").is_err());
    }
}
