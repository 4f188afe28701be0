//! Formats a report of memory as tables for a terminal.

use super::{LeftOut, MemoryFigures, MemoryLoad, MemoryReport, PageSize, Quantity};
use crate::duration::human;
use crate::line::Line;
use crate::table::titled;
use crate::turns::foot;
use crate::vmm::VmmLoad;

/// Formats a table for each load of `report`: medians over rounds and what they range over, a row
/// for each subject. Below are the growth of the time to ready with memory, what this host cannot
/// run, and turns that failed; a newline at the end. Headings are bold if `colour`.
pub fn memory_table(report: &MemoryReport, colour: bool) -> String {
    let mut text = String::new();
    for load in &report.plan.loads {
        text.push_str(&match load {
            MemoryLoad::Give { .. } => table_of_given(report, load, colour),
            MemoryLoad::Set { .. } => table_of_set(report, load, colour),
            MemoryLoad::Gate(_) => table_of_accesses(report, load, colour),
        });
    }
    text.push_str(&table_of_growth(report, colour));
    text.extend(report.left_out.iter().map(left_out_line));
    text + &foot(&report.faults, &report.subjects)
}

/// Formats the table of a load that gives memory: when it is ready, and the touch of its pages.
fn table_of_given(report: &MemoryReport, load: &MemoryLoad, colour: bool) -> String {
    let (mut first_ready, mut first_touch) = (None, None);
    let row = |name: &String| {
        let ready = report.figures(load, name, Quantity::Ready)?;
        let touch = report.figures(load, name, Quantity::Touch)?;
        let [r0, r1, r2, r3] = cells(&ready, &mut first_ready);
        let [t0, t1, t2, t3] = cells(&touch, &mut first_touch);
        Some([name.clone(), r0, r1, r2, r3, t0, t1, t2, t3])
    };
    let headings =
        ["", "ready", "least", "most", "of the first", "touch", "least", "most", "of the first"];
    table_of_load(report, load, &headings, row, colour)
}

/// Formats the table of a load that touches a working set: its times, and the memory of its own.
fn table_of_set(report: &MemoryReport, load: &MemoryLoad, colour: bool) -> String {
    let mut firsts = [None; 3];
    let row = |name: &String| {
        let mut row = vec![name.clone()];
        for (quantity, first) in Quantity::of(load).iter().zip(&mut firsts) {
            let [median, _, _, ratio] = cells(&report.figures(load, name, *quantity)?, first);
            row.extend([median, ratio]);
        }
        row.push(format!("{:.2}", report.own_bytes(load, name)? / f64::from(1 << 20)));
        row.try_into().ok()
    };
    let headings =
        ["", "ready", "of the first", "touch", "of the first", "fault", "of the first", "own MiB"];
    table_of_load(report, load, &headings, row, colour)
}

/// Formats the table of a load that accesses memory through a gate.
fn table_of_accesses(report: &MemoryReport, load: &MemoryLoad, colour: bool) -> String {
    let mut first = None;
    let row = |name: &String| {
        let [a0, a1, a2, a3] = cells(&report.figures(load, name, Quantity::Access)?, &mut first);
        Some([name.clone(), a0, a1, a2, a3])
    };
    let headings = ["", "access", "least", "most", "of the first"];
    table_of_load(report, load, &headings, row, colour)
}

/// Formats a median, its range, and its ratio to the median of the first row, which is in `first`
/// from that row on.
fn cells(figures: &MemoryFigures, first: &mut Option<f64>) -> [String; 4] {
    let MemoryFigures { median_ns, range_ns: (least, most) } = *figures;
    let ratio = median_ns / first.get_or_insert(median_ns).max(1.0);
    [time(median_ns), time(least), time(most), format!("{ratio:.3}")]
}

/// Formats a time of `ns` nanoseconds: below a microsecond with one more digit, since differences
/// of accesses are small.
pub(super) fn time(ns: f64) -> String {
    if ns < 1000.0 { format!("{ns:.1} ns") } else { human(ns as u64) }
}

/// Formats the table of a load: a row for each subject that has one.
fn table_of_load<const N: usize>(
    report: &MemoryReport,
    load: &MemoryLoad,
    headings: &[&str; N],
    row: impl FnMut(&String) -> Option<[String; N]>,
    colour: bool,
) -> String {
    let names = report.subjects.iter().map(|subject| &subject.name);
    let rows: Vec<_> = names.filter_map(row).collect();
    titled_unless_empty(&load.to_string(), headings, &rows, colour)
}

/// Formats a table and an empty line, or nothing if there are no rows.
fn titled_unless_empty<const N: usize>(
    title: &str,
    headings: &[&str; N],
    rows: &[[String; N]],
    colour: bool,
) -> String {
    if rows.is_empty() { String::new() } else { titled(title, headings, rows, colour) + "\n" }
}

/// Formats how much longer memory takes to be ready for each MiB that there is more of it: a row
/// for each subject and size of pages with at least two sizes of memory.
fn table_of_growth(report: &MemoryReport, colour: bool) -> String {
    let mut rows = Vec::new();
    for page in [PageSize::Base, PageSize::Huge] {
        for subject in &report.subjects {
            let points = times_to_ready(report, &subject.name, page);
            let (Some(first), Some(last)) = (points.first(), points.last()) else { continue };
            let Some(line) = Line::through(&points) else { continue };
            let size = |mib: f64| VmmLoad { memory: (mib as u64) << 20 };
            rows.push([
                format!("{} {}", subject.name, page.name()),
                format!("{} to {}", size(first.0), size(last.0)),
                format!("{:.3}", line.slope),
            ]);
        }
    }
    let headings = ["", "memory", "µs for a MiB"];
    titled_unless_empty("growth of the time to ready", &headings, &rows, colour)
}

/// Returns sizes of memory in MiB and the medians of the time to ready in µs, by size.
fn times_to_ready(report: &MemoryReport, subject: &str, page: PageSize) -> Vec<(f64, f64)> {
    let point = |load: &MemoryLoad| match *load {
        MemoryLoad::Give { bytes, page: its } if its == page => {
            let ready = report.figures(load, subject, Quantity::Ready)?;
            Some(((bytes >> 20) as f64, ready.median_ns / 1000.0))
        }
        _ => None,
    };
    let mut points: Vec<_> = report.plan.loads.iter().filter_map(point).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

fn left_out_line(out: &LeftOut) -> String {
    format!("LEFT OUT: {} with {}: {}\n", out.subject, out.load, out.reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::report::tests::report;
    use crate::table::BOLD;

    fn line<'a>(text: &'a str, name: &str) -> &'a str {
        text.lines().find(|line| line.starts_with(name)).unwrap()
    }

    #[test]
    fn rows_are_subjects() {
        let mut report = report(&["128M-4k"], &[("new", &[100]), ("pool", &[150, 50, 60])]);
        let (subject, load) = ("pre10".to_owned(), report.plan.loads[0]);
        report.left_out.push(LeftOut { subject, load, reason: "needs more".into() });
        let text = memory_table(&report, false);
        for part in ["60.0 µs", "50.0 µs", "150 µs", "0.600", "76.8 ms"] {
            assert!(line(&text, "pool").contains(part), "{part}: {text}");
        }
        assert!(text.contains("LEFT OUT: pre10 with 128M-4k: needs more\n"), "{text}");
        assert!(text.contains("pool: <&>\n") && !text.contains("growth"), "{text}");
        assert!(memory_table(&report, true).contains(BOLD));
    }

    #[test]
    fn small_differences_of_an_access_are_seen() {
        let report = report(&["gate-block"], &[("plain", &[300]), ("late", &[303])]);
        let text = memory_table(&report, false);
        assert!(line(&text, "late").contains("303.0 ns"), "{text}");
        assert!(line(&text, "late").ends_with("1.010"), "{text}");
    }

    #[test]
    fn a_working_set_has_its_own_memory() {
        let report = report(&["512M-256p"], &[("private", &[2000]), ("fork", &[3000, 1000, 4000])]);
        let text = memory_table(&report, false);
        for part in ["3.00 ms", "768 µs", "3.00 µs", "1.500"] {
            assert!(line(&text, "fork").contains(part), "{part}: {text}");
        }
        assert!(line(&text, "private").ends_with("1.00"), "{text}");
    }

    #[test]
    fn growth_is_a_slope_over_sizes_of_the_same_pages() {
        let loads = ["1G-4k", "128M-4k", "128M-2m"];
        let text = memory_table(&report(&loads, &[("pool", &[100])]), false);
        let grown = line(&text, "pool 4k");
        assert!(grown.contains("128M to 1G") && grown.ends_with("0.000"), "{text}");
        assert!(!text.contains("pool 2m"), "{text}");
    }
}
