//! Draws a report of starts in several ways: with one load bars as FastIOV's figure 11 and the
//! distribution of the times as its figure 12, and with several loads curves as its figure 13.

use anyhow::{Result, ensure};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::arm::{Published, published};
use super::report::{ArmFigure, BUSY, MEAN, OVER_SINGLES, P99};
use super::{Arm, ArmsReport, Point};
use crate::curves::{Axis, Over, over};
use crate::duration::{human, round_step};
use crate::groups::{Bar, Group, WIDTH, draw_groups, height_of};
use crate::palette;
use crate::panels::panels;
use crate::svg::{Area, FONT, LINES, drawn, write};

/// The height in pixels above the bars, for the title and the conditions.
const TOP: i32 = 84;
/// The height of the distribution's panel in pixels.
const PANEL: i32 = 320;
/// The margins of the distribution's panel in pixels: left, above, right and below.
const MARGINS: (i32, i32, i32, i32) = (80, 40, 40, 50);
/// The most marks on the axis of time.
const MARKS: u32 = 8;
/// The first place of the paper's bars in the order of colours, behind those of the ways.
const PAPER: usize = Arm::ALL.len();

/// The number of sandboxes as an axis.
const COUNT: Axis<Point> = Axis {
    name: "sandboxes at once",
    of: |point| point.count.into(),
    words: |count| format!("{count} at once"),
};
/// The memory of a sandbox as an axis.
const MEMORY: Axis<Point> = Axis {
    name: "memory of each, MiB",
    of: |point| point.memory_bytes as f64 / f64::from(1 << 20),
    words: |mib| if mib > 0.0 { format!("{mib} MiB each") } else { String::new() },
};

/// Returns the loads over their number of sandboxes for each size of memory, and over the size of
/// memory for each number of sandboxes, where there are at least two.
pub(super) fn growing(report: &ArmsReport) -> Vec<Over<Point>> {
    let loads = &report.plan.loads;
    let mut all = over(loads, &COUNT, &MEMORY, 2);
    all.extend(over(loads, &MEMORY, &COUNT, 2));
    all
}

/// Draws `report`. A picture of one load has bars of the mean time, of its part in stages of
/// functions and of the 99th percentile; of the ratios of mean and 99th percentile to those of
/// starts without a network, beside the paper's; of the ratio to single starts; and it has the
/// distribution of times. A picture of several loads has the mean time, the 99th percentile and the
/// processor time of each sandbox over the number or the memory of sandboxes. The picture is
/// well-formed SVG without scripts or outside references.
///
/// # Errors
/// If nothing was measured, and the errors of the drawing.
pub fn arms_plot(report: &ArmsReport, title: &str) -> Result<String> {
    let [load] = report.plan.loads.as_slice() else {
        let all = growing(report);
        let of = |figure| all.iter().filter_map(move |over| report.panel(over, figure));
        let shown: Vec<_> = [&MEAN, &P99, &BUSY].into_iter().flat_map(of).collect();
        let names: Vec<&str> = report.subjects.iter().map(|one| one.name.as_str()).collect();
        return panels(title, &names, &shown);
    };
    let bars = bars(report, load);
    ensure!(!bars.is_empty(), "nothing was measured, so there is nothing to draw");
    let below = TOP + height_of(&bars);
    drawn((WIDTH, below + PANEL), title, |area| {
        draw_groups(area, &bars, TOP)?;
        distribution(area, report, load, below)
    })
}

/// Returns the groups of bars of a load, without those that have no bars.
fn bars(report: &ArmsReport, load: &Point) -> Vec<Group> {
    let ratios = [
        ratios(report, load, &MEAN, |paper| Some(paper.mean)),
        ratios(report, load, &P99, |paper| paper.p99),
        report.group(load, &OVER_SINGLES),
    ];
    report.groups(load).chain(ratios).filter(|group| !group.bars.is_empty()).collect()
}

/// Returns the ratios of a figure to that of starts without a network, with the ratios of the paper
/// below them. There are no bars if such starts were not measured.
fn ratios(
    report: &ArmsReport,
    load: &Point,
    figure: &ArmFigure,
    paper: fn(&Published) -> Option<f64>,
) -> Group {
    let name = format!("{}, over that without a network", figure.about);
    let mut group = Group::of(name, false, &report.subjects, |arm| {
        let one = report.to_none(load, arm, figure)?;
        Some((one.median, one.range, format!("{:.2}", one.median)))
    });
    if !group.bars.is_empty() {
        let arms = report.arms();
        let bar = |(subject, one): (usize, &Published)| {
            let (length, name) = (paper(one)?, one.short.to_owned());
            let (range, text) = ((length, length), format!("{length:.2}"));
            Some(Bar { subject, name, length, range, text, modelled: false })
        };
        group.bars.extend((PAPER..).zip(published(&arms)).filter_map(bar));
    }
    group
}

/// Draws the part of the sandboxes that have started over time, in a panel that begins at `y`.
fn distribution(area: &Area<'_>, report: &ArmsReport, load: &Point, y: i32) -> Result<()> {
    let all = times(report, load);
    let last = all.iter().filter_map(|(.., times)| times.last()).max();
    let panel = DistributionPanel::new(y, last.copied().unwrap_or(1).max(1) as f64);
    let title = "part of the sandboxes that run, over time (further left is better)";
    write(area, title, (12, y + 10), FONT, HPos::Left)?;
    panel.draw_axes(area)?;
    for (index, (place, arm, times)) in (0..).zip(&all) {
        let colour = palette::subject(*place);
        area.draw(&PathElement::new(panel.curve(times), colour.stroke_width(2)))?;
        let at = (panel.left + 20, panel.top + 20 * index);
        area.draw(&Circle::new((at.0, at.1 + 7), 5, colour.filled()))?;
        write(area, arm, (at.0 + 12, at.1), FONT, HPos::Left)?;
    }
    Ok(())
}

/// The scales of the distribution's panel. Positions are in pixels of the picture.
struct DistributionPanel {
    left: i32,
    top: i32,
    right: i32,
    bottom: i32,
    /// The time in ns at the right end.
    last_ns: f64,
}

impl DistributionPanel {
    /// Makes the scales of a panel that begins at `y` and ends at the time `last_ns`.
    fn new(y: i32, last_ns: f64) -> Self {
        let (left, top) = (MARGINS.0, y + MARGINS.1);
        let (right, bottom) = (WIDTH - MARGINS.2, y + PANEL - MARGINS.3);
        Self { left, top, right, bottom, last_ns }
    }

    /// Returns the horizontal position of a time in ns.
    fn across(&self, ns: f64) -> i32 {
        self.left + (ns / self.last_ns * f64::from(self.right - self.left)).round() as i32
    }

    /// Returns the vertical position of a part of the sandboxes, 0 to 1.
    fn up(&self, part: f64) -> i32 {
        self.bottom - (part * f64::from(self.bottom - self.top)).round() as i32
    }

    /// Returns the points of a curve that reaches the next sandbox's part at each of `times_ns`.
    fn curve(&self, times_ns: &[u64]) -> Vec<(i32, i32)> {
        let count = times_ns.len().max(1) as f64;
        let mut line = vec![(self.across(0.0), self.up(0.0))];
        for (rank, ns) in (1..).zip(times_ns) {
            line.push((self.across(*ns as f64), self.up(f64::from(rank) / count)));
        }
        line.dedup();
        line
    }

    /// Draws lines at parts of the sandboxes, and marks of the time below the panel.
    fn draw_axes(&self, area: &Area<'_>) -> Result<()> {
        for percent in [0, 25, 50, 75, 99] {
            let at = self.up(f64::from(percent) / 100.0);
            area.draw(&PathElement::new([(self.left, at), (self.right, at)], LINES))?;
            let place = (self.left - 8, at - 7);
            write(area, &format!("{percent} %"), place, FONT * 0.9, HPos::Right)?;
        }
        let step = round_step(self.last_ns, MARKS);
        for number in 0..=(self.last_ns / step) as u32 {
            let at = f64::from(number) * step;
            let place = (self.across(at), self.bottom + 8);
            write(area, &human(at as u64), place, FONT * 0.9, HPos::Center)?;
        }
        Ok(())
    }
}

/// Returns the ways that were measured, each with its place in the report and the times of all its
/// sandboxes in ns, in ascending order.
fn times<'a>(report: &'a ArmsReport, load: &'a Point) -> Vec<(usize, &'a str, Vec<u64>)> {
    let of = |(place, name): (usize, &'a str)| {
        let mut times: Vec<u64> = report.turns(load, name).flat_map(|one| one.times()).collect();
        times.sort_unstable();
        (!times.is_empty()).then_some((place, name, times))
    };
    report.subjects.iter().map(|one| one.name.as_str()).enumerate().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arms::Singles;
    use crate::arms::report::tests::{POINT, report, report_of};
    use crate::pictures::{fair, sound};

    #[test]
    fn bars_and_distribution_are_drawn() {
        let none = (Arm::None, &[[100, 100], [200, 200]][..]);
        let both = report(&[none, (Arm::Pool, &[[100, 140], [240, 280]])]);
        let text = arms_plot(&both, "a & b").unwrap();
        fair(&text).unwrap();
        for part in ["pool", "1.25", "FastIOV (paper)", "99 %", "a &amp; b", "in functions"] {
            assert!(text.contains(part), "{part}");
        }
        let alone = arms_plot(&report(&[(Arm::Pool, &[[1, 2], [3, 4]])]), "x").unwrap();
        assert!(!alone.contains("(paper)"));
        assert!(arms_plot(&report(&[]), "x").is_err());
    }

    #[test]
    fn single_starts_are_drawn() {
        let mut alone = report(&[(Arm::NoAsync, &[[100, 100], [100, 100]])]);
        assert!(!arms_plot(&alone, "x").unwrap().contains("single starts"));
        for run in &mut alone.runs {
            run.measured.singles = Some(Singles { times_ns: vec![50], busy_ns: 100 });
        }
        let text = arms_plot(&alone, "x").unwrap();
        assert!(text.contains("single starts / processors") && text.contains("2.00"), "{text}");
    }

    #[test]
    fn several_loads_are_curves() {
        let none = (Arm::None, &[[100, 100], [200, 200]][..]);
        let four = Point { count: 4, ..POINT };
        let arms = [none, (Arm::Veth, &[[100, 140], [240, 280]][..])];
        let text = arms_plot(&report_of(&[POINT, four], &arms), "a & b").unwrap();
        sound(&text).unwrap();
        for part in ["veth", "99th percentile", "sandboxes at once", "a &amp; b"] {
            assert!(text.contains(part), "{part}");
        }
        let large = Point { memory_bytes: 1 << 30, ..POINT };
        let text = arms_plot(&report_of(&[POINT, four, large], &arms), "x").unwrap();
        assert!(text.contains("processor time of each, 2 at once"), "{text}");
        assert!(text.contains("memory of each, MiB"), "{text}");
    }
}
