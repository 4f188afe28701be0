//! Draws timelines as SVG, as in FastIOV's Figure 5.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use slipway_telemetry::Timeline;

use crate::duration::Ticks;
use crate::palette::{self, Look};
use crate::slices::{self, Slice};

/// Width of the picture in pixels.
const WIDTH: i32 = 1200;
/// Width left of the axis if the bars are numbered.
const NUMBER_MARGIN: i32 = 70;
/// Width right of the axis: half of a label.
const RIGHT: i32 = 40;
/// Height below the bars: labels of ticks and the axis' title.
const BOTTOM: i32 = 60;
pub(crate) const FONT: f64 = 14.0;
/// A generous guess of a letter's width in [`FONT`], since fonts are unknown here.
const LETTER: i32 = 8;
/// The most bars with names; more bars are numbered.
const MOST_NAMED: usize = 50;
/// The longest shown name, in letters.
const MOST_LETTERS: usize = 24;

pub(crate) const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
pub(crate) const LINES: RGBColor = RGBColor(0xDD, 0xDD, 0xDD);

pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws `timelines`: one bar for each sandbox, in the order in which they were ready (the first at
/// the top), on a time axis from the start of the run, with a colour for each stage. Stages that
/// run at the same time share the height of the bar; in bars too thin for that (of more than 120
/// sandboxes) only the one that began last is visible. The picture is well-formed SVG 1.1 without
/// scripts or outside references; `title` is any text.
///
/// # Errors
/// If there is no stage to draw.
pub fn svg(timelines: &[Timeline], title: &str) -> Result<String> {
    picture(timelines, title, &STARTS)
}

/// Draws mean latencies as in the vfio-user thesis's Figure 5.10: one bar for each of `stacks`, the
/// quickest at the top, with a colour for each layer. The stages of a stack are its layers, end to
/// end from 0.
///
/// # Errors
/// If there is no layer to draw.
pub fn latency_svg(stacks: &[Timeline], title: &str) -> Result<String> {
    picture(stacks, title, &LATENCIES)
}

/// The labels of a picture.
struct Words {
    /// The text under the axis, before the unit.
    axis: &'static str,
    /// The text left of the bars: if they have names, and if they have numbers.
    bars: [&'static str; 2],
    /// The error if there is nothing to draw.
    nothing: &'static str,
}

const STARTS: Words = Words {
    axis: "time since the start of the run",
    bars: ["sandbox", "sandboxes, in the order they were ready"],
    nothing: "no start-up was recorded, so there is nothing to draw",
};
const LATENCIES: Words = Words {
    axis: "mean latency",
    bars: ["commands", "commands, the quickest first"],
    nothing: "no command was completed, so there is nothing to draw",
};

fn picture(timelines: &[Timeline], title: &str, words: &'static Words) -> Result<String> {
    let sorted = slices::by_end(timelines);
    let Some(slowest) = sorted.last() else { return Err(anyhow!(words.nothing)) };
    let looks = palette::looks(timelines);
    let plan = Plan::new(&sorted, &looks, slices::end_ns(slowest), words);
    drawn((WIDTH, plan.height()), title, |area| draw(area, &plan, &sorted, &looks))
}

fn draw(area: &Area<'_>, plan: &Plan, sorted: &[&Timeline], looks: &[Look]) -> Result<()> {
    draw_legend(area, plan, looks)?;
    draw_axis(area, plan)?;
    for (row, timeline) in sorted.iter().enumerate() {
        draw_bar(area, plan, looks, timeline, plan.row_top(row))?;
    }
    draw_names(area, plan, sorted)
}

/// The layout of a picture, in pixels.
struct Plan {
    words: &'static Words,
    rows: usize,
    /// Distance from one bar's top to the next one's.
    row_height: i32,
    left: i32,
    top: i32,
    span_ns: u64,
    ticks: Ticks,
    /// The position of each look's entry in the legend.
    legend: Vec<(i32, i32)>,
}

impl Plan {
    fn new(sorted: &[&Timeline], looks: &[Look], span_ns: u64, words: &'static Words) -> Self {
        let rows = sorted.len();
        let row_height = match rows {
            0..=12 => 28,
            13..=50 => 16,
            51..=120 => 8,
            121..=250 => 4,
            _ => 3,
        };
        let letters = |timeline: &&Timeline| timeline.sandbox.chars().count().min(MOST_LETTERS);
        let longest = sorted.iter().map(letters).max().unwrap_or(0) as i32;
        let left = if rows > MOST_NAMED {
            NUMBER_MARGIN
        } else {
            NUMBER_MARGIN.max(longest * LETTER + 30)
        };
        let legend = place_legend(looks, left);
        let top = legend.last().map_or(0, |place| place.1) + 30;
        let span_ns = span_ns.max(1);
        let ticks = Ticks::new(span_ns, 12);
        Self { words, rows, row_height, left, top, span_ns, ticks, legend }
    }

    fn height(&self) -> i32 {
        self.bottom() + BOTTOM
    }

    fn bottom(&self) -> i32 {
        self.row_top(self.rows)
    }

    fn row_top(&self, row: usize) -> i32 {
        // There are hundreds of rows of a few pixels; a million would still fit.
        self.top + i32::try_from(row).unwrap_or(i32::MAX / 64) * self.row_height
    }

    /// Returns the thickness of a bar: a row less the gap to the next.
    fn bar(&self) -> i32 {
        self.row_height - if self.row_height >= 8 { 2 } else { 0 }
    }

    fn x(&self, ns: u64) -> i32 {
        let axis = (WIDTH - self.left - RIGHT) as f64;
        self.left + (ns as f64 / self.span_ns as f64 * axis).round() as i32
    }
}

fn place_legend(looks: &[Look], left: i32) -> Vec<(i32, i32)> {
    let (mut x, mut y) = (left, 60);
    let mut places = Vec::new();
    for look in looks {
        let needed = 18 + (look.name.chars().count() as i32 + 3) * LETTER;
        if x > left && x + needed > WIDTH - RIGHT {
            (x, y) = (left, y + 22);
        }
        places.push((x, y));
        x += needed;
    }
    places
}

fn draw_legend(area: &Area<'_>, plan: &Plan, looks: &[Look]) -> Result<()> {
    for (look, &(x, y)) in looks.iter().zip(&plan.legend) {
        area.draw(&Rectangle::new([(x, y), (x + 12, y + 12)], fill(look)))?;
        write(area, &printable(&look.name), (x + 18, y), FONT, HPos::Left)?;
    }
    Ok(())
}

fn draw_axis(area: &Area<'_>, plan: &Plan) -> Result<()> {
    for at in plan.ticks.places(plan.span_ns) {
        let x = plan.x(at);
        area.draw(&PathElement::new([(x, plan.top), (x, plan.bottom() + 4)], LINES))?;
        write(area, &plan.ticks.label(at), (x, plan.bottom() + 8), FONT, HPos::Center)?;
    }
    let corners = [(plan.left, plan.bottom()), (WIDTH - RIGHT, plan.bottom())];
    area.draw(&PathElement::new(corners, INK))?;
    let label = format!("{} ({}; {})", plan.words.axis, plan.ticks.unit, better(false));
    let middle = (plan.left + WIDTH - RIGHT) / 2;
    write(area, &label, (middle, plan.bottom() + 32), FONT, HPos::Center)
}

fn draw_bar(
    area: &Area<'_>,
    plan: &Plan,
    looks: &[Look],
    timeline: &Timeline,
    top: i32,
) -> Result<()> {
    for slice in slices::slices(timeline) {
        let (from, to) = (plan.x(slice.start_ns), plan.x(slice.end_ns));
        for (stage, from_y, to_y) in lanes(&slice, plan.bar()) {
            let name = &timeline.stages[stage].name;
            let Some(look) = looks.iter().find(|look| look.name == *name) else { continue };
            if to > from {
                let corners = [(from, top + from_y), (to, top + to_y)];
                area.draw(&Rectangle::new(corners, fill(look)))?;
            }
        }
    }
    Ok(())
}

/// Divides a bar of `height` pixels between the stages of `slice`: stage, upper edge, lower edge.
fn lanes(slice: &Slice, height: i32) -> Vec<(usize, i32, i32)> {
    let count = slice.running.len() as i32;
    if height < 3 * count {
        // Each stage gets at least three pixels, or the latest one gets all.
        return slice.running.last().map(|&stage| (stage, 0, height)).into_iter().collect();
    }
    let edge = |lane: i32| height * lane / count;
    (0..count)
        .zip(&slice.running)
        .map(|(lane, &stage)| (stage, edge(lane), edge(lane + 1)))
        .collect()
}

/// Draws the names of the sandboxes, or numbers if there are too many.
fn draw_names(area: &Area<'_>, plan: &Plan, sorted: &[&Timeline]) -> Result<()> {
    let named = plan.rows <= MOST_NAMED;
    let step = if named { 1 } else { Ticks::new(plan.rows as u64, 10).step_ns as usize };
    for (row, timeline) in sorted.iter().enumerate() {
        let label = match row + 1 {
            _ if named => timeline.sandbox.chars().take(MOST_LETTERS).collect(),
            number if number == 1 || number % step == 0 => number.to_string(),
            _ => continue,
        };
        let middle = plan.row_top(row) + plan.bar() / 2;
        let style = text_style(if named { FONT.min(plan.row_height as f64) } else { FONT })
            .pos(Pos::new(HPos::Right, VPos::Center));
        area.draw_text(&printable(&label), &style, (plan.left - 8, middle))?;
    }
    let style =
        text_style(FONT).transform(FontTransform::Rotate270).pos(Pos::new(HPos::Center, VPos::Top));
    let label = plan.words.bars[usize::from(!named)];
    area.draw_text(label, &style, (6, (plan.top + plan.bottom()) / 2))?;
    Ok(())
}

/// Returns the words about which values are better, for titles.
pub(crate) fn better(more: bool) -> &'static str {
    if more { "more is better" } else { "less is better" }
}

/// Makes a picture of this width and height with a heading, to which `draw` adds the rest.
///
/// # Errors
/// The errors of the drawing.
pub(crate) fn drawn(
    (width, height): (i32, i32),
    title: &str,
    draw: impl FnOnce(&Area<'_>) -> Result<()>,
) -> Result<String> {
    let mut text = String::new();
    {
        let size = (width as u32, height as u32);
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        paint(&area, title, width, draw).map_err(|error| anyhow!("drawing: {error}"))?;
    }
    Ok(text)
}

fn paint(
    area: &Area<'_>,
    title: &str,
    width: i32,
    draw: impl FnOnce(&Area<'_>) -> Result<()>,
) -> Result<()> {
    area.fill(&WHITE)?;
    heading(area, title, width)?;
    draw(area)?;
    area.present()?;
    Ok(())
}

/// Writes the lines of a title at the top of a picture of `width` pixels: the first is large, the
/// others say under which conditions the figures hold.
fn heading(area: &Area<'_>, title: &str, width: i32) -> Result<()> {
    for (number, line) in (0..).zip(title.lines()) {
        let (y, size) = if number == 0 { (10, FONT * 1.3) } else { (16 + 18 * number, FONT) };
        write(area, &printable(line), (width / 2, y), size, HPos::Center)?;
    }
    Ok(())
}

pub(crate) fn write(
    area: &Area<'_>,
    text: &str,
    at: (i32, i32),
    size: f64,
    side: HPos,
) -> Result<()> {
    area.draw_text(text, &text_style(size).pos(Pos::new(side, VPos::Top)), at)?;
    Ok(())
}

fn text_style(size: f64) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&INK)
}

fn fill(look: &Look) -> ShapeStyle {
    let (red, green, blue) = look.rgb;
    RGBColor(red, green, blue).filled()
}

/// Returns `text` without the characters that XML cannot hold at all, escaped or not.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() || c as u32 & 0xFFFE == 0xFFFE { ' ' } else { c })
        .collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::pictures::{elements, is_round};
    use crate::samples;

    /// Checks tags, attributes and entities strictly enough for the mistakes that a writer can
    /// make.
    pub(crate) fn well_formed(text: &str) -> Result<()> {
        let mut open: Vec<&str> = Vec::new();
        let mut rest = text;
        let mut roots = 0;
        while let Some(start) = rest.find('<') {
            check_text(&rest[..start])?;
            let end = rest[start..].find('>').ok_or_else(|| anyhow!("unclosed tag"))? + start;
            let tag = &rest[start + 1..end];
            rest = &rest[end + 1..];
            if tag.starts_with(['?', '!']) {
                continue;
            }
            if let Some(name) = tag.strip_prefix('/') {
                anyhow::ensure!(open.pop() == Some(name), "closes {name}");
                continue;
            }
            let name = tag.split([' ', '/', '\n']).next().unwrap_or("");
            anyhow::ensure!(!name.is_empty(), "a tag without a name");
            anyhow::ensure!(tag.matches('"').count().is_multiple_of(2), "quotes of {tag}");
            check_text(tag)?;
            roots += usize::from(open.is_empty());
            if !tag.ends_with('/') {
                open.push(name);
            }
        }
        anyhow::ensure!(open.is_empty() && roots == 1, "open {open:?}, roots {roots}");
        Ok(())
    }

    fn check_text(text: &str) -> Result<()> {
        for part in text.split('&').skip(1) {
            let entity = part.split(';').next().unwrap_or("");
            let known = ["amp", "lt", "gt", "quot", "apos"].contains(&entity);
            anyhow::ensure!(known || entity.starts_with('#'), "bare ampersand before {part:.10}");
        }
        let odd = text.chars().find(|c| c.is_control() && !"\n\r\t".contains(*c));
        anyhow::ensure!(odd.is_none(), "control character {odd:?}");
        Ok(())
    }

    #[test]
    fn the_checker_can_fail() {
        for bad in ["<a>", "<a></b>", "<a>&</a>", "<a x=\"></a>", "<a/><b/>", "", "<a>\u{1}</a>"] {
            assert!(well_formed(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn draws_every_size() {
        for count in [1, 4, 13, 51, 121, 251, 500] {
            let text = svg(&samples::staircase(count), "start-up").unwrap();
            well_formed(&text).unwrap();
            for name in
                ["vf-attach", "kernel", "dma-ram", "start-up", "time since", "less is better"]
            {
                assert!(text.contains(name), "{count}: {name}");
            }
        }
    }

    #[test]
    fn text_of_others_stays_text() {
        let mut timeline = Timeline::new("<b>&\"'\u{1}\u{FFFF}</b>");
        timeline.record("</svg><script>", 0, 5);
        let text = svg(&[timeline], "a < b & c > d \u{0}").unwrap();
        well_formed(&text).unwrap();
        assert!(!text.contains("<script>"));
    }

    #[test]
    fn a_timeline_has_as_many_colours_as_stages_in_the_order_of_a_start() {
        let picture = svg(&samples::four(), "a").unwrap();
        let all = elements(&picture);
        let squares = all.iter().filter(|one| one.tag == "rect" && one.number("height") == 12.0);
        let legend: Vec<_> = squares.map(|one| one.get("fill")).collect();
        let unique: std::collections::BTreeSet<_> = legend.iter().collect();
        assert_eq!((legend.len(), unique.len()), (10, 10), "{legend:?}");
        let stages = palette::looks(&samples::four()).into_iter().map(|look| look.name);
        let named = all.iter().map(|one| one.text.clone());
        let stages: Vec<_> = stages.collect();
        assert!(named.filter(|text| stages.contains(text)).eq(stages.iter().cloned()));
        // The marks of the axis are round; they are the only texts below the bars but its title.
        let lowest = all.iter().map(|one| one.number("y")).fold(0.0, f64::max);
        let below = all.iter().filter(|one| one.tag == "text" && one.number("y") == lowest - 24.0);
        let marks: Vec<_> = below.map(|one| &one.text).collect();
        assert!(marks.len() > 2 && marks.iter().all(|mark| is_round(mark)), "{marks:?}");
    }

    #[test]
    fn latencies_are_stacked_with_a_colour_for_each_layer() {
        let mut stack = Timeline::new("read");
        let layers = ["application", "guest driver", "to fetch", "to backend", "backend", "back"];
        for (layer, at) in layers.iter().zip(0..) {
            stack.record(*layer, at * 1000, (at + 1) * 1000);
        }
        let picture = latency_svg(&[stack], "Reads").unwrap();
        well_formed(&picture).unwrap();
        let fills: std::collections::BTreeSet<_> =
            picture.match_indices("fill=\"#").map(|(at, _)| &picture[at + 6..at + 13]).collect();
        // The layers' colours, white and ink.
        assert!(fills.len() >= layers.len() + 2, "{fills:?}");
        assert!(picture.contains("mean latency") && latency_svg(&[], "x").is_err());
    }

    #[test]
    fn nothing_to_draw_is_an_error() {
        assert!(svg(&[], "x").is_err());
        assert!(svg(&[Timeline::new("a")], "x").is_err());
    }

    #[test]
    fn extremes_draw() {
        let mut timeline = Timeline::new("a");
        timeline.record("kernel", 0, u64::MAX);
        timeline.record("vmm", 3, 3);
        well_formed(&svg(&[timeline], "").unwrap()).unwrap();
        let mut timeline = Timeline::new("a");
        timeline.record("kernel", 0, 0);
        well_formed(&svg(&[timeline], "").unwrap()).unwrap();
    }

    #[test]
    fn stages_side_by_side_share_the_bar() {
        let slice = Slice { start_ns: 0, end_ns: 1, running: vec![4, 2] };
        assert_eq!(lanes(&slice, 14), [(4, 0, 7), (2, 7, 14)]);
        assert_eq!(lanes(&slice, 4), [(2, 0, 4)]);
    }
}
