//! Draws a report of disks.

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::measure::{BlockFigure, IOPS, P50, P99, P999};
use super::{BlockReport, Workload};
use crate::duration::{human, thousands};
use crate::figure::OverRounds;
use crate::palette;
use crate::svg::{Area, FONT, INK, LINES, drawn, printable, write};

/// Width of the picture in pixels.
const WIDTH: i32 = 1200;
/// Height of a subject's row.
const ROW: i32 = 22;
/// Height of a workload's heading.
const HEAD: i32 = 30;
/// Height above the groups, for title and headings.
const TOP: i32 = 106;
/// Horizontal position where names end.
const NAMES: i32 = 190;
/// The bars of IOPS: first pixel and greatest length.
const BARS: (i32, i32) = (200, 320);
/// The axis of latencies: first pixel and length.
const AXIS: (i32, i32) = (660, 480);

/// Draws `report`, with a row for each subject of each workload. A row has a bar for the IOPS, in
/// proportion to the best of that workload. On a logarithmic axis shared by all, a line leads from
/// the median latency over p99 to p99.9. The picture is well-formed SVG without scripts or outside
/// references.
///
/// # Errors
/// If nothing was measured.
pub fn plot(report: &BlockReport, title: &str) -> Result<String> {
    let groups = groups(report);
    let rows: usize = groups.iter().map(|group| group.rows.len()).sum();
    anyhow::ensure!(rows > 0, "nothing was measured, so there is nothing to draw");
    let height = TOP + HEAD * groups.len() as i32 + ROW * rows as i32 + 50;
    drawn((WIDTH, height), title, |area| draw(area, &groups, height))
}

struct Group {
    workload: Workload,
    rows: Vec<Row>,
}

struct Row {
    /// The subject's place in the report, which gives the colour.
    subject: usize,
    name: String,
    /// Commands per second.
    iops: OverRounds,
    /// Latencies that 50, 99 and 99.9 % of the commands do not exceed, ns.
    percentiles_ns: [f64; 3],
}

fn groups(report: &BlockReport) -> Vec<Group> {
    let group = |workload: &Workload| {
        let subjects = report.subjects.iter().enumerate();
        let rows = subjects.filter_map(|(index, subject)| {
            let name = subject.name.clone();
            let iops = report.over_rounds(workload, &name, &IOPS)?;
            let median = |figure: &BlockFigure| {
                report.over_rounds(workload, &name, figure).map_or(0.0, |one| one.median)
            };
            let percentiles_ns = [&P50, &P99, &P999].map(median);
            Some(Row { subject: index, name, iops, percentiles_ns })
        });
        Group { workload: *workload, rows: rows.collect() }
    };
    let groups = report.plan.loads.iter().map(group);
    groups.filter(|group| !group.rows.is_empty()).collect()
}

/// The logarithmic axis of latencies.
struct Axis {
    least: f64,
    octaves: f64,
}

impl Axis {
    fn new(groups: &[Group]) -> Self {
        let all = groups.iter().flat_map(|group| &group.rows);
        let ns = || all.clone().flat_map(|row| row.percentiles_ns).map(|ns| ns.max(1.0));
        let (least, most) = (ns().fold(f64::MAX, f64::min), ns().fold(1.0, f64::max));
        // Whole decades, so that the ends have labels.
        let least = 10_f64.powf(least.log10().floor());
        let most = 10_f64.powf(most.log10().floor() + 1.0);
        Self { least, octaves: (most / least).log10() }
    }

    fn x(&self, ns: f64) -> i32 {
        let part = (ns.max(self.least) / self.least).log10() / self.octaves;
        AXIS.0 + (part * f64::from(AXIS.1)).round() as i32
    }

    fn decades(&self) -> impl Iterator<Item = f64> {
        (0..=self.octaves.round() as i32).map(|decade| self.least * 10_f64.powi(decade))
    }
}

fn draw(area: &Area<'_>, groups: &[Group], height: i32) -> Result<()> {
    let above = TOP - 26;
    write(area, "commands a second (more is better)", (BARS.0, above), FONT, HPos::Left)?;
    let latency = "latency: p50, p99, p99.9 (less is better)";
    write(area, latency, (AXIS.0, above), FONT, HPos::Left)?;
    let axis = Axis::new(groups);
    for ns in axis.decades() {
        let x = axis.x(ns);
        area.draw(&PathElement::new([(x, TOP), (x, height - 40)], LINES))?;
        write(area, &human(ns as u64), (x, height - 34), FONT, HPos::Center)?;
    }
    let mut y = TOP;
    for group in groups {
        write(area, &group.workload.to_string(), (12, y + 8), FONT, HPos::Left)?;
        y += HEAD;
        let best = group.rows.iter().map(|row| row.iops.range.1).fold(1.0, f64::max);
        for row in &group.rows {
            write(area, &printable(&row.name), (NAMES, y + 3), FONT, HPos::Right)?;
            draw_bar(area, y, best, row)?;
            let fill = palette::subject(row.subject);
            draw_latency(area, y + ROW / 2, &axis, row.percentiles_ns, fill)?;
            y += ROW;
        }
    }
    Ok(())
}

/// Draws the bar of the row at `y`, with a thin line from the least to the greatest of the rounds.
fn draw_bar(area: &Area<'_>, y: i32, best: f64, row: &Row) -> Result<()> {
    let x = |iops: f64| BARS.0 + (iops / best * f64::from(BARS.1)).round() as i32;
    let end = x(row.iops.median).max(BARS.0 + 1);
    let fill = palette::subject(row.subject).filled();
    area.draw(&Rectangle::new([(BARS.0, y + 3), (end, y + ROW - 3)], fill))?;
    let (least, most, middle) = (x(row.iops.range.0), x(row.iops.range.1), y + ROW / 2);
    if most > least {
        area.draw(&PathElement::new([(least, middle), (most, middle)], INK))?;
        for at in [least, most] {
            area.draw(&PathElement::new([(at, middle - 4), (at, middle + 4)], INK))?;
        }
    }
    let text = thousands(row.iops.median);
    write(area, &text, (end.max(most) + 6, y + 3), FONT, HPos::Left)
}

fn draw_latency(
    area: &Area<'_>,
    y: i32,
    axis: &Axis,
    percentiles_ns: [f64; 3],
    fill: RGBColor,
) -> Result<()> {
    let [p50, p99, p999] = percentiles_ns.map(|ns| axis.x(ns));
    area.draw(&PathElement::new([(p50, y), (p999, y)], fill.stroke_width(2)))?;
    area.draw(&PathElement::new([(p99, y - 6), (p99, y + 6)], fill.stroke_width(2)))?;
    area.draw(&PathElement::new([(p999, y - 3), (p999, y + 3)], INK))?;
    area.draw(&Circle::new((p50, y), 5, fill.filled()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::report::tests::report;
    use crate::svg::tests::well_formed;

    #[test]
    fn every_subject_is_drawn() {
        let report = report(&[("bare", &[600, 601]), ("<mapped>", &[900_000_000_000])]);
        let text = plot(&report, "a & b").unwrap();
        well_formed(&text).unwrap();
        for name in [
            "bare",
            "&lt;mapped&gt;",
            "a &amp; b",
            "randread-4k-d1-t1",
            "more is better",
            "less is better",
        ] {
            assert!(text.contains(name), "{name}");
        }
    }

    #[test]
    fn nothing_to_draw_is_an_error() {
        assert!(plot(&report(&[]), "x").is_err());
        well_formed(&plot(&report(&[("zero", &[0])]), "x").unwrap()).unwrap();
    }
}
