//! Formats a report of starts by several ways for a terminal.

use std::fmt::Write;

use super::arm::published;
use super::curves::{MEAN, curves};
use super::singles::singles_table;
use super::{Arm, ArmsReport};
use crate::duration::human;
use crate::line::Line;
use crate::panels::CurvePoint;
use crate::table::{table, titled};
use crate::turns::fault_lines;

/// The headings; the first is replaced by the number of sandboxes.
const HEADINGS: [&str; 8] =
    ["", "mean", "least, most", "p50", "p99", "functions", "CPU each", "to none: mean, p99"];

/// Times of whole starts with 200 at once, on the papers' machines.
const PAPERS: &str = "\
200 at once, as published:
  FastIOV: 16.2 s on average with VFIO before it (section 5), 4.0 s without a network (computed)
  FastIOV's stages with VFIO, of the average (table 1): cgroup 2.9 %, dma-ram 13.0 %,
    virtiofs 13.3 %, dma-image 5.6 %, vfio-dev 48.1 %, vf-driver 3.4 %
  RunD-V, until all run (figure 13a): 1 s; Kata with templates 2.98 s, with QEMU 6.85 s, with
    Firecracker 47.6 s
";

/// Formats for each number of sandboxes the figures of each way, and those of single starts; then
/// the stages of each way, or with several numbers of sandboxes how times grow. Headings are bold
/// if `colour`.
pub fn arms_table(report: &ArmsReport, colour: bool) -> String {
    let mut text = String::new();
    for point in &report.points {
        let (one, name) = (report.at(*point), report.name_of(*point));
        let gap = if text.is_empty() { "" } else { "\n" };
        text.push_str(gap);
        text.push_str(&titled(&name, &HEADINGS, &rows(&one), colour));
        let singles = singles_table(&one, &name, colour);
        if !singles.is_empty() {
            let _ = write!(text, "\n{singles}");
        }
    }
    text.push_str(&fault_lines(&report.faults));
    text.push_str(&footnote(report));
    text.push_str(PAPERS);
    if report.points.len() > 1 {
        return text + &growth_table(report, colour);
    }
    for arm in &report.arms {
        let stages = table(&report.stages(*arm), colour);
        if !stages.is_empty() {
            let _ = write!(text, "\n{}: {}\n{stages}", arm.name(), arm.about());
        }
    }
    text
}

/// Returns the rows of a report with one point, with the paper's ratios below.
fn rows(report: &ArmsReport) -> Vec<[String; 8]> {
    let mut rows = Vec::new();
    for arm in &report.arms {
        let Some(one) = report.figures(*arm) else { continue };
        let ratios = match (one.mean_ratio, one.p99_ratio) {
            (Some(mean), Some(p99)) => format!("{mean:.2}, {p99:.2}"),
            _ => String::new(),
        };
        rows.push([
            arm.name().to_owned(),
            human(one.mean_ns),
            format!("{}, {}", human(one.mean_range_ns.0), human(one.mean_range_ns.1)),
            human(one.p50_ns),
            human(one.p99_ns),
            human(one.functions_ns),
            human(one.busy_ns),
            ratios,
        ]);
    }
    for one in published(&report.arms) {
        let p99 = one.p99.map_or("-".to_owned(), |p99| format!("{p99:.2}"));
        let [a, b, c, d, e, f] = std::array::from_fn(|_| String::new());
        rows.push([one.name.to_owned(), a, b, c, d, e, f, format!("{:.2}, {p99}", one.mean)]);
    }
    rows
}

/// The headings of [`growth_table`]; the first is replaced by what grows.
const GROWTH: [&str; 5] = ["", "from", "to", "ratio", "for each more"];

/// Formats how the mean time of each way grows with the number of sandboxes, and with their memory,
/// as far as there are several. The text is empty if there is one of both.
fn growth_table(report: &ArmsReport, colour: bool) -> String {
    let mut text = String::new();
    for curves in curves(report, MEAN) {
        let row = |(arm, points): &(Arm, Vec<CurvePoint>)| {
            let points: Vec<_> = points.iter().map(|point| (point.at, point.value)).collect();
            let (first, last) = (points.first()?, points.last()?);
            let line = Line::through(&points)?;
            let show = |ns: f64| human(ns.max(0.0) as u64);
            let slope = if line.slope < 0.0 { "less".to_owned() } else { show(line.slope) };
            let ratio = format!("{:.2}", last.1 / first.1.max(1.0));
            let [from, to] = [first, last].map(|point| format!("{}: {}", point.0, show(point.1)));
            Some([arm.name().to_owned(), from, to, ratio, slope])
        };
        let rows: Vec<_> = curves.lines.iter().filter_map(row).collect();
        let _ = write!(text, "\n{}", titled(&curves.growth(), &GROWTH, &rows, colour));
    }
    text
}

/// Returns the lines that say what the figures are of.
pub(super) fn footnote(report: &ArmsReport) -> String {
    let hollow = if report.is_hollow() {
        "hollow sandboxes: no guest code runs; functions are driven by Slipway's own drivers\n"
    } else {
        ""
    };
    let rounds = report.rounds.iter().map(|one| one.round + 1).max().unwrap_or(0);
    let has_none = report.arms.contains(&Arm::None);
    let ratios = if has_none { "; ratios are medians of the rounds" } else { "" };
    let network = match report.waits {
        true => "a container begins when its interface has sent a frame",
        false => "the network comes up beside the container, as in FastIOV",
    };
    let volumes = match report.volumes {
        0 => String::new(),
        1 => "each with a volume\n".to_owned(),
        more => format!("each with {more} volumes\n"),
    };
    format!("{hollow}{network}\n{volumes}{rounds} rounds, the ways in turn{ratios}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arms::report::tests::{report, two_points};

    #[test]
    fn figures_are_beside_the_papers() {
        let none = (Arm::None, [[100, 100], [200, 200]]);
        let report = report(&[none, (Arm::Slipway, [[100, 140], [240, 280]])]);
        let text = arms_table(&report, false);
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
        assert!(line("slipway").ends_with("1.25, 1.40"), "{text}");
        assert!(line("FastIOV").ends_with("1.39, 1.12"), "{text}");
        assert!(line("hollow sandboxes").contains("no guest code"), "{text}");
        assert!(text.contains("2 rounds, the ways in turn"), "{text}");
        assert!(text.contains("none: no network\n"), "{text}");
        assert!(text.contains("(table 1): cgroup 2.9 %"), "{text}");
        assert!(!arms_table(&report, true).contains("pool:"));
    }
    #[test]
    fn several_numbers_of_sandboxes_have_a_table_each_and_their_growth() {
        let none = (Arm::None, [[100, 100], [100, 100]]);
        let both = two_points(&[none, (Arm::Macvtap, [[200, 200], [200, 200]])]);
        let text = arms_table(&both, false);
        let lines = |start: &str| text.lines().filter(|line| line.starts_with(start)).count();
        assert_eq!((lines("2 at once"), lines("4 at once")), (1, 1), "{text}");
        assert_eq!((lines("IPvtap, as published"), lines("macvtap ")), (2, 3), "{text}");
        let growth = text.lines().find(|line| line.contains("for each more")).unwrap();
        assert!(growth.starts_with("mean time over sandboxes at once"), "{text}");
        let last = text.lines().last().unwrap();
        assert!(last.contains("2: 200 ns") && last.contains("4: 400 ns"), "{text}");
        assert!(last.contains("2.00") && last.ends_with("100 ns"), "{text}");
    }

    #[test]
    fn volumes_are_told() {
        let mut report = report(&[(Arm::None, [[100, 100], [200, 200]])]);
        assert!(!arms_table(&report, false).contains("volume"));
        report.volumes = 2;
        assert!(arms_table(&report, false).contains("each with 2 volumes\n"));
    }
}
