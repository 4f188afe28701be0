//! Draws curves: panels with axes, beside and below each other.

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use crate::duration::round_step;
use crate::palette::subject as fill;
use crate::svg::{Area, FONT, LINES, heading, printable, write};

/// Width of the picture in pixels: two panels beside each other.
const WIDTH: i32 = 1200;
/// Width and height of one panel with its labels.
const PANEL: (i32, i32) = (600, 260);
/// Margins in a panel: left of the axes, above, right, below.
const MARGINS: (i32, i32, i32, i32) = (80, 36, 20, 44);
/// Height above the panels, for title and legend.
const TOP: i32 = 110;
/// The most marks on an axis, beside the one at 0.
const MARKS: u32 = 5;

/// Formats a value on a panel's vertical axis.
pub(crate) type Label = fn(f64) -> String;

/// One pair of axes.
pub(crate) struct Panel {
    /// The value that the curves show.
    pub title: String,
    /// The value on the horizontal axis.
    pub below: &'static str,
    /// The labels on the vertical axis.
    pub label: Label,
    /// The labels on the horizontal axis: position and text.
    pub ticks: Vec<(f64, String)>,
    /// The curves: index of the subject, and points.
    pub lines: Vec<(usize, Vec<(f64, f64)>)>,
}

/// Draws panels, two in a row, with a legend of the subjects. The picture is well-formed SVG
/// without scripts or outside references.
///
/// # Errors
/// If there is no panel.
pub(crate) fn panels(title: &str, subjects: &[&str], panels: &[Panel]) -> Result<String> {
    anyhow::ensure!(!panels.is_empty(), "nothing was measured, so there is nothing to draw");
    let rows = panels.len().div_ceil(2) as i32;
    let height = TOP + rows * PANEL.1 + 10;
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, (WIDTH as u32, height as u32));
        let area = area.into_drawing_area();
        draw(&area, subjects, panels, title).map_err(|error| anyhow!("drawing: {error}"))?;
    }
    Ok(text)
}

fn draw(area: &Area<'_>, subjects: &[&str], panels: &[Panel], title: &str) -> Result<()> {
    area.fill(&WHITE)?;
    heading(area, title, WIDTH)?;
    let mut x = 20;
    for (index, subject) in subjects.iter().enumerate() {
        let name = printable(subject);
        area.draw(&Circle::new((x, TOP - 25), 5, fill(index).filled()))?;
        write(area, &name, (x + 12, TOP - 32), FONT, HPos::Left)?;
        x += 44 + 8 * name.chars().count() as i32;
    }
    for (number, panel) in (0..).zip(panels) {
        draw_panel(area, panel, ((number % 2) * PANEL.0, TOP + (number / 2) * PANEL.1))?;
    }
    area.present()?;
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
    let most = points().map(|point| point.1).fold(f64::MIN_POSITIVE, f64::max);
    let widest = points().map(|point| point.0).chain(panel.ticks.iter().map(|tick| tick.0));
    let widest = widest.fold(f64::MIN_POSITIVE, f64::max);
    let across = |at: f64| left + (at / widest * f64::from(right - left)).round() as i32;
    let up = |value: f64| bottom - (value / most * f64::from(bottom - top)).round() as i32;
    write(area, &panel.title, (left, y + 10), FONT, HPos::Left)?;
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
        let line: Vec<_> = points.iter().map(|&(at, value)| (across(at), up(value))).collect();
        for &point in &line {
            area.draw(&Circle::new(point, 3, fill(*subject).filled()))?;
        }
        area.draw(&PathElement::new(line, fill(*subject).stroke_width(2)))?;
    }
    Ok(())
}
