//! Formats statistics as a table for a terminal.

use crate::duration::human;
use crate::statistics::{StageStatistics, Statistics};

const HEADINGS: [&str; 6] = ["stage", "mean", "p50", "p99", "share", "share of p99"];

pub(crate) const BOLD: &str = "\x1b[1m";
pub(crate) const DIM: &str = "\x1b[2m";
pub(crate) const PLAIN: &str = "\x1b[0m";

/// Formats `statistics` as aligned text, with one line for each stage, each ended by a newline.
/// Headings are bold if `colour`. The text is empty if nothing was measured.
pub fn table(statistics: &Statistics, colour: bool) -> String {
    if statistics.total.count == 0 {
        return String::new();
    }
    let mut rows: Vec<[String; 6]> = statistics.stages.iter().map(cells).collect();
    if statistics.unexplained.p99_ns > 0 {
        rows.push(cells(&statistics.unexplained));
    }
    rows.push(cells(&statistics.total));
    let total = rows.len() - 1;

    let mut text = grid(&HEADINGS, &rows, |row, line| match row {
        None if colour => format!("{BOLD}{line}{PLAIN}"),
        Some(row) if colour && row == total => format!("{BOLD}{line}{PLAIN}"),
        _ => line,
    });
    text.push_str(&footnote(statistics));
    text
}

fn cells(stage: &StageStatistics) -> [String; 6] {
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    [
        stage.name.clone(),
        human(stage.mean_ns),
        human(stage.p50_ns),
        human(stage.p99_ns),
        percent(stage.share),
        percent(stage.tail_share),
    ]
}

fn footnote(statistics: &Statistics) -> String {
    let count = statistics.total.count;
    let shares: f64 = statistics.stages.iter().map(|stage| stage.share).sum();
    let mut note = format!(
        "{count} sandbox{}; all ready {} after the start (p50 {})",
        if count == 1 { "" } else { "es" },
        human(statistics.ready.p99_ns),
        human(statistics.ready.p50_ns),
    );
    if count >= 100 {
        note = note.replacen("all", "99 % of them", 1);
    }
    if shares > 1.005 {
        note.push_str("\nstages run side by side, so their shares add up to more than 100 %");
    }
    note + "\n"
}

/// Lays `rows` out below `headings`, the first of which is replaced by `title`. Headings are bold
/// if `colour`.
pub(crate) fn titled<R: AsRef<[String]>>(
    title: &str,
    headings: &[&str],
    rows: &[R],
    colour: bool,
) -> String {
    let headings: Vec<&str> = [title].into_iter().chain(headings.iter().copied().skip(1)).collect();
    grid(&headings, rows, |row, line| match row {
        None if colour => format!("{BOLD}{line}{PLAIN}"),
        _ => line,
    })
}

/// Lays `rows` out below `headings`, with the first column aligned to the left and the others to
/// the right. `finish` decorates a line, and gets the row's number, or `None` for the headings.
pub(crate) fn grid<R: AsRef<[String]>>(
    headings: &[&str],
    rows: &[R],
    finish: impl Fn(Option<usize>, String) -> String,
) -> String {
    let headings: Vec<String> = headings.iter().map(|&heading| heading.to_owned()).collect();
    let mut widths = vec![0_usize; headings.len()];
    for row in rows.iter().map(AsRef::<[String]>::as_ref).chain([&headings[..]]) {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: &[String]| {
        let cells = cells.iter().zip(&widths).enumerate();
        let padded = cells.map(|(at, (cell, &width))| match at {
            0 => format!("{cell:<width$}"),
            _ => format!("  {cell:>width$}"),
        });
        padded.collect::<String>()
    };
    let mut text = finish(None, line(&headings)) + "\n";
    for (number, row) in rows.iter().enumerate() {
        text.push_str(&finish(Some(number), line(row.as_ref())));
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;
    use crate::statistics::statistics;

    #[test]
    fn columns_are_aligned() {
        let text = table(&statistics(&samples::four()), false);
        let lines: Vec<&str> = text.lines().collect();
        let width = lines[0].chars().count();
        let total = lines.iter().position(|line| line.starts_with("total")).unwrap();
        let body = &lines[..=total];
        assert!(body.iter().all(|line| line.chars().count() == width), "{text}");
        assert!(lines[0].starts_with("stage"));
        assert_eq!(body.len(), 13, "{text}");
        assert!(text.contains("100.0 %"), "{text}");
        assert!(!text.contains('\x1b'));
    }

    #[test]
    fn colour_only_when_asked_and_nothing_for_nothing() {
        let statistics = statistics(&samples::four());
        assert!(table(&statistics, true).contains("\x1b[1m"));
        assert_eq!(table(&crate::statistics(&[]), false), "");
    }

    #[test]
    fn a_gap_is_shown_as_unexplained() {
        let mut timeline = slipway_telemetry::Timeline::new("a");
        timeline.record("vmm", 0, 1_000);
        timeline.record("kernel", 2_000, 4_000);
        let text = table(&statistics(&[timeline]), false);
        assert!(text.contains("unexplained"), "{text}");
        assert!(text.contains("1 sandbox; all ready 4.00 µs after"), "{text}");
    }
}
