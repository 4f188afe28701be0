//! A report of disks as tables for a terminal.

use super::{BlockReport, Figures};
use crate::duration::human;
use crate::table::{BOLD, PLAIN, grid};

const HEADINGS: [&str; 8] = ["", "IOPS", "MB/s", "mean", "p50", "p99", "p99.9", "target CPU"];

/// One table for each workload of `report`: medians over rounds, a row for each subject. Ended by
/// a newline; bold headings when `colour`.
pub fn block_table(report: &BlockReport, colour: bool) -> String {
    let mut text = String::new();
    for workload in &report.plan.workloads {
        let rows: Vec<[String; 8]> = report
            .subjects
            .iter()
            .filter_map(|subject| {
                Some(row(&subject.name, &report.figures(workload, &subject.name)?))
            })
            .collect();
        if rows.is_empty() {
            continue;
        }
        let mut headings = HEADINGS;
        let name = workload.to_string();
        headings[0] = &name;
        text.push_str(&grid(&headings, &rows, |row, line| match row {
            None if colour => format!("{BOLD}{line}{PLAIN}"),
            _ => line,
        }));
        text.push('\n');
    }
    text + &notes(report)
}

fn row(name: &str, figures: &Figures) -> [String; 8] {
    let ns = |value: f64| human(value.round() as u64);
    let [p50, p99, p999] = figures.percentiles_ns.map(ns);
    [
        name.to_owned(),
        thousands(figures.iops),
        format!("{:.0}", figures.bytes_per_second / 1e6),
        ns(figures.mean_ns),
        p50,
        p99,
        p999,
        figures.target_cpu_ns.map_or_else(|| "-".to_owned(), ns),
    ]
}

/// `1.23 M`, `45.6 k`, `789`.
pub(crate) fn thousands(value: f64) -> String {
    match value {
        1e6.. => format!("{:.2} M", value / 1e6),
        1e4.. => format!("{:.1} k", value / 1e3),
        _ => format!("{value:.0}"),
    }
}

fn notes(report: &BlockReport) -> String {
    let plan = &report.plan;
    let mut text = format!(
        "{} turn{} of {:?} each after {:?} of warm-up, in turn; medians. Disk: {}. Accelerator: {}.\n\
         target CPU: what the target's process spent for one command\n",
        plan.rounds,
        if plan.rounds == 1 { "" } else { "s" },
        plan.time,
        plan.warm_up,
        report.disk,
        report.environment.accelerator,
    );
    for subject in &report.subjects {
        text.push_str(&format!("{}: {}\n", subject.name, subject.about));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::report::tests::report;

    #[test]
    fn a_row_for_each_subject() {
        let report = report(&[("bare", &[600]), ("mapped", &[1_200])]);
        let text = block_table(&report, false);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("randread-4k-d1-t1"), "{text}");
        assert!(lines[1].starts_with("bare") && lines[2].starts_with("mapped"), "{text}");
        assert!(lines[2].contains("1.22 µs"), "{text}");
        assert!(lines[..3].iter().all(|line| line.chars().count() == lines[0].chars().count()));
        assert!(!text.contains('\x1b') && block_table(&report, true).contains('\x1b'));
    }

    #[test]
    fn large_numbers_are_short() {
        assert_eq!([999.0, 45_600.0, 2_345_678.0].map(thousands), ["999", "45.6 k", "2.35 M"]);
    }
}
