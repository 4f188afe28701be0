//! Draws curves: panels with axes, beside and below each other.

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use crate::duration::round_step;
use crate::palette::subject as fill;
use crate::svg::{Area, FONT, LINES, better, drawn, printable, write};

/// Width of the picture in pixels: two panels beside each other.
const WIDTH: i32 = 1200;
/// Width and height of one panel with its labels.
const PANEL: (i32, i32) = (600, 260);
/// Margins in a panel: left of the axes, above, right, below.
const MARGINS: (i32, i32, i32, i32) = (80, 36, 20, 44);
/// Height of the first row of the legend, and of a further one.
const LEGEND: (i32, i32) = (78, 22);
/// Height between the last row of the legend and the panels.
const BELOW_LEGEND: i32 = 32;
/// The most marks on an axis, beside the one at 0.
const MARKS: u32 = 5;

/// Formats a value on a panel's vertical axis.
pub(crate) type Label = fn(f64) -> String;

/// One pair of axes.
pub(crate) struct Panel {
    /// The value that the curves show.
    pub title: String,
    /// `true` if a higher curve is better.
    pub more_is_better: bool,
    /// The value on the horizontal axis.
    pub below: &'static str,
    /// The labels on the vertical axis.
    pub label: Label,
    /// The labels on the horizontal axis: position and text.
    pub ticks: Vec<(f64, String)>,
    /// The curves: index of the subject, and points.
    pub lines: Vec<(usize, Vec<CurvePoint>)>,
}

/// A point of a curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CurvePoint {
    /// The place on the horizontal axis.
    pub at: f64,
    /// The value: a median over the rounds, or a mean.
    pub value: f64,
    /// The least and the greatest of the rounds, in the unit of the value.
    pub range: (f64, f64),
}

/// Draws panels, two in a row, with a legend of the subjects. A thin line through a point leads
/// from the least to the greatest of the rounds. The picture is well-formed SVG without scripts or
/// outside references.
///
/// # Errors
/// If there is no panel.
pub(crate) fn panels(title: &str, subjects: &[&str], panels: &[Panel]) -> Result<String> {
    anyhow::ensure!(!panels.is_empty(), "nothing was measured, so there is nothing to draw");
    let rows = panels.len().div_ceil(2) as i32;
    let legend = place_legend(subjects);
    let top = legend.last().map_or(LEGEND.0, |place| place.1) + BELOW_LEGEND;
    let height = top + rows * PANEL.1 + 10;
    drawn((WIDTH, height), title, |area| draw(area, (subjects, &legend), (panels, top)))
}

/// Returns the place of each subject's entry in the legend.
fn place_legend(subjects: &[&str]) -> Vec<(i32, i32)> {
    let (mut x, mut y) = (20, LEGEND.0);
    let mut places = Vec::new();
    for subject in subjects {
        let needed = 44 + 8 * subject.chars().count() as i32;
        if x > 20 && x + needed > WIDTH {
            (x, y) = (20, y + LEGEND.1);
        }
        places.push((x, y));
        x += needed;
    }
    places
}

/// Draws subjects with their places in the legend, and panels, the first of which are at height
/// `top`.
fn draw(
    area: &Area<'_>,
    (subjects, legend): (&[&str], &[(i32, i32)]),
    (panels, top): (&[Panel], i32),
) -> Result<()> {
    for (index, (subject, &(x, y))) in subjects.iter().zip(legend).enumerate() {
        area.draw(&Circle::new((x, y + 7), 5, fill(index).filled()))?;
        write(area, &printable(subject), (x + 12, y), FONT, HPos::Left)?;
    }
    for (number, panel) in (0..).zip(panels) {
        draw_panel(area, panel, ((number % 2) * PANEL.0, top + (number / 2) * PANEL.1))?;
    }
    Ok(())
}

/// Returns the places of an axis' marks, from 0 to `end`, in round steps.
pub(crate) fn marks(end: f64) -> impl Iterator<Item = f64> {
    let step = round_step(end, MARKS);
    (0..=(end / step * 1.000_001) as u32).map(move |number| f64::from(number) * step)
}

fn draw_panel(area: &Area<'_>, panel: &Panel, (x, y): (i32, i32)) -> Result<()> {
    let (left, top) = (x + MARGINS.0, y + MARGINS.1);
    let (right, bottom) = (x + PANEL.0 - MARGINS.2, y + PANEL.1 - MARGINS.3);
    let points = || panel.lines.iter().flat_map(|(_, points)| points);
    let highest = points().map(|point| point.value.max(point.range.1));
    let most = Some(highest.fold(0.0, f64::max)).filter(|most| *most > 0.0).unwrap_or(1.0);
    let widest = points().map(|point| point.at).chain(panel.ticks.iter().map(|tick| tick.0));
    let widest = widest.fold(f64::MIN_POSITIVE, f64::max);
    let across = |at: f64| left + (at / widest * f64::from(right - left)).round() as i32;
    let up = |value: f64| bottom - (value / most * f64::from(bottom - top)).round() as i32;
    let title = format!("{} ({})", printable(&panel.title), better(panel.more_is_better));
    write(area, &title, (x + 12, y + 10), FONT, HPos::Left)?;
    for value in marks(most) {
        let line = [(left, up(value)), (right, up(value))];
        area.draw(&PathElement::new(line, LINES))?;
        let label = (panel.label)(value);
        write(area, &label, (left - 8, up(value) - 7), FONT * 0.9, HPos::Right)?;
    }
    for (at, label) in &panel.ticks {
        write(area, label, (across(*at), bottom + 6), FONT * 0.9, HPos::Center)?;
    }
    write(area, panel.below, (i32::midpoint(left, right), bottom + 22), FONT * 0.9, HPos::Center)?;
    for (subject, points) in &panel.lines {
        let line = points.iter().map(|point| (across(point.at), up(point.value)));
        let line: Vec<_> = line.collect();
        for (&place, point) in line.iter().zip(points) {
            area.draw(&Circle::new(place, 3, fill(*subject).filled()))?;
            let (least, greatest) = (up(point.range.0), up(point.range.1));
            if greatest < least {
                let ends = [(place.0, least), (place.0, greatest)];
                area.draw(&PathElement::new(ends, fill(*subject)))?;
            }
        }
        area.draw(&PathElement::new(line, fill(*subject).stroke_width(2)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pictures::{Element, elements, is_round, sound};

    const NAMES: [&str; 14] = [
        "horizontal",
        "vertical",
        "both",
        "none",
        "slipway",
        "pool",
        "no-async",
        "vf-locks",
        "one-lock",
        "veth",
        "macvlan",
        "macvtap",
        "tap",
        "runc",
    ];

    fn panel(most: f64, lines: usize) -> Panel {
        let point = |at: u32, line: usize| {
            let value = most / f64::from(at) / (line + 1) as f64;
            CurvePoint { at: at.into(), value, range: (value * 0.9, value * 1.1) }
        };
        let line = |line| (line, (1..=4).map(|at| point(at, line)).collect());
        Panel {
            title: "rate <of all>".into(),
            more_is_better: true,
            below: "depth",
            label: |value| crate::duration::rate(value, "op/s"),
            ticks: marks(4.0).map(|at| (at, at.to_string())).collect(),
            lines: (0..lines).map(line).collect(),
        }
    }

    #[test]
    fn a_legend_has_a_colour_for_each_subject_in_their_order() {
        let text = panels("a", &NAMES, &[panel(1e6, NAMES.len())]).unwrap();
        sound(&text).unwrap();
        let all = elements(&text);
        let fills = |radius| {
            let circles = all.iter().filter(move |one: &&Element| one.number("r") == radius);
            circles.map(|one| one.get("fill").to_owned()).collect::<Vec<_>>()
        };
        let (legend, points) = (fills(5.0), fills(3.0));
        let unique: std::collections::BTreeSet<_> = legend.iter().collect();
        assert_eq!((legend.len(), unique.len()), (NAMES.len(), NAMES.len()));
        let mut curves = points;
        curves.dedup();
        assert_eq!(curves, legend);
        let texts = all.iter().filter(|one| NAMES.contains(&&*one.text));
        assert_eq!(texts.map(|one| &*one.text).collect::<Vec<_>>(), NAMES);
    }

    #[test]
    fn marks_are_round_and_ranges_are_drawn_within_the_axes() {
        for most in [0.0, 7.3, 47_683.7, 1.234e9] {
            let text = panels("a", &NAMES[..1], &[panel(most, 1)]).unwrap();
            sound(&text).unwrap();
            let all = elements(&text);
            let labels: Vec<_> = all.iter().filter(|one| one.get("text-anchor") == "end").collect();
            assert!(labels.iter().all(|one| is_round(&one.text)), "{most}: {labels:?}");
            let unique: std::collections::BTreeSet<_> =
                labels.iter().map(|one| &one.text).collect();
            assert!(unique.len() == labels.len() && labels.len() > 2, "{most}: {labels:?}");
            let lines = all.iter().filter(|one| one.tag == "polyline").map(Element::points);
            let upright = lines.filter(|line| line.len() == 2 && line[0].0 == line[1].0);
            assert_eq!(upright.count(), if most > 0.0 { 4 } else { 0 }, "{most}");
            let top = LEGEND.0 + BELOW_LEGEND + MARGINS.1;
            let highest = all.iter().flat_map(Element::points).map(|point| point.1);
            assert!(highest.fold(f64::MAX, f64::min) >= f64::from(top), "{most}");
        }
    }
}
