//! Formats a report of density as tables for a terminal.

use super::{Burst, DensityPoint, DensityReport, MODEL, MODELS, Quantity, Series};
use crate::duration::human;
use crate::line::Line;
use crate::statistics::percentile;
use crate::table::titled;

/// Headings of memory: those of [`Quantity::ALL`] follow the first two.
const SPREAD: &str = "least, most";
const IDLE: [&str; 6] = ["", "VMMs", "daemon", "others", "for each", "host"];
const STARTS: [&str; 6] = ["", "at once", "median", "least, most", "all run", "least, most"];

/// The words of RunD-V about its figures 6, 14 and 15 (sections IV.B and IX.B to D).
const PAPER: &str = "\
RunD-V, as published, on 104 processors and 384 GB:
  a sandbox of 128 MB takes less than 20 MB, with 100 of them; Kata's 94 MB and more (figures 6, 14)
  200 start at once in 1 s; 10 take 0.22 s longer beside 1000 (figure 15); more than 2500 fit
  8 containers in a sandbox are the most that is worth while (figure 6c)
";

/// Formats the memory of a sandbox with each number of them, the line through these points with the
/// model's value, what idle sandboxes use of the processors, and starts; the same for containers of
/// a pod. Headings are bold if `colour`.
pub fn density_table(report: &DensityReport, colour: bool) -> String {
    let mut text = String::new();
    for (name, series) in [("sandboxes", &report.sandboxes), ("replicas", &report.replicas)] {
        if series.points.is_empty() {
            continue;
        }
        text.push_str(&memory(name, series, colour));
        text.push_str(&told(series));
        text.push_str(&idle(name, series, colour));
        text.push_str(&starts(name, series, colour));
    }
    text + &notes(report)
}

/// Formats bytes as MiB.
pub(super) fn mib(bytes: f64) -> String {
    let rounded = (bytes / f64::from(1 << 20) * 100.0).round() / 100.0;
    // No "-0.00".
    format!("{:.2}", if rounded == 0.0 { 0.0 } else { rounded })
}

/// Returns a row of memory: its name, a spread, and a cell for each figure.
fn row(name: String, spread: String, cell: impl Fn(Quantity) -> String) -> [String; 10] {
    let [a, b, c, d, e, f, g, h] = Quantity::ALL.map(cell);
    [name, spread, a, b, c, d, e, f, g, h]
}

fn memory(name: &str, series: &Series, colour: bool) -> String {
    let mut headings = [""; 10];
    headings[1] = SPREAD;
    for (heading, quantity) in headings[2..].iter_mut().zip(Quantity::ALL) {
        *heading = quantity.name();
    }
    let mut rows: Vec<_> = series.points.iter().map(|point| measured(series, point)).collect();
    let line = |name: &str, figure: fn(&Line) -> f64| {
        let cell = |quantity| series.line(quantity).map_or(String::new(), |one| mib(figure(&one)));
        row(name.to_owned(), String::new(), cell)
    };
    if series.line(Quantity::Pss).is_some() {
        rows.push(line(&format!("one more{}", series.mark()), |line| line.slope));
        rows.push(line("  residual", |line| line.residual));
    }
    // The containers of a pod are bounded.
    let models: &[u32] = if name == "sandboxes" { &MODELS } else { &[] };
    for count in models {
        if series.model(Quantity::Pss, *count).is_some() {
            let cell = |quantity| series.model(quantity, *count).map_or(String::new(), mib);
            let name = format!("{count}: model{}", series.mark());
            rows.push(row(name, String::new(), cell));
        }
    }
    titled(&format!("{name}: MiB for each"), &headings, &rows, colour)
}

fn measured(series: &Series, point: &DensityPoint) -> [String; 10] {
    let (least, most) = series.range(point);
    // A single VMM has no spread.
    let spread =
        if least < most { format!("{}, {}", mib(least), mib(most)) } else { String::new() };
    let name = format!("{}{}", point.count, point.marks());
    row(name, spread, |quantity| mib(series.each(point, quantity)))
}

/// Formats what guests and the pool tell, with the most sandboxes.
fn told(series: &Series) -> String {
    let mut text = String::new();
    let Some(last) = series.points.last() else { return text };
    let each = |bytes: u64| mib(bytes as f64 / f64::from(last.count.max(1)));
    if let Some(used) = last.guest_used {
        text.push_str(&format!("a guest counts {} MiB as used\n", mib(used as f64)));
    }
    if let Some(pool) = last.taken.pool {
        // A pool that is there for forks alone is seen while one has memory of it.
        let before = series.before.pool.unwrap_or_default();
        let lent = each(pool.lent.saturating_sub(before.lent));
        let given = each(pool.given.saturating_sub(before.given));
        text.push_str(&format!("the pool has lent {lent} MiB for each, and given {given}\n"));
    }
    let swapped = last.taken.vmms.swapped + last.taken.daemon.swapped + last.taken.others.swapped;
    if swapped > 0 {
        let swapped = mib(swapped as f64);
        text.push_str(&format!("SWAPPED: {swapped} MiB in all, which no figure has\n"));
    }
    text + "\n"
}

/// Formats processor time for each second of the period in which nothing was asked for.
fn idle(name: &str, series: &Series, colour: bool) -> String {
    let used = |point: &DensityPoint| {
        let each_second = |ns: u64| {
            let of_a_second = u128::from(ns) * 1_000_000_000 / u128::from(point.idle_ns.max(1));
            u64::try_from(of_a_second).unwrap_or(u64::MAX)
        };
        let cell = |ns: u64| human(each_second(ns));
        let idle = point.idle;
        let each = idle.own() / u64::from(point.count.max(1));
        [
            point.count.to_string(),
            cell(idle.vmms),
            cell(idle.daemon),
            cell(idle.others),
            cell(each),
            cell(idle.host),
        ]
    };
    let rows: Vec<_> = series.points.iter().map(used).collect();
    titled(&format!("{name}: processor time in a second"), &IDLE, &rows, colour) + "\n"
}

fn starts(name: &str, series: &Series, colour: bool) -> String {
    let mut rows = Vec::new();
    for point in &series.points {
        rows.extend(point.bursts.iter().map(|burst| started(point.count, burst)));
    }
    if rows.is_empty() {
        return String::new();
    }
    titled(&format!("{name}: starts"), &STARTS, &rows, colour) + "\n"
}

fn started(count: u32, burst: &Burst) -> [String; 6] {
    let (times, lasts) = (burst.times(), burst.lasts());
    let range = |sorted: &[u64]| match (sorted.first(), sorted.last()) {
        (Some(least), Some(most)) => format!("{}, {}", human(*least), human(*most)),
        _ => String::new(),
    };
    [
        count.to_string(),
        burst.at_once.to_string(),
        human(percentile(&times, 50)),
        range(&times),
        human(percentile(&lasts, 50)),
        range(&lasts),
    ]
}

/// Returns the lines that say what the figures are of.
fn notes(report: &DensityReport) -> String {
    let begun = if report.forks { "forks of a template" } else { "booted" };
    let begun = if report.is_hollow() { "no guest code runs" } else { begun };
    let memory = report.memory_bytes >> 20;
    let mut text = format!("{}, guests of {memory} MiB, {begun}\n", report.engine);
    let points = || report.sandboxes.points.iter().chain(&report.replicas.points);
    if points().any(|point| !point.settled) {
        text.push_str("BUSY: still at work when the memory was read\n");
    }
    for point in points() {
        for reason in &point.void {
            text.push_str(&format!("VOID: {}: {reason}\n", point.count));
        }
    }
    if !report.sandboxes.points.is_empty() {
        text.push_str(match report.sandboxes.model(Quantity::Pss, MODEL) {
            Some(_) => "model: the line through the points, where nothing was measured\n",
            None => "no model: it needs three counts or more whose points are on a line\n",
        });
    }
    text.push_str(PAPER);
    if !report.stopped.is_empty() {
        text.push_str(&format!("STOPPED: {}\n", report.stopped));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::density::report::tests::report;
    use crate::table::BOLD;

    fn line<'a>(text: &'a str, start: &str) -> &'a str {
        let found = text.lines().find(|line| line.starts_with(start));
        found.unwrap_or_else(|| panic!("{start}: {text}"))
    }

    #[test]
    fn a_sandbox_has_its_parts_and_the_line_a_model() {
        let text = density_table(&report(&[1, 2, 4], &[]), false);
        let headings = line(&text, "sandboxes: MiB");
        assert!(headings.ends_with("mapped  others   host"), "{text}");
        for part in ["10.00, 13.00", "11.00", "7.00", "3.00", "0.00"] {
            assert!(line(&text, "4 ").contains(part), "{part}: {text}");
        }
        assert!(line(&text, "one more").contains("11.00"), "{text}");
        assert!(line(&text, "  residual").contains("0.00"), "{text}");
        for count in MODELS {
            assert!(line(&text, &format!("{count}: model")).contains("11.00"), "{text}");
        }
        assert!(text.contains("less than 20 MB, with 100 of them"), "{text}");
        assert!(text.contains("slipway-vmm, guests of 256 MiB, booted\n"), "{text}");
        assert!(!text.contains("replicas") && !text.contains("STOPPED"), "{text}");
        assert!(density_table(&report(&[1], &[]), true).contains(BOLD));
    }

    #[test]
    fn few_points_have_no_model_and_the_reason_for_the_end_is_shown() {
        let mut few = report(&[1, 2], &[]);
        few.stopped = "4 more do not fit".into();
        few.sandboxes.points[1].settled = false;
        few.sandboxes.points[0].void = vec!["idle: others used 50 %".into()];
        let text = density_table(&few, false);
        assert!(!text.contains("2000: model") && text.contains("no model: "), "{text}");
        assert!(text.contains("STOPPED: 4 more do not fit\n"), "{text}");
        assert!(line(&text, "2 BUSY").contains("11.00"), "{text}");
        assert!(line(&text, "1 VOID").contains("11.00"), "{text}");
        assert!(text.contains("VOID: 1: idle: others used 50 %\n"), "{text}");
        let mut more = report(&[1, 2, 4], &[]);
        more.sandboxes.points[1].void = vec!["idle: others used 50 %".into()];
        let text = density_table(&more, false);
        for name in ["one more VOID", "2000: model VOID"] {
            assert!(line(&text, name).contains("11.00"), "{text}");
        }
    }

    #[test]
    fn idle_time_is_of_a_second_and_starts_have_their_spread() {
        let text = density_table(&report(&[2], &[]), false);
        // 100 ms in 10 s, of two.
        let idle: Vec<_> = text.lines().skip_while(|line| !line.contains("processor")).collect();
        assert!(idle[1].contains("10.0 ms") && idle[1].contains("5.00 ms"), "{text}");
        let starts: Vec<_> = text.lines().skip_while(|line| !line.contains("starts")).collect();
        assert!(starts[1].contains("1.00 ms, 1.00 ms"), "{text}");
        assert!(starts[2].contains("5.00 ms") && starts[2].contains("10.0 ms"), "{text}");
    }

    #[test]
    fn replicas_begin_with_an_empty_pod() {
        let mut report = report(&[], &[0, 1, 2]);
        report.replicas.points[2].taken.vmm_range = (5, 5);
        report.replicas.points[2].taken.pool = Some(crate::density::PoolMemory::default());
        report.environment.accelerator = "hollow".into();
        let text = density_table(&report, false);
        assert!(line(&text, "0 ").contains("0.00"), "{text}");
        assert!(line(&text, "one more").contains("11.00"), "{text}");
        assert!(!text.contains("model") && text.contains("no guest code runs"), "{text}");
    }

    #[test]
    fn there_is_no_negative_zero() {
        assert_eq!((mib(-0.1), mib(-1_048_576.0)), ("0.00".into(), "-1.00".into()));
    }
}
