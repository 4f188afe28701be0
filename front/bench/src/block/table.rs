//! Formats a report of disks as tables for a terminal.

use super::{BlockReport, Figures, RocksReport};
use crate::duration::human;
use crate::table::titled;
use crate::turns::{Described, fault_lines, foot};

const HEADINGS: [&str; 9] =
    ["", "IOPS", "spread", "MB/s", "mean", "p50", "p99", "p99.9", "target CPU"];

/// Formats one table for each workload of `report`: medians over rounds, a row for each subject, a
/// newline at the end. Headings are bold if `colour`.
pub fn block_table(report: &BlockReport, colour: bool) -> String {
    let mut text = String::new();
    for workload in &report.plan.workloads {
        let rows: Vec<[String; 9]> = report
            .subjects
            .iter()
            .filter_map(|subject| {
                let figures = report.figures(workload, &subject.name)?;
                Some(row(&subject.name, &figures, report.spread(workload, &subject.name)))
            })
            .collect();
        if rows.is_empty() {
            continue;
        }
        text.push_str(&titled(&workload.to_string(), &HEADINGS, &rows, colour));
        text.push('\n');
    }
    if let Some(rocksdb) = &report.rocksdb {
        text.push_str(&rocks_table(report, rocksdb, colour));
    }
    text + &neighbour_table(report, colour) + &fault_lines(&report.faults) + &notes(report)
}

const BESIDE: [&str; 11] = [
    "",
    "p50",
    "beside",
    "ratio",
    "p99",
    "beside",
    "ratio",
    "p99 ≥",
    "beside",
    "ratio",
    "neighbour IOPS",
];

/// Formats how much the quiet client's latencies grow beside a neighbour, with a row for each
/// neighbour. Returns an empty text if there was none.
fn neighbour_table(report: &BlockReport, colour: bool) -> String {
    let mut text = String::new();
    for workload in &report.plan.workloads {
        let beside = |subject: &Described| report.neighbour_iops(workload, &subject.name);
        if !report.subjects.iter().any(|subject| beside(subject).is_some()) {
            continue;
        }
        let rows = report.subjects.iter().filter_map(|subject| {
            let (alone, _) = subject.name.split_once('+')?;
            let loud = beside(subject);
            let [own, others] = [alone, &subject.name].map(|name| report.figures(workload, name));
            let least = [alone, &subject.name].map(|name| report.p99_at_least(workload, name));
            let least = least[0].zip(least[1]);
            let figures = (&own?, &others?);
            Some(beside_row(&subject.name, figures, least, loud))
        });
        let rows: Vec<[String; 11]> = rows.collect();
        if rows.is_empty() {
            continue;
        }
        text.push_str(&titled(&format!("{workload}, alone and"), &BESIDE, &rows, colour));
        text.push_str(
            "p99 \u{2265}: up to the client's last look that found nothing; what p99 has beyond \
             it may be the client's own, which puts both loads on\n\n",
        );
    }
    text
}

fn beside_row(
    name: &str,
    (alone, beside): (&Figures, &Figures),
    least: Option<(f64, f64)>,
    loud: Option<f64>,
) -> [String; 11] {
    let three = |alone: f64, beside: f64| {
        let ns = |value: f64| human(value.round() as u64);
        [ns(alone), ns(beside), format!("{:.2}", beside / alone.max(1.0))]
    };
    let [p50, p99] = [0, 1].map(|at| three(alone.percentiles_ns[at], beside.percentiles_ns[at]));
    let least = match least {
        Some((alone, beside)) => three(alone, beside),
        None => [(); 3].map(|()| "-".to_owned()),
    };
    let ([a, b, c], [d, e, f], [g, h, i]) = (p50, p99, least);
    [name.to_owned(), a, b, c, d, e, f, g, h, i, loud.map_or_else(|| "-".to_owned(), thousands)]
}

/// Formats a table for each load with a row for each subject: the median over rounds of the
/// operations per second, then the least and the greatest.
fn rocks_table(report: &BlockReport, rocksdb: &RocksReport, colour: bool) -> String {
    const HEADINGS: [&str; 4] = ["", "ops/s", "least", "most"];
    let mut text = String::new();
    for job in rocksdb.plan.jobs() {
        let rows = report.subjects.iter().filter_map(|subject| {
            let rate = rocksdb.rate(job, &subject.name)?;
            let (least, most) = rocksdb.spread(job, &subject.name)?;
            let name = subject.name.clone();
            Some([name, thousands(rate), thousands(least), thousands(most)])
        });
        let rows: Vec<[String; 4]> = rows.collect();
        if rows.is_empty() {
            continue;
        }
        text.push_str(&titled(&job.to_string(), &HEADINGS, &rows, colour));
        text.push('\n');
    }
    let plan = &rocksdb.plan;
    text + &format!(
        "RocksDB on ext4 past the page cache: {} keys of 16 bytes, values of {} bytes; random \
         loads last up to {:?}; c10: 10 compaction threads\n",
        plan.keys, plan.value_bytes, plan.time
    )
}

fn row(name: &str, figures: &Figures, spread: Option<f64>) -> [String; 9] {
    let ns = |value: f64| human(value.round() as u64);
    let [p50, p99, p999] = figures.percentiles_ns.map(ns);
    [
        name.to_owned(),
        thousands(figures.iops),
        spread.map_or_else(|| "-".to_owned(), |spread| format!("{:.0} %", spread * 100.0)),
        format!("{:.0}", figures.bytes_per_second / 1e6),
        ns(figures.mean_ns),
        p50,
        p99,
        p999,
        figures.target_cpu_ns.map_or_else(|| "-".to_owned(), ns),
    ]
}

/// Formats a number as `1.23 M`, `45.6 k`, `789`.
pub(crate) fn thousands(value: f64) -> String {
    match value {
        1e6.. => format!("{:.2} M", value / 1e6),
        1e4.. => format!("{:.1} k", value / 1e3),
        _ => format!("{value:.0}"),
    }
}

fn notes(report: &BlockReport) -> String {
    let plan = &report.plan;
    let (rounds, plural) = (plan.rounds, if plan.rounds == 1 { "" } else { "s" });
    let (disk, accelerator) = (&report.disk, &report.environment.accelerator);
    let turns = match report.rocksdb {
        Some(_) => format!("{rounds} round{plural}, in turn"),
        None => {
            let (time, warm_up) = (plan.time, plan.warm_up);
            format!("{rounds} turn{plural} of {time:?} each after {warm_up:?} of warm-up, in turn")
        }
    };
    let mut text = format!("{turns}; medians. Disk: {disk}. Accelerator: {accelerator}.\n");
    if report.rocksdb.is_none() {
        text.push_str(
            "spread: from the least to the most IOPS of the rounds; target CPU: what the target's \
             process spent for one command\n",
        );
    }
    if report.environment.accelerator == "tcg" {
        text.push_str(
            "Guests are emulated (no VT-x or AMD-V here): their rates compare shapes with each \
             other, and are no speeds of a disk\n",
        );
    }
    text + &foot(&[], &report.subjects)
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
    fn rocksdb_has_its_tables_and_emulation_is_named() {
        let mut report = crate::block::report::tests::with_rocksdb();
        report.environment.accelerator = "tcg".to_owned();
        let text = block_table(&report, false);
        assert!(text.contains("fillseq-c10") && !text.contains("readseq"), "{text}");
        let row = text.lines().find(|line| line.starts_with("host ")).unwrap();
        assert_eq!(row.split_whitespace().collect::<Vec<_>>(), ["host", "150", "100", "200"]);
        assert!(text.contains("Guests are emulated"), "{text}");
        report.environment.accelerator = "kvm".to_owned();
        assert!(!block_table(&report, false).contains("Guests are emulated"));
    }

    #[test]
    fn a_neighbour_has_a_table_of_its_own() {
        let mut report = report(&[("mapped", &[1_000]), ("mapped+x", &[1_500]), ("bare", &[600])]);
        assert!(!block_table(&report, false).contains("ratio"));
        let run = report.runs.iter_mut().find(|run| run.subject == "mapped+x").unwrap();
        run.measured.neighbour_commands = Some(7);
        let text = block_table(&report, false);
        let row = text.lines().skip_while(|line| !line.contains("ratio")).nth(1).unwrap();
        assert!(row.starts_with("mapped+x") && row.matches("1.50").count() == 2, "{text}");
    }

    #[test]
    fn large_numbers_are_short() {
        assert_eq!([999.0, 45_600.0, 2_345_678.0].map(thousands), ["999", "45.6 k", "2.35 M"]);
    }
}
