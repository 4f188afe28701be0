//! Formats a report of density as tables for a terminal.

use super::{DensityPoint, DensityReport, MODEL, MODELS, Quantity, Series, Starts, Unit};
use crate::duration::human;
use crate::figure::time;
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
    for series in Unit::ALL.map(|unit| report.series(unit)) {
        if !series.points.is_empty() {
            text.push_str(&memory(&series, colour));
            text.push_str(&told(&series));
            text.push_str(&idle(&series, colour));
        }
        text.push_str(&starts(&series, colour));
    }
    text + &notes(report)
}

/// Formats what one sandbox and one replica more take in both reports, and the differences of the
/// later one's figures.
pub fn density_differences(before: &DensityReport, now: &DensityReport) -> String {
    let mut text = String::new();
    for unit in Unit::ALL {
        let [was, is] = [before, now].map(|report| report.series(unit));
        for quantity in [Quantity::Pss, Quantity::Private, Quantity::Host] {
            let slope = |series: &Series| Some(mib(series.line(quantity)?.slope));
            if let (Some(was), Some(is)) = (slope(&was), slope(&is)) {
                let ([one, ..], part) = (unit.names(), quantity.name());
                text += &format!("one {one} more, {part}: {was} MiB before, {is} MiB now\n");
            }
        }
    }
    text + &now.compare(before)
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

fn memory(series: &Series, colour: bool) -> String {
    let mut headings = [""; 10];
    headings[1] = SPREAD;
    for (heading, quantity) in headings[2..].iter_mut().zip(Quantity::ALL) {
        *heading = quantity.name();
    }
    let mut rows: Vec<_> = series.points.iter().map(measured).collect();
    let line = |name: &str, figure: fn(&Line) -> f64| {
        let cell = |quantity| series.line(quantity).map_or(String::new(), |one| mib(figure(&one)));
        row(name.to_owned(), String::new(), cell)
    };
    if series.line(Quantity::Pss).is_some() {
        rows.push(line(&format!("one more{}", series.mark()), |line| line.slope));
        rows.push(line("  residual", |line| line.residual));
    }
    // The containers of a pod are bounded.
    let models: &[u32] = if series.unit == Unit::Sandbox { &MODELS } else { &[] };
    for count in models {
        if series.model(Quantity::Pss, *count).is_some() {
            let cell = |quantity| series.model(quantity, *count).map_or(String::new(), mib);
            let name = format!("{count}: model{}", series.mark());
            rows.push(row(name, String::new(), cell));
        }
    }
    titled(&format!("{}: MiB for each", series.unit.names()[1]), &headings, &rows, colour)
}

fn measured(point: &DensityPoint) -> [String; 10] {
    let (least, most) = point.range();
    // A single VMM has no spread.
    let spread =
        if least < most { format!("{}, {}", mib(least), mib(most)) } else { String::new() };
    row(format!("{}{}", point.count, point.marks()), spread, |quantity| mib(point.each(quantity)))
}

/// Formats what guests and the pool tell, with the most sandboxes.
fn told(series: &Series) -> String {
    let mut text = String::new();
    let Some(last) = series.points.last() else { return text };
    let DensityPoint { idle, .. } = last;
    let each = |bytes: u64| mib(bytes as f64 / f64::from(last.count.max(1)));
    if let Some(used) = idle.guest_used {
        text.push_str(&format!("a guest counts {} MiB as used\n", mib(used as f64)));
    }
    if let Some(pool) = idle.taken.pool {
        // A pool that is there for forks alone is seen while one has memory of it.
        let before = idle.before.pool.unwrap_or_default();
        let lent = each(pool.lent.saturating_sub(before.lent));
        let given = each(pool.given.saturating_sub(before.given));
        text.push_str(&format!("the pool has lent {lent} MiB for each, and given {given}\n"));
    }
    let swapped = [idle.taken.vmms, idle.taken.daemon, idle.taken.others].map(|one| one.swapped);
    let swapped = swapped.iter().sum::<u64>();
    if swapped > 0 {
        let swapped = mib(swapped as f64);
        text.push_str(&format!("SWAPPED: {swapped} MiB in all, which no figure has\n"));
    }
    text + "\n"
}

/// Formats processor time for each second of the period in which nothing was asked for.
fn idle(series: &Series, colour: bool) -> String {
    let used = |point: &DensityPoint| {
        let cpu = point.idle.cpu;
        let each = cpu.own() / u64::from(point.count.max(1));
        let [vmms, daemon, others, each, host] = [cpu.vmms, cpu.daemon, cpu.others, each, cpu.host]
            .map(|ns| time(point.idle.in_a_second(ns)));
        [point.count.to_string(), vmms, daemon, others, each, host]
    };
    let rows: Vec<_> = series.points.iter().map(used).collect();
    let title = format!("{}: processor time in a second", series.unit.names()[1]);
    titled(&title, &IDLE, &rows, colour) + "\n"
}

fn starts(series: &Series, colour: bool) -> String {
    if series.starts.is_empty() {
        return String::new();
    }
    let rows: Vec<_> = series.starts.iter().map(started).collect();
    titled(&format!("{}: starts", series.unit.names()[1]), &STARTS, &rows, colour) + "\n"
}

fn started((count, at_once, starts): &(u32, u32, Starts)) -> [String; 6] {
    let range = |sorted: &[u64]| match (sorted.first(), sorted.last()) {
        (Some(least), Some(most)) => format!("{}, {}", human(*least), human(*most)),
        _ => String::new(),
    };
    let shown = |sorted: Vec<u64>| [human(percentile(&sorted, 50)), range(&sorted)];
    let [[median, times], [all, lasts]] = [starts.times(), starts.lasts()].map(shown);
    [count.to_string(), at_once.to_string(), median, times, all, lasts]
}

/// Returns the lines that say what the figures are of.
fn notes(report: &DensityReport) -> String {
    let mut text = report.foot();
    let all = Unit::ALL.map(|unit| report.series(unit));
    if all.iter().flat_map(|series| &series.points).any(|point| !point.idle.settled) {
        text.push_str("BUSY: still at work when the memory was read\n");
    }
    let [sandboxes, _] = &all;
    if !sandboxes.points.is_empty() {
        text.push_str(match sandboxes.model(Quantity::Pss, MODEL) {
            Some(_) => "model: the line through the points, where nothing was measured\n",
            None => "no model: it needs three counts or more whose points are on a line\n",
        });
    }
    text + PAPER
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::density::report::tests::report;
    use crate::table::BOLD;
    use crate::turns::Fault;

    /// Makes the first reading one of a busy node, and the turn of two sandboxes void.
    pub fn spoil(report: &mut DensityReport) {
        report.runs[0].measured.idle.as_mut().unwrap().settled = false;
        report.faults.push(Fault {
            subject: "slipway-vmm".into(),
            load: "2 deployed".into(),
            round: 0,
            reason: "others used 50 %".into(),
            failed: false,
        });
    }

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
        assert!(text.contains("slipway-vmm: <&>\n"), "{text}");
        assert!(!text.contains("replicas") && !text.contains("VOID"), "{text}");
        assert!(density_table(&report(&[1], &[]), true).contains(BOLD));
    }

    #[test]
    fn few_points_have_no_model_and_what_a_busy_machine_spoils_is_marked() {
        let mut few = report(&[1, 2], &[]);
        spoil(&mut few);
        let text = density_table(&few, false);
        assert!(!text.contains("2000: model") && text.contains("no model: "), "{text}");
        assert!(line(&text, "1 BUSY").contains("11.00"), "{text}");
        assert!(line(&text, "2 VOID").contains("11.00"), "{text}");
        assert!(text.contains("first slipway-vmm with 2 deployed: others used 50 %\n"), "{text}");
        let mut more = report(&[1, 2, 4], &[]);
        spoil(&mut more);
        let text = density_table(&more, false);
        for name in ["one more VOID", "2000: model VOID"] {
            assert!(line(&text, name).contains("11.00"), "{text}");
        }
    }

    #[test]
    fn memory_and_starts_of_both_reports_are_compared() {
        let before = report(&[1, 2, 4], &[]);
        let mut now = report(&[1, 2], &[0, 1]);
        let two = now.runs.iter_mut().find(|run| run.load.to_string() == "2 deployed").unwrap();
        two.measured.idle.as_mut().unwrap().taken.vmms.private *= 2;
        let text = density_differences(&before, &now);
        assert!(text.contains("one sandbox more, PSS: 11.00 MiB before, 11.00 MiB now"), "{text}");
        assert!(text.contains("private: 10.00 MiB before, 28.00 MiB now"), "{text}");
        assert!(text.contains("2 deployed slipway-vmm, private "), "{text}");
        assert!(text.contains("2 deployed, 10 more at once slipway-vmm, all run "), "{text}");
        assert!(!text.contains("replica"), "{text}");
        assert!(density_differences(&report(&[8], &[]), &now).contains("nothing in common"));
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
        let idle = report.runs[2].measured.idle.as_mut().unwrap();
        idle.taken.vmm_range = (5, 5);
        idle.taken.pool = Some(crate::density::PoolMemory::default());
        let text = density_table(&report, false);
        assert!(line(&text, "0 ").contains("0.00"), "{text}");
        assert!(line(&text, "one more").contains("11.00"), "{text}");
        assert!(!text.contains("model") && text.contains("the pool has lent 0.00 MiB"), "{text}");
    }

    #[test]
    fn there_is_no_negative_zero() {
        assert_eq!((mib(-0.1), mib(-1_048_576.0)), ("0.00".into(), "-1.00".into()));
    }
}
