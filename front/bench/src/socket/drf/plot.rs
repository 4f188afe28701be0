//! Draws a report of shares.

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::{DrfCase, DrfReport};
use crate::palette::FILLS;
use crate::svg::{Area, FONT, LINES, printable, write};

/// Width and height of the picture in pixels.
const SIZE: (i32, i32) = (1000, 620);
/// Left and right margins of the diagram.
const MARGINS: (i32, i32) = (90, 30);
/// Height of the example's rows, and position of the first.
const ROW: i32 = 26;
const TOP: i32 = 50;
/// Greatest length of a bar in pixels.
const BAR: i32 = 560;
/// Top and bottom of the diagram of errors.
const ERRORS: (i32, i32) = (230, 560);
/// The error at the diagram's edges; greater ones are drawn there, too.
const MOST: f64 = 0.1;

/// Draws `report`: bars for the slides' example, measured and by the formula; then a point for each
/// tenant of each mix, whose distance from the middle is the error of the tenant's share, between
/// lines at 5 %. The picture is well-formed SVG without scripts or outside references.
///
/// # Errors
/// If nothing was measured.
pub fn drf_plot(report: &DrfReport, title: &str) -> Result<String> {
    anyhow::ensure!(!report.cases.is_empty(), "nothing was measured, so there is nothing to draw");
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, (SIZE.0 as u32, SIZE.1 as u32));
        let area = area.into_drawing_area();
        draw(&area, report, title).map_err(|error| anyhow!("drawing: {error}"))?;
    }
    Ok(text)
}

fn draw(area: &Area<'_>, report: &DrfReport, title: &str) -> Result<()> {
    area.fill(&WHITE)?;
    write(area, &printable(title), (SIZE.0 / 2, 10), FONT * 1.3, HPos::Center)?;
    if let Some(talk) = report.cases.iter().find(|case| case.name == "talk") {
        bars(area, talk)?;
    }
    let others: Vec<&DrfCase> = report.cases.iter().filter(|case| case.name != "talk").collect();
    if !others.is_empty() {
        errors(area, &others)?;
    }
    area.present()?;
    Ok(())
}

fn bars(area: &Area<'_>, talk: &DrfCase) -> Result<()> {
    let all = talk.measured.iter().chain(&talk.formula).copied();
    let greatest = all.fold(f64::MIN_POSITIVE, f64::max);
    let mut y = TOP;
    for (at, (measured, formula)) in talk.measured.iter().zip(&talk.formula).enumerate() {
        let name = char::from(b'A' + (at % 26) as u8);
        for (what, rate, fill) in [("measured", measured, FILLS[1]), ("formula", formula, FILLS[0])]
        {
            let end = MARGINS.0 + 110 + (rate / greatest * f64::from(BAR)).round() as i32;
            write(area, &format!("{name}, {what}"), (MARGINS.0 + 100, y + 4), FONT, HPos::Right)?;
            let corners = [(MARGINS.0 + 110, y + 3), (end, y + ROW - 3)];
            area.draw(&Rectangle::new(corners, fill.filled()))?;
            write(area, &format!("{:.2} MB/s", rate / 1e6), (end + 6, y + 4), FONT, HPos::Left)?;
            y += ROW;
        }
    }
    Ok(())
}

/// Returns the vertical position of an error.
fn height(error: f64) -> i32 {
    let middle = f64::from(ERRORS.0 + ERRORS.1) / 2.0;
    let half = f64::from(ERRORS.1 - ERRORS.0) / 2.0;
    (middle - error.clamp(-MOST, MOST) / MOST * half).round() as i32
}

fn errors(area: &Area<'_>, cases: &[&DrfCase]) -> Result<()> {
    let (left, right) = (MARGINS.0, SIZE.0 - MARGINS.1);
    let title = "measured against progressive filling, tenant by tenant";
    write(area, title, (left, ERRORS.0 - 34), FONT, HPos::Left)?;
    for percent in [-10, -5, 0, 5, 10] {
        let y = height(f64::from(percent) / 100.0);
        area.draw(&PathElement::new(vec![(left, y), (right, y)], LINES))?;
        write(area, &format!("{percent:+} %"), (left - 10, y - 8), FONT, HPos::Right)?;
    }
    let step = f64::from(right - left) / (cases.len() as f64 + 1.0);
    for (at, case) in cases.iter().enumerate() {
        let x = left + (step * (at as f64 + 1.0)).round() as i32;
        let fill = if case.quiet.is_some() { FILLS[3] } else { FILLS[2] };
        // A flood is about the other tenants, so the flooder's own error is left out.
        for error in case.errors().skip(usize::from(case.quiet.is_some())) {
            area.draw(&Circle::new((x, height(error)), 3, fill.filled()))?;
        }
    }
    let legend = [("a tenant of a mix", FILLS[2]), ("one beside a tenant that floods", FILLS[3])];
    for (at, (what, fill)) in legend.into_iter().enumerate() {
        let x = left + 10 + 260 * at as i32;
        area.draw(&Circle::new((x, ERRORS.1 + 30), 4, fill.filled()))?;
        write(area, what, (x + 10, ERRORS.1 + 22), FONT, HPos::Left)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::svg::tests::well_formed;

    #[test]
    fn the_example_and_the_mixes_are_drawn() {
        let report = super::super::report::tests::report();
        let text = drf_plot(&report, "a & b").unwrap();
        well_formed(&text).unwrap();
        for word in ["a &amp; b", "A, measured", "37.88 MB/s", "62.50 MB/s", "+5 %"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        assert_eq!((height(0.0), height(0.1), height(9.0)), (395, 230, 230));
        assert!(drf_plot(&super::super::DrfReport { cases: Vec::new(), ..report }, "x").is_err());
    }
}
