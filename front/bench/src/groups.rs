//! Draws bars in groups: a group for each load, a bar for each subject.

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use crate::palette;
use crate::svg::{Area, FONT, INK, better, drawn, printable, write};
use crate::turns::Described;

/// Width of the picture in pixels.
pub(crate) const WIDTH: i32 = 1100;
/// Height of a bar's row.
const ROW: i32 = 22;
/// Height of a group's heading.
const HEAD: i32 = 30;
/// Height above the groups.
const TOP: i32 = 66;
/// Horizontal position where names end; bars begin a little later.
const NAMES: i32 = 190;
/// Greatest length of a bar in pixels.
const BAR: i32 = 480;
/// Length of a dash, and of the gap behind it, in pixels.
const DASH: i32 = 6;

/// A bar.
pub(crate) struct Bar {
    /// The subject's place in the report, which gives the colour.
    pub subject: usize,
    /// The text before the bar.
    pub name: String,
    /// The length, in any unit that all bars of the group share.
    pub length: f64,
    /// The least and the greatest of the rounds, in the same unit.
    pub range: (f64, f64),
    /// The text behind the bar.
    pub text: String,
    /// Set if the length is a model's and was not measured: the bar is drawn as dashes.
    pub modelled: bool,
}

/// Bars that are compared with each other.
pub(crate) struct Group {
    /// The load, and what the bars show.
    pub name: String,
    /// `true` if a longer bar is better.
    pub more_is_better: bool,
    /// The bars, from top to bottom.
    pub bars: Vec<Bar>,
}

/// The length of a bar, its range, and the text behind it.
pub(crate) type Shown = (f64, (f64, f64), String);

impl Group {
    /// Makes a group with a bar for each of the subjects of which `shown` shows something.
    pub(crate) fn of(
        name: String,
        more_is_better: bool,
        subjects: &[Described],
        shown: impl Fn(&str) -> Option<Shown>,
    ) -> Self {
        let bar = |(subject, Described { name, .. }): (usize, &Described)| {
            let (length, range, text) = shown(name)?;
            Some(Bar { subject, name: name.clone(), length, range, text, modelled: false })
        };
        Self { name, more_is_better, bars: subjects.iter().enumerate().filter_map(bar).collect() }
    }
}

/// Draws the groups that have bars, with their names. The bars of a group share a scale, on which
/// the greatest value of any round has the greatest length; a thin line at the end of a bar leads
/// from the least to the greatest of the rounds. The first line of `title` is large. The picture is
/// well-formed SVG without scripts or outside references.
///
/// # Errors
/// If there is no bar.
pub(crate) fn groups(title: &str, all: impl Iterator<Item = Group>) -> Result<String> {
    let groups: Vec<Group> = all.filter(|group| !group.bars.is_empty()).collect();
    anyhow::ensure!(!groups.is_empty(), "nothing was measured, so there is nothing to draw");
    let height = TOP + height_of(&groups);
    drawn((WIDTH, height), title, |area| draw_groups(area, &groups, TOP))
}

/// Returns the height in pixels that groups take, with a margin below.
pub(crate) fn height_of(groups: &[Group]) -> i32 {
    let rows: usize = groups.iter().map(|group| group.bars.len()).sum();
    HEAD * groups.len() as i32 + ROW * rows as i32 + 20
}

/// Draws groups from the height `y` down.
pub(crate) fn draw_groups(area: &Area<'_>, groups: &[Group], mut y: i32) -> Result<()> {
    for group in groups {
        let name = format!("{} ({})", printable(&group.name), better(group.more_is_better));
        write(area, &name, (12, y + 8), FONT, HPos::Left)?;
        y += HEAD;
        let ends = group.bars.iter().map(|bar| bar.length.max(bar.range.1));
        let scale = f64::from(BAR) / ends.fold(f64::MIN_POSITIVE, f64::max);
        for bar in &group.bars {
            draw_bar(area, bar, scale, y)?;
            y += ROW;
        }
    }
    Ok(())
}

/// Draws a bar in the row at `y`; `scale` is in pixels for each unit.
fn draw_bar(area: &Area<'_>, bar: &Bar, scale: f64, y: i32) -> Result<()> {
    let x = |value: f64| NAMES + 10 + (value * scale).round() as i32;
    let end = x(bar.length).max(NAMES + 11);
    let (least, most) = (x(bar.range.0), x(bar.range.1));
    let colour = palette::subject(bar.subject);
    let corners = [(NAMES + 10, y + 3), (end, y + ROW - 3)];
    write(area, &printable(&bar.name), (NAMES, y + 3), FONT, HPos::Right)?;
    if bar.modelled {
        draw_dashes(area, corners, colour)?;
    } else {
        area.draw(&Rectangle::new(corners, colour.filled()))?;
    }
    if most > least {
        let middle = y + ROW / 2;
        area.draw(&PathElement::new([(least, middle), (most, middle)], INK))?;
        for at in [least, most] {
            area.draw(&PathElement::new([(at, middle - 4), (at, middle + 4)], INK))?;
        }
    }
    write(area, &bar.text, (end.max(most) + 6, y + 3), FONT, HPos::Left)
}

/// Draws the outline of a bar as dashes.
fn draw_dashes(
    area: &Area<'_>,
    [(left, top), (right, bottom)]: [(i32, i32); 2],
    colour: RGBColor,
) -> Result<()> {
    for x in (left..right).step_by(2 * DASH as usize) {
        for y in [top, bottom] {
            let line = [(x, y), ((x + DASH).min(right), y)];
            area.draw(&PathElement::new(line, colour.stroke_width(2)))?;
        }
    }
    for x in [left, right] {
        area.draw(&PathElement::new([(x, top), (x, bottom)], colour.stroke_width(2)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::duration::human;
    use crate::pictures::{Element, elements, fair};

    fn bar(subject: usize, length: f64, range: (f64, f64)) -> Bar {
        let (name, text) = (format!("subject {subject}"), human(length as u64));
        Bar { subject, name, length, range, text, modelled: false }
    }

    fn draw_one(bars: Vec<Bar>) -> Vec<Element> {
        let group = Group { name: "time".into(), more_is_better: false, bars };
        let text = groups("a", std::iter::once(group)).unwrap();
        fair(&text).unwrap();
        elements(&text)
    }

    #[test]
    fn bars_have_one_scale_and_lines_from_the_least_to_the_greatest() {
        let lengths = [400.0, 100.0, 200.0];
        let bars =
            lengths.iter().enumerate().map(|(at, &one)| bar(at, one, (one / 2.0, 2.0 * one)));
        let all = draw_one(bars.collect());
        let left = f64::from(NAMES + 10);
        let rects = all.iter().filter(|one| one.tag == "rect" && one.number("x") == left);
        let widths: Vec<f64> = rects.map(|one| one.number("width")).collect();
        // The longest line has the whole length.
        assert_eq!(widths, lengths.map(|one| one / 800.0 * f64::from(BAR)));
        let lines = all.iter().filter(|one| one.tag == "polyline").map(Element::points);
        let across: Vec<_> = lines.filter(|line| line[0].1 == line[1].1).collect();
        let ends = |line: &Vec<(f64, f64)>| (line[0].0 - left, line[1].0 - left);
        let expected = widths.iter().map(|width| (width / 2.0, width * 2.0));
        assert_eq!(across.iter().map(ends).collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    }

    #[test]
    fn as_many_colours_as_bars_in_their_order() {
        let all = draw_one((0..24).map(|at| bar(at, 1.0, (1.0, 1.0))).collect());
        let names = all.iter().filter(|one| one.get("text-anchor") == "end").map(|one| &*one.text);
        let expected: Vec<_> = (0..24).map(|at| format!("subject {at}")).collect();
        assert_eq!(names.collect::<Vec<_>>(), expected);
        // Bars of one round have no line.
        assert!(all.iter().all(|one| one.tag != "polyline"));
    }
}
