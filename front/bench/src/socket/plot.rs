//! A report of sockets as a picture.

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::{SocketFigures, SocketLoad, SocketReport, Traffic};
use crate::duration::human;
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
const BAR: i32 = 480;

/// A picture of `report`: for each load a row for each subject, with a bar for its bytes a second, for its
/// median round trip, or for the processors that idle sockets keep busy, as long as the greatest of that load
/// allows. Well-formed SVG without scripts or outside references.
///
/// # Errors
/// When nothing was measured.
pub fn socket_plot(report: &SocketReport, title: &str) -> Result<String> {
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

type Row = (usize, String, SocketFigures);

fn group(report: &SocketReport, load: &SocketLoad) -> Vec<Row> {
    let subjects = report.subjects.iter().enumerate();
    let figures = |name: &String| report.figures(load, name);
    subjects.filter_map(|(at, one)| Some((at, one.name.clone(), figures(&one.name)?))).collect()
}

/// What a bar's length is, and what is written at its end.
fn bar(load: &SocketLoad, figures: &SocketFigures) -> (f64, String) {
    match (load.traffic, figures.latency) {
        (Traffic::Idle, _) => (figures.cores, format!("{:.4} cores", figures.cores)),
        (_, Some([p50, p99, _])) => {
            (p50, format!("{}, p99 {}", human(p50 as u64), human(p99 as u64)))
        }
        _ => {
            let (gbits, cores) = (figures.bytes * 8.0 / 1e9, figures.cores_per_10_gbits());
            (figures.bytes, format!("{gbits:.2} Gbit/s, {cores:.2} cores for 10 Gbit/s"))
        }
    }
}

fn draw(area: &Area<'_>, report: &SocketReport, title: &str) -> Result<()> {
    area.fill(&WHITE)?;
    write(area, &printable(title), (WIDTH / 2, 10), FONT * 1.3, HPos::Center)?;
    let mut y = TOP;
    for load in &report.plan.loads {
        let rows = group(report, load);
        write(area, &load.to_string(), (12, y + 8), FONT, HPos::Left)?;
        y += HEAD;
        let greatest = rows.iter().map(|row| bar(load, &row.2).0).fold(f64::MIN_POSITIVE, f64::max);
        for (at, name, figures) in rows {
            let (length, text) = bar(load, &figures);
            let length = (length / greatest * f64::from(BAR)).round() as i32;
            let end = NAMES + 10 + length.max(1);
            let fill = FILLS[at % FILLS.len()];
            write(area, &printable(&name), (NAMES, y + 3), FONT, HPos::Right)?;
            area.draw(&Rectangle::new([(NAMES + 10, y + 3), (end, y + ROW - 3)], fill.filled()))?;
            write(area, &text, (end + 6, y + 3), FONT, HPos::Left)?;
            y += ROW;
        }
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;
    use crate::svg::tests::well_formed;

    #[test]
    fn every_subject_is_drawn() {
        let both: [(&str, &[u64]); 2] = [("tcp", &[1_000_000_000]), ("<ours>", &[1])];
        for (load, end) in [
            ("stream-128k-c1", "8.00 Gbit/s, 5.00 cores"),
            ("pingpong-64b-busy", "p99 1 ns"),
            ("idle-c1024", "4.0000 cores"),
        ] {
            let text = socket_plot(&report(load, &both), "a & b").unwrap();
            well_formed(&text).unwrap();
            for name in ["tcp", "&lt;ours&gt;", "a &amp; b", load, end] {
                assert!(text.contains(name), "{name}: {text}");
            }
        }
        assert!(socket_plot(&report("idle-c1", &[]), "x").is_err());
    }
}
