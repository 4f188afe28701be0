//! Draws bars in groups: a group for each load, a bar for each subject.

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use crate::palette::FILLS;
use crate::svg::{Area, FONT, printable, write};

/// Width of the picture in pixels.
const WIDTH: i32 = 1000;
/// Height of a bar's row.
const ROW: i32 = 22;
/// Height of a group's heading.
const HEAD: i32 = 30;
/// Height above the groups.
const TOP: i32 = 50;
/// Horizontal position where names end; bars begin a little later.
const NAMES: i32 = 190;
/// Greatest length of a bar in pixels.
const BAR: i32 = 480;

/// A bar.
pub(crate) struct Bar {
    /// Index of the bar's colour in the palette.
    pub colour: usize,
    /// The text before the bar.
    pub name: String,
    /// The length, in any unit that all bars of the group share.
    pub length: f64,
    /// The text behind the bar.
    pub text: String,
}

/// Draws groups with their names; the longest bar of each group has the greatest length. The
/// picture is well-formed SVG without scripts or outside references.
///
/// # Errors
/// If there is no bar.
pub(crate) fn groups(title: &str, groups: &[(String, Vec<Bar>)]) -> Result<String> {
    let rows: usize = groups.iter().map(|(_, bars)| bars.len()).sum();
    anyhow::ensure!(rows > 0, "nothing was measured, so there is nothing to draw");
    let height = TOP + HEAD * groups.len() as i32 + ROW * rows as i32 + 20;
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, (WIDTH as u32, height as u32));
        let area = area.into_drawing_area();
        draw(&area, title, groups).map_err(|error| anyhow!("drawing: {error}"))?;
    }
    Ok(text)
}

fn draw(area: &Area<'_>, title: &str, groups: &[(String, Vec<Bar>)]) -> Result<()> {
    area.fill(&WHITE)?;
    write(area, &printable(title), (WIDTH / 2, 10), FONT * 1.3, HPos::Center)?;
    let mut y = TOP;
    for (name, bars) in groups {
        write(area, &printable(name), (12, y + 8), FONT, HPos::Left)?;
        y += HEAD;
        let longest = bars.iter().map(|bar| bar.length).fold(f64::MIN_POSITIVE, f64::max);
        for bar in bars {
            let length = (bar.length / longest * f64::from(BAR)).round() as i32;
            let end = NAMES + 10 + length.max(1);
            let fill = FILLS[bar.colour % FILLS.len()];
            write(area, &printable(&bar.name), (NAMES, y + 3), FONT, HPos::Right)?;
            area.draw(&Rectangle::new([(NAMES + 10, y + 3), (end, y + ROW - 3)], fill.filled()))?;
            write(area, &bar.text, (end + 6, y + 3), FONT, HPos::Left)?;
            y += ROW;
        }
    }
    area.present()?;
    Ok(())
}
