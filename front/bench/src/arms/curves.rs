//! Figures over the number of sandboxes that start at once, and over their memory, as FastIOV's
//! figure 13 has them.

use anyhow::Result;

use super::{Arm, ArmFigures, ArmsReport, Point};
use crate::duration::human;
use crate::panels::{CurvePoint, Panel, panels};

/// A figure of all ways over what grows.
pub(super) struct Curves {
    /// The name of the number that grows: "sandboxes at once", or "memory of each, MiB".
    pub over: &'static str,
    /// The number that stays the same, in words; empty if it does so in the whole report.
    pub with: String,
    /// For each way, in the report's order, the number that grows and the figure in ns.
    pub lines: Vec<(Arm, Vec<CurvePoint>)>,
}

/// A figure of a way, with the least and the greatest of the rounds, ns.
pub(super) type Figure = fn(&ArmFigures) -> (u64, (u64, u64));

/// The mean time of a sandbox.
pub(super) const MEAN: Figure = |one| (one.mean_ns, one.mean_range_ns);

/// The number that grows, and the one that stays the same.
type Axis = (&'static str, fn(Point) -> f64, fn(Point) -> f64, fn(f64) -> String);

const AXES: [Axis; 2] = [
    ("sandboxes at once", count, mib, |mib| format!("{mib} MiB each")),
    ("memory of each, MiB", mib, count, |count| format!("{count} at once")),
];

fn count(point: Point) -> f64 {
    point.count.into()
}

fn mib(point: Point) -> f64 {
    point.memory_bytes as f64 / f64::from(1 << 20)
}

impl Curves {
    /// Returns the title of a table of growth.
    pub fn growth(&self) -> String {
        format!("mean time over {}{}", self.over, self.behind())
    }

    fn behind(&self) -> String {
        if self.with.is_empty() { String::new() } else { format!(", {}", self.with) }
    }
}

/// Returns the curves of a figure: over the number of sandboxes for each memory, and over the
/// memory for each number, as far as there are several.
pub(super) fn curves(report: &ArmsReport, figure: Figure) -> Vec<Curves> {
    AXES.into_iter().flat_map(|axis| over(report, axis, figure)).collect()
}

fn over(report: &ArmsReport, axis: Axis, figure: Figure) -> Vec<Curves> {
    let (name, grows, stays, describe) = axis;
    let mut all: Vec<f64> = report.points.iter().map(|point| stays(*point)).collect();
    all.sort_by(f64::total_cmp);
    all.dedup();
    let mut found = Vec::new();
    for same in &all {
        let points = report.points.iter().filter(|point| stays(**point) == *same);
        let mut parts: Vec<_> = points.map(|point| (grows(*point), report.at(*point))).collect();
        if parts.len() < 2 {
            continue;
        }
        parts.sort_by(|one, other| one.0.total_cmp(&other.0));
        let line = |arm: &Arm| {
            let point = |(at, part): &(f64, ArmsReport)| {
                let (ns, (least, most)) = figure(&part.figures(*arm)?);
                Some(CurvePoint { at: *at, value: ns as f64, range: (least as f64, most as f64) })
            };
            let points: Vec<CurvePoint> = parts.iter().filter_map(point).collect();
            (*arm, points)
        };
        let lines = report.arms.iter().map(line).collect();
        let with = if all.len() > 1 { describe(*same) } else { String::new() };
        found.push(Curves { over: name, with, lines });
    }
    found
}

/// Draws a report with several points: mean time, 99th percentile and processor time of each
/// sandbox over the number of them, and over their memory.
///
/// # Errors
/// If nothing was measured.
pub(super) fn curves_plot(report: &ArmsReport, title: &str) -> Result<String> {
    let shown: [(&str, Figure); 3] = [
        ("mean time", MEAN),
        ("99th percentile", |one| (one.p99_ns, one.p99_range_ns)),
        ("processor time of each", |one| (one.busy_ns, one.busy_range_ns)),
    ];
    let all = shown.into_iter().flat_map(|(name, figure)| {
        curves(report, figure).into_iter().map(move |curves| panel(name, curves))
    });
    let names: Vec<&str> = report.arms.iter().map(|arm| arm.name()).collect();
    panels(title, &names, &all.collect::<Vec<_>>())
}

fn panel(name: &str, curves: Curves) -> Panel {
    let title = format!("{name}{}", curves.behind());
    let ticks = curves.lines.first().map(|(_, points)| points.as_slice()).unwrap_or_default();
    let ticks = ticks.iter().map(|point| (point.at, point.at.to_string())).collect();
    let lines = curves.lines.into_iter().map(|(_, points)| points);
    Panel {
        title,
        more_is_better: false,
        below: curves.over,
        label: |ns| human(ns as u64),
        ticks,
        lines: lines.enumerate().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arms::report::tests::two_points;
    use crate::pictures::sound;

    #[test]
    fn a_curve_is_over_what_grows() {
        let mut report = two_points(&[(Arm::None, [[100, 100], [100, 100]])]);
        let point = |at, value| CurvePoint { at, value, range: (value, value) };
        let found = curves(&report, MEAN);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].over, found[0].with.as_str()), ("sandboxes at once", ""));
        assert_eq!(found[0].lines, [(Arm::None, vec![point(2.0, 100.0), point(4.0, 200.0)])]);
        // The same numbers again with more memory.
        let more = 1 << 30;
        let larger = |point: &Point| Point { memory_bytes: more, ..*point };
        report.points.extend(report.points.iter().map(larger).collect::<Vec<_>>());
        let rounds = report.rounds.iter().map(|round| {
            let mut round = round.clone();
            round.point = larger(&round.point);
            round
        });
        let rounds: Vec<_> = rounds.collect();
        report.rounds.extend(rounds);
        let found = curves(&report, |one| (one.p99_ns, one.p99_range_ns));
        let titles: Vec<_> = found.iter().map(Curves::growth).collect();
        assert_eq!(titles[1], "mean time over sandboxes at once, 1024 MiB each");
        assert_eq!(titles[2], "mean time over memory of each, MiB, 2 at once");
        assert_eq!(found[3].lines, [(Arm::None, vec![point(0.0, 200.0), point(1024.0, 200.0)])]);
    }

    #[test]
    fn curves_are_drawn() {
        let none = (Arm::None, [[100, 100], [200, 200]]);
        let both = two_points(&[none, (Arm::Veth, [[100, 140], [240, 280]])]);
        let text = curves_plot(&both, "a & b").unwrap();
        sound(&text).unwrap();
        for part in ["veth", "99th percentile", "sandboxes at once", "a &amp; b"] {
            assert!(text.contains(part), "{part}");
        }
    }
}
