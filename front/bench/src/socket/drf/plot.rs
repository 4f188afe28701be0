//! Draws a report of shares.

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::{DrfCase, DrfReport};
use crate::duration::rate as show;
use crate::palette::subject as colour;
use crate::svg::{Area, FONT, LINES, drawn, write};

/// Width and height of the picture in pixels.
const SIZE: (i32, i32) = (1000, 660);
/// Left and right margins of the diagram.
const MARGINS: (i32, i32) = (90, 30);
/// Height of the example's rows, and position of the first, below its heading.
const ROW: i32 = 26;
const TOP: i32 = 88;
/// Greatest length of a bar in pixels.
const BAR: i32 = 560;
/// Top and bottom of the diagram of errors.
const ERRORS: (i32, i32) = (270, 600);
/// The errors at the diagram's edges, in percent, of which the first is taken that no error
/// exceeds. Marks are at the edges, in the middle, and half way between.
const EDGES: [i32; 6] = [10, 20, 50, 100, 200, 1000];

/// Draws `report`: bars for the slides' example, measured and by the formula; then a point for each
/// tenant of each mix, whose distance from the middle is the error of the tenant's share, between
/// lines in percent. The picture is well-formed SVG without scripts or outside references.
///
/// # Errors
/// If nothing was measured.
pub fn drf_plot(report: &DrfReport, title: &str) -> Result<String> {
    let has_any = report.cases().next().is_some();
    anyhow::ensure!(has_any, "nothing was measured, so there is nothing to draw");
    drawn(SIZE, title, |area| draw(area, report))
}

fn draw(area: &Area<'_>, report: &DrfReport) -> Result<()> {
    if let Some(talk) = report.cases().find(|case| case.name == "talk") {
        bars(area, talk)?;
    }
    let others: Vec<&DrfCase> = report.cases().filter(|case| case.name != "talk").collect();
    if !others.is_empty() {
        errors(area, &others)?;
    }
    Ok(())
}

fn bars(area: &Area<'_>, talk: &DrfCase) -> Result<()> {
    let all = talk.measured.iter().chain(&talk.formula).copied();
    let greatest = all.fold(f64::MIN_POSITIVE, f64::max);
    let title = "the talk's example, bytes a second (nearer to the formula is better)";
    write(area, title, (MARGINS.0, TOP - 24), FONT, HPos::Left)?;
    let mut y = TOP;
    for (at, (measured, formula)) in talk.measured.iter().zip(&talk.formula).enumerate() {
        let name = char::from(b'A' + (at % 26) as u8);
        for (what, rate, fill) in
            [("measured", measured, colour(1)), ("formula", formula, colour(0))]
        {
            let end = MARGINS.0 + 110 + (rate / greatest * f64::from(BAR)).round() as i32;
            write(area, &format!("{name}, {what}"), (MARGINS.0 + 100, y + 4), FONT, HPos::Right)?;
            let corners = [(MARGINS.0 + 110, y + 3), (end, y + ROW - 3)];
            area.draw(&Rectangle::new(corners, fill.filled()))?;
            write(area, &show(*rate, "B/s"), (end + 6, y + 4), FONT, HPos::Left)?;
            y += ROW;
        }
    }
    Ok(())
}

/// Returns the error at the diagram's edges, in percent.
fn edge(cases: &[&DrfCase]) -> i32 {
    let greatest = cases
        .iter()
        .flat_map(|case| shown(case))
        .fold(0.0, |most: f64, error| if error.is_finite() { most.max(error.abs()) } else { most });
    let fits = |edge: &i32| greatest * 100.0 <= f64::from(*edge);
    EDGES.into_iter().find(fits).unwrap_or(EDGES[EDGES.len() - 1])
}

/// Returns the errors of a case that are drawn. A flood is about the other tenants, so the
/// flooder's own error is left out.
fn shown(case: &DrfCase) -> impl Iterator<Item = f64> + '_ {
    case.errors().skip(usize::from(case.quiet.is_some()))
}

/// Returns the vertical position of an error, given the one at the edges in percent.
fn height(error: f64, edge: i32) -> i32 {
    let middle = f64::from(ERRORS.0 + ERRORS.1) / 2.0;
    let half = f64::from(ERRORS.1 - ERRORS.0) / 2.0;
    (middle - (error * 100.0 / f64::from(edge)).clamp(-1.0, 1.0) * half).round() as i32
}

fn errors(area: &Area<'_>, cases: &[&DrfCase]) -> Result<()> {
    let (left, right) = (MARGINS.0, SIZE.0 - MARGINS.1);
    let title = "measured against progressive filling, tenant by tenant (nearer to 0 is better)";
    write(area, title, (left, ERRORS.0 - 34), FONT, HPos::Left)?;
    let edge = edge(cases);
    for percent in [-edge, -edge / 2, 0, edge / 2, edge] {
        let y = height(f64::from(percent) / 100.0, edge);
        area.draw(&PathElement::new(vec![(left, y), (right, y)], LINES))?;
        write(area, &format!("{percent:+} %"), (left - 10, y - 8), FONT, HPos::Right)?;
    }
    let step = f64::from(right - left) / (cases.len() as f64 + 1.0);
    for (at, case) in cases.iter().enumerate() {
        let x = left + (step * (at as f64 + 1.0)).round() as i32;
        let fill = colour(if case.quiet.is_some() { 3 } else { 2 });
        for error in shown(case) {
            let y = height(error, edge);
            if error.abs() * 100.0 <= f64::from(edge) {
                area.draw(&Circle::new((x, y), 3, fill.filled()))?;
            } else {
                // The point lies beyond the edge: a mark with its value stands for it.
                area.draw(&TriangleMarker::new((x, y), 6, fill.filled()))?;
                write(area, &format!("{:+.0} %", error * 100.0), (x + 6, y), FONT, HPos::Left)?;
            }
        }
    }
    let legend = [("a tenant of a mix", colour(2)), ("one beside a tenant that floods", colour(3))];
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
    use crate::pictures::sound;

    #[test]
    fn the_example_and_the_mixes_are_drawn() {
        let report = super::super::report::tests::report();
        let text = drf_plot(&report, "a & b").unwrap();
        sound(&text).unwrap();
        for word in [
            "nearer to the formula is better",
            "nearer to 0 is better",
            "a &amp; b",
            "A, measured",
            "37.9 MB/s",
            "62.5 MB/s",
            "+5 %",
        ] {
            assert!(text.contains(word), "{word}: {text}");
        }
        assert_eq!((height(0.0, 10), height(0.1, 10), height(0.1, 20)), (435, 270, 353));
        let mut far = report.clone();
        let cases = &mut far.runs[0].measured.cases;
        let case = cases.iter_mut().find(|case| case.name != "talk").unwrap();
        case.measured[0] = case.formula[0] * 20.0;
        let text = drf_plot(&far, "x").unwrap();
        assert!(text.contains("+1000 %") && text.contains("+1900 %"), "{text}");
        let empty = super::super::DrfReport { runs: Vec::new(), ..report };
        assert!(drf_plot(&empty, "x").is_err());
    }
}
