//! Draws a report of starts by several ways: bars as FastIOV's figure 11, the distribution of the
//! times as its figure 12, and with several numbers of sandboxes curves over them.

use anyhow::{Result, anyhow, ensure};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::arm::{Published, published};
use super::curves::curves_plot;
use super::{Arm, ArmFigures, ArmsReport};
use crate::duration::{human, round_step};
use crate::groups::{Bar, Group, WIDTH, draw_groups, height_of};
use crate::palette;
use crate::svg::{Area, FONT, LINES, heading, write};

/// Height above the bars: title, conditions.
const TOP: i32 = 84;
/// The distribution's panel: its height, and the margins left, above, right and below.
const PANEL: i32 = 320;
const MARGINS: (i32, i32, i32, i32) = (80, 40, 40, 50);
/// The most marks on the axis of time.
const MARKS: u32 = 8;
/// The first of the places of the paper's colours, behind those of the ways.
const PAPER: usize = Arm::ALL.len();

/// Draws `report`. With one point: the mean time and the part of it in stages of functions, the
/// 99th percentile, both over those of starts without a network beside the paper's, times in
/// relation to single starts, and the distribution of times. With several points: figures over what
/// grows. The picture is well-formed SVG without scripts or outside references.
///
/// # Errors
/// If nothing was measured.
pub fn arms_plot(report: &ArmsReport, title: &str) -> Result<String> {
    if report.points.len() > 1 {
        return curves_plot(report, title);
    }
    let bars = bars(report);
    ensure!(!bars.is_empty(), "nothing was measured, so there is nothing to draw");
    let below = TOP + height_of(&bars);
    let size = (WIDTH as u32, (below + PANEL) as u32);
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        draw(&area, report, (title, &bars), below).map_err(|error| anyhow!("drawing: {error}"))?;
    }
    Ok(text)
}

fn draw(
    area: &Area<'_>,
    report: &ArmsReport,
    (title, bars): (&str, &[Group]),
    below: i32,
) -> Result<()> {
    area.fill(&WHITE)?;
    heading(area, title, WIDTH)?;
    draw_groups(area, bars, TOP)?;
    distribution(area, report, below)?;
    area.present()?;
    Ok(())
}

/// Returns the ways that were measured, each with its place and its figures.
fn measured(report: &ArmsReport) -> impl Iterator<Item = (usize, Arm, ArmFigures)> {
    let arms = report.arms.iter().enumerate();
    arms.filter_map(|(place, arm)| Some((place, *arm, report.figures(*arm)?)))
}

/// A way's time in nanoseconds, the range of it, and its text.
type Shown = fn(&ArmFigures) -> (u64, (u64, u64), String);

fn bars(report: &ArmsReport) -> Vec<Group> {
    let time = |name: &str, shown: Shown| {
        let bar = |(subject, arm, one): (usize, Arm, ArmFigures)| {
            let (ns, (least, most), text) = shown(&one);
            let (length, range) = (ns as f64, (least as f64, most as f64));
            Bar { subject, name: arm.name().to_owned(), length, range, text, modelled: false }
        };
        let bars = measured(report).map(bar).collect();
        let at_once: Vec<_> = report.points.iter().map(|point| report.name_of(*point)).collect();
        Group { name: format!("{name} of {}", at_once.join(", ")), more_is_better: false, bars }
    };
    let ratio = |name: &str, ours: Ratio, paper: fn(&Published) -> Option<f64>| {
        let own = measured(report).filter_map(|(subject, arm, one)| {
            let (ratio, range) = ours(&one)?;
            Some(ratio_bar(subject, arm.name(), ratio, range))
        });
        let mut bars: Vec<Bar> = own.collect();
        if !bars.is_empty() {
            let published = (PAPER..).zip(published(&report.arms));
            bars.extend(published.filter_map(|(place, one)| {
                let ratio = paper(one)?;
                Some(ratio_bar(place, one.short, ratio, (ratio, ratio)))
            }));
        }
        Group { name: format!("{name}, over that without a network"), more_is_better: false, bars }
    };
    let all = [
        time("mean time", |one| {
            let parts = format!("{}; {} in functions", human(one.mean_ns), human(one.functions_ns));
            (one.mean_ns, one.mean_range_ns, parts)
        }),
        time("99th percentile", |one| (one.p99_ns, one.p99_range_ns, human(one.p99_ns))),
        ratio(
            "mean",
            |one| Some((one.mean_ratio?, one.mean_ratio_range)),
            |paper| Some(paper.mean),
        ),
        ratio(
            "99th percentile",
            |one| Some((one.p99_ratio?, one.p99_ratio_range)),
            |paper| paper.p99,
        ),
        singles(report),
    ];
    all.into_iter().filter(|group| !group.bars.is_empty()).collect()
}

/// A way's ratio to starts without a network and the range of it, if those were measured.
type Ratio = fn(&ArmFigures) -> Option<(f64, (f64, f64))>;

fn ratio_bar(subject: usize, name: &str, ratio: f64, range: (f64, f64)) -> Bar {
    let (name, text) = (name.to_owned(), format!("{ratio:.2}"));
    Bar { subject, name, length: ratio, range, text, modelled: false }
}

/// Returns the times until the last of those at once, over what single starts take of all
/// processors; without bars if there were no single starts.
fn singles(report: &ArmsReport) -> Group {
    let arms = report.arms.iter().enumerate();
    let bar = |(place, arm): (usize, &Arm)| {
        let one = report.singles(*arm)?;
        Some(ratio_bar(place, arm.name(), one.ratio, one.ratio_range))
    };
    let processors = report.processors;
    let name = format!("time of all, over CPU of as many single starts / {processors} processors");
    Group { name, more_is_better: false, bars: arms.filter_map(bar).collect() }
}

/// Draws the part of the sandboxes that have started over time, in a panel that begins at `y`.
fn distribution(area: &Area<'_>, report: &ArmsReport, y: i32) -> Result<()> {
    let (left, top) = (MARGINS.0, y + MARGINS.1);
    let (right, bottom) = (WIDTH - MARGINS.2, y + PANEL - MARGINS.3);
    let all: Vec<_> =
        measured(report).map(|(place, arm, _)| (place, arm, report.times(arm))).collect();
    let last = all.iter().filter_map(|(.., times)| times.last()).max();
    let last = last.copied().unwrap_or(1).max(1) as f64;
    let across = |ns: f64| left + (ns / last * f64::from(right - left)).round() as i32;
    let up = |part: f64| bottom - (part * f64::from(bottom - top)).round() as i32;
    let title = "part of the sandboxes that run, over time (further left is better)";
    write(area, title, (12, y + 10), FONT, HPos::Left)?;
    for percent in [0, 25, 50, 75, 99] {
        let at = up(f64::from(percent) / 100.0);
        area.draw(&PathElement::new([(left, at), (right, at)], LINES))?;
        write(area, &format!("{percent} %"), (left - 8, at - 7), FONT * 0.9, HPos::Right)?;
    }
    let step = round_step(last, MARKS);
    for number in 0..=(last / step) as u32 {
        let at = f64::from(number) * step;
        write(area, &human(at as u64), (across(at), bottom + 8), FONT * 0.9, HPos::Center)?;
    }
    for (index, (place, arm, times)) in (0..).zip(&all) {
        let fill = palette::subject(*place);
        let count = times.len().max(1) as f64;
        let mut line = vec![(across(0.0), up(0.0))];
        for (rank, ns) in (1..).zip(times) {
            line.push((across(*ns as f64), up(f64::from(rank) / count)));
        }
        line.dedup();
        area.draw(&PathElement::new(line, fill.stroke_width(2)))?;
        let at = (left + 20, top + 20 * index);
        area.draw(&Circle::new((at.0, at.1 + 7), 5, fill.filled()))?;
        write(area, arm.name(), (at.0 + 12, at.1), FONT, HPos::Left)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arms::Singles;
    use crate::arms::report::tests::{report, two_points};
    use crate::pictures::fair;

    #[test]
    fn bars_and_distribution_are_drawn() {
        let none = (Arm::None, [[100, 100], [200, 200]]);
        let both = report(&[none, (Arm::Pool, [[100, 140], [240, 280]])]);
        let text = arms_plot(&both, "a & b").unwrap();
        fair(&text).unwrap();
        for part in ["pool", "1.25", "FastIOV (paper)", "99 %", "a &amp; b", "in functions"] {
            assert!(text.contains(part), "{part}");
        }
        let alone = arms_plot(&report(&[(Arm::Pool, [[1, 2], [3, 4]])]), "x").unwrap();
        assert!(!alone.contains("(paper)"));
        assert!(arms_plot(&report(&[]), "x").is_err());
    }

    #[test]
    fn single_starts_and_several_points_are_drawn() {
        let mut alone = report(&[(Arm::NoAsync, [[100, 100], [100, 100]])]);
        assert!(!arms_plot(&alone, "x").unwrap().contains("single starts"));
        for round in &mut alone.rounds {
            round.singles = Some(Singles { times_ns: vec![50], busy_ns: 100 });
        }
        let text = arms_plot(&alone, "x").unwrap();
        assert!(text.contains("single starts / 2 processors") && text.contains("2.00"), "{text}");
        let both = two_points(&[(Arm::None, [[1, 1], [2, 2]])]);
        assert!(arms_plot(&both, "x").unwrap().contains("processor time of each"));
    }
}
