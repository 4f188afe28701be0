//! Formats a report of memory as tables for a terminal.

use super::report::READY;
use super::{MemoryLoad, MemoryReport, PageSize};
use crate::line::Line;
use crate::table::titled;
use crate::vmm::VmmLoad;

/// Formats a table for each load of `report`. Below the tables are the growth of the time to ready
/// with the size of memory, loads that this host cannot run, turns that failed, and a description
/// of each subject. The text ends with a newline. Headings are bold if `colour`.
pub fn memory_table(report: &MemoryReport, colour: bool) -> String {
    let tables = report.figure_tables(colour, |_| String::new());
    tables + &table_of_growth(report, colour) + &report.foot()
}

/// Formats the time in µs that each further MiB of memory adds to the time to ready. The table has
/// a row for each subject and size of pages that was measured with at least two sizes of memory.
/// The text is empty without rows.
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
    if rows.is_empty() {
        return String::new();
    }
    let headings = ["", "memory", "µs for a MiB"];
    titled("growth of the time to ready", &headings, &rows, colour) + "\n"
}

/// Returns points of sizes of memory in MiB and median times to ready in µs, in ascending order of
/// sizes.
fn times_to_ready(report: &MemoryReport, subject: &str, page: PageSize) -> Vec<(f64, f64)> {
    let point = |load: &MemoryLoad| match *load {
        MemoryLoad::Give { bytes, page: its } if its == page => {
            let ready = report.over_rounds(load, subject, &READY)?;
            Some(((bytes >> 20) as f64, ready.median / 1000.0))
        }
        _ => None,
    };
    let mut points: Vec<_> = report.plan.loads.iter().filter_map(point).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::report::tests::report;
    use crate::table::BOLD;
    use crate::turns::LeftOut;

    /// Returns the first line that begins with `name`.
    fn line<'a>(text: &'a str, name: &str) -> &'a str {
        text.lines().find(|line| line.starts_with(name)).unwrap()
    }

    #[test]
    fn rows_are_subjects() {
        let mut report = report(&["128M-4k"], &[("new", &[100]), ("pool", &[150, 50, 60])]);
        let (subject, load) = ("pre10".to_owned(), "128M-4k".to_owned());
        report.left_out.push(LeftOut { subject, load, reason: "needs more".into() });
        let text = memory_table(&report, false);
        for part in ["60.0 µs", "167%", "0.600", "76.8 ms"] {
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
