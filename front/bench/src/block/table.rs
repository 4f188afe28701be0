//! Formats a report of disks as tables for a terminal.

use std::time::Duration;

use super::measure::{BlockFigure, NEIGHBOUR, P50, P99, P99_AT_LEAST};
use super::{BlockReport, RocksReport, Workload};
use crate::duration::thousands;
use crate::figure::time;
use crate::table::titled;
use crate::turns::foot;

/// Formats a table for each load of `report`, then those of RocksDB and of neighbours, with a
/// newline at the end. Headings are bold if `colour`.
pub fn block_table(report: &BlockReport, colour: bool) -> String {
    let mut text = report.figure_tables(colour, |_| String::new());
    if let Some(rocksdb) = &report.extra.rocksdb {
        text.push_str(&rocks_table(report, rocksdb, colour));
    }
    text + &neighbour_table(report, colour) + &report.obstacles() + &notes(report)
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
    for load in &report.plan.loads {
        let loud = |name: &String| report.over_rounds(load, name, &NEIGHBOUR);
        let rows = report.rows(|name| beside_row(report, load, name));
        if rows.is_empty() || report.rows(loud).is_empty() {
            continue;
        }
        text.push_str(&titled(&format!("{load}, alone and"), &BESIDE, &rows, colour));
        text.push_str(
            "p99 \u{2265}: up to the client's last look that found nothing; what p99 has beyond \
             it may be the client's own, which puts both loads on\n\n",
        );
    }
    text
}

/// Formats the row of a neighbour: the quiet client alone, beside it, and the ratio.
fn beside_row(report: &BlockReport, load: &Workload, name: &str) -> Option<[String; 11]> {
    let (alone, _) = name.split_once('+')?;
    let three = |figure: &BlockFigure| {
        let median = |subject| Some(report.over_rounds(load, subject, figure)?.median);
        let (alone, beside) = (median(alone)?, median(name)?);
        Some([time(alone), time(beside), format!("{:.2}", beside / alone.max(1.0))])
    };
    let none = || "-".to_owned();
    let ([a, b, c], [d, e, f]) = (three(&P50)?, three(&P99)?);
    let [g, h, i] = three(&P99_AT_LEAST).unwrap_or_else(|| [none(), none(), none()]);
    let loud = report.shown(load, name, &NEIGHBOUR).unwrap_or_else(none);
    Some([name.to_owned(), a, b, c, d, e, f, g, h, i, loud])
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

fn notes(report: &BlockReport) -> String {
    let plan = &report.plan;
    let (rounds, plural) = (plan.rounds, if plan.rounds == 1 { "" } else { "s" });
    let (disk, accelerator) = (&report.extra.disk, &report.environment.accelerator);
    let turns = match report.extra.rocksdb {
        Some(_) => format!("{rounds} round{plural}, in turn"),
        None => {
            let time = plan.time();
            let warm_up = plan.times.map_or(Duration::ZERO, |times| times.warm_up);
            format!("{rounds} turn{plural} of {time:?} each after {warm_up:?} of warm-up, in turn")
        }
    };
    let mut text = format!("{turns}; medians. Disk: {disk}. Accelerator: {accelerator}.\n");
    if report.extra.rocksdb.is_none() {
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
}
