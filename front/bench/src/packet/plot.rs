//! A report of packets as a picture.

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::PacketReport;
use crate::palette::FILLS;
use crate::svg::{Area, FONT, printable, write};

/// Width of the picture in pixels.
const WIDTH: i32 = 1000;
/// From one subject's row to the next.
const ROW: i32 = 22;
/// Above a load's rows: its name.
const HEAD: i32 = 30;
/// Above everything.
const TOP: i32 = 50;
/// Names end here, and bars begin a little later.
const NAMES: i32 = 190;
/// Most pixels of a bar.
const BAR: i32 = 560;

/// A picture of `report`: for each load a row for each subject, with a bar for its frames a second, as
/// long as the best of that load allows. Well-formed SVG without scripts or outside references.
///
/// # Errors
/// When nothing was measured.
pub fn packet_plot(report: &PacketReport, title: &str) -> Result<String> {
    let rows: usize = report.plan.loads.iter().map(|load| group(report, load).len()).sum();
    anyhow::ensure!(rows > 0, "nothing was measured, so there is nothing to draw");
    let height = TOP + HEAD * report.plan.loads.len() as i32 + ROW * rows as i32 + 20;
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, (WIDTH as u32, height as u32));
        let area = area.into_drawing_area();
        draw(&area, report, title).map_err(|error| anyhow!("drawing: {error}"))?;
    }
    Ok(text)
}

type Row = (usize, String, super::PacketFigures);

fn group(report: &PacketReport, load: &super::PacketLoad) -> Vec<Row> {
    let subjects = report.subjects.iter().enumerate();
    let figures = |name: &String| report.figures(load, name);
    subjects.filter_map(|(at, one)| Some((at, one.name.clone(), figures(&one.name)?))).collect()
}

fn draw(area: &Area<'_>, report: &PacketReport, title: &str) -> Result<()> {
    area.fill(&WHITE)?;
    write(area, &printable(title), (WIDTH / 2, 10), FONT * 1.3, HPos::Center)?;
    let mut y = TOP;
    for load in &report.plan.loads {
        let rows = group(report, load);
        write(area, &load.to_string(), (12, y + 8), FONT, HPos::Left)?;
        y += HEAD;
        let best = rows.iter().map(|row| row.2.delivered).fold(1.0, f64::max);
        for (at, name, figures) in rows {
            let length = (figures.delivered / best * f64::from(BAR)).round() as i32;
            let end = NAMES + 10 + length.max(1);
            let fill = FILLS[at % FILLS.len()];
            write(area, &printable(&name), (NAMES, y + 3), FONT, HPos::Right)?;
            area.draw(&Rectangle::new([(NAMES + 10, y + 3), (end, y + ROW - 3)], fill.filled()))?;
            let text =
                format!("{:.2} Mpps, {:.1} Gbit/s", figures.delivered / 1e6, figures.bits / 1e9);
            write(area, &text, (end + 6, y + 3), FONT, HPos::Left)?;
            y += ROW;
        }
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::report::tests::report;
    use crate::svg::tests::well_formed;

    #[test]
    fn every_subject_is_drawn() {
        let text =
            packet_plot(&report(&[("link", &[4_000_000]), ("<switch>", &[1])]), "a & b").unwrap();
        well_formed(&text).unwrap();
        for name in ["link", "&lt;switch&gt;", "a &amp; b", "64b-p2", "4.00 Mpps"] {
            assert!(text.contains(name), "{name}");
        }
        assert!(packet_plot(&report(&[]), "x").is_err());
    }
}
