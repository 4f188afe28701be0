//! Draws reports of disks as curves: IOPS and latency over depth, and RocksDB's operations over
//! time.

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::table::thousands;
use super::workload::block_name;
use super::{BlockReport, Figures, Pattern, RocksJob, RocksReport, Workload};
use crate::duration::{human, round_step};
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

/// The unit of a panel's vertical axis.
#[derive(Clone, Copy)]
enum Scale {
    /// Operations per second.
    Rate,
    /// Nanoseconds.
    Time,
}

impl Scale {
    fn label(self, value: f64) -> String {
        match self {
            Self::Rate => thousands(value),
            Self::Time => human(value.round() as u64),
        }
    }
}

/// One pair of axes.
struct Panel {
    title: String,
    below: &'static str,
    scale: Scale,
    /// The labels on the horizontal axis: position and text.
    ticks: Vec<(f64, String)>,
    /// The curves: index of the subject, and points.
    lines: Vec<(usize, Vec<(f64, f64)>)>,
}

/// Draws `report`, with a curve for each subject through medians over rounds. The picture is
/// well-formed SVG without scripts or outside references.
///
/// For loads: commands per second (left) and mean latency (right) over the depth, for each pattern,
/// block size and number of threads, as in Figures 5.1 to 5.4 of the vfio-user thesis. For RocksDB:
/// operations per second over time, for each load and number of compaction threads, as in its
/// Figures 5.5 to 5.9.
///
/// # Errors
/// If nothing was measured.
pub fn curves(report: &BlockReport, title: &str) -> Result<String> {
    let mut panels = over_depth(report);
    if let Some(rocksdb) = &report.rocksdb {
        panels.extend(over_time(report, rocksdb));
    }
    anyhow::ensure!(!panels.is_empty(), "nothing was measured, so there is nothing to draw");
    let rows = panels.len().div_ceil(2) as i32;
    let height = TOP + rows * PANEL.1 + 10;
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, (WIDTH as u32, height as u32));
        let area = area.into_drawing_area();
        draw(&area, report, &panels, title).map_err(|error| anyhow!("drawing: {error}"))?;
    }
    Ok(text)
}

/// Returns the properties that the loads of one panel share.
fn family(workload: &Workload) -> (Pattern, u32, u32) {
    (workload.pattern, workload.block_size, workload.threads)
}

fn over_depth(report: &BlockReport) -> Vec<Panel> {
    let mut families: Vec<_> = report.plan.workloads.iter().map(family).collect();
    families.sort_unstable();
    families.dedup();
    families.into_iter().flat_map(|family| depth_panels(report, family)).collect()
}

fn depth_panels(report: &BlockReport, wanted: (Pattern, u32, u32)) -> Vec<Panel> {
    let loads = report.plan.workloads.iter().filter(|load| family(load) == wanted);
    let mut loads: Vec<Workload> = loads.copied().collect();
    loads.sort_unstable();
    loads.dedup();
    // Depths are multiples of each other, so even distances make the axis logarithmic.
    let places = || (0..).map(f64::from).zip(&loads);
    let ticks: Vec<_> = places().map(|(at, load)| (at, load.depth.to_string())).collect();
    let (pattern, block, threads) = wanted;
    let threads = if threads == 1 { "1 thread".to_owned() } else { format!("{threads} threads") };
    let name = format!("{}, {}, {threads}", pattern.name(), block_name(block));
    let panel = |what: &str, scale, value: &dyn Fn(&Figures) -> f64| {
        let line = |(index, subject): (usize, &super::Described)| {
            let point = |(at, load): (f64, &Workload)| {
                Some((at, value(&report.figures(load, &subject.name)?)))
            };
            (index, places().filter_map(point).collect::<Vec<_>>())
        };
        let lines = report.subjects.iter().enumerate().map(line);
        let lines: Vec<_> = lines.filter(|(_, points)| !points.is_empty()).collect();
        let title = format!("{name}: {what}");
        Panel { title, below: "depth", scale, ticks: ticks.clone(), lines }
    };
    let panels = [
        panel("commands a second (more is better)", Scale::Rate, &|figures| figures.iops),
        panel("mean latency (less is better)", Scale::Time, &|figures| figures.mean_ns),
    ];
    panels.into_iter().filter(|panel| !panel.lines.is_empty()).collect()
}

fn over_time(report: &BlockReport, rocksdb: &RocksReport) -> Vec<Panel> {
    let mut jobs: Vec<RocksJob> = rocksdb.plan.jobs().collect();
    // Panels for one and ten compaction threads are beside each other.
    jobs.sort_unstable();
    jobs.dedup();
    let panels = jobs.into_iter().map(|job| {
        let subjects = report.subjects.iter().enumerate();
        let lines = subjects.map(|(index, subject)| (index, rocksdb.over_time(job, &subject.name)));
        let lines: Vec<_> = lines.filter(|(_, points)| !points.is_empty()).collect();
        let last = lines.iter().flat_map(|(_, points)| points).map(|point| point.0);
        let last = last.fold(1.0, f64::max);
        let tick = |at: f64| (at, human((at * 1e9) as u64));
        let threads = job.compaction_threads;
        let plural = if threads == 1 { "" } else { "s" };
        Panel {
            title: format!(
                "{}, {threads} compaction thread{plural}: operations a second (more is better)",
                job.load
            ),
            below: "time",
            scale: Scale::Rate,
            ticks: marks(last).map(tick).collect(),
            lines,
        }
    });
    panels.filter(|panel| !panel.lines.is_empty()).collect()
}

fn draw(area: &Area<'_>, report: &BlockReport, panels: &[Panel], title: &str) -> Result<()> {
    area.fill(&WHITE)?;
    heading(area, title, WIDTH)?;
    let mut x = 20;
    for (index, subject) in report.subjects.iter().enumerate() {
        let name = printable(&subject.name);
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
fn marks(end: f64) -> impl Iterator<Item = f64> {
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
        let label = panel.scale.label(value);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::report::tests::{report, with_rocksdb};

    #[test]
    fn a_panel_for_each_family_and_a_line_for_each_subject() {
        let mut two = report(&[("host", &[100, 110]), ("slipway", &[200, 210])]);
        let text = curves(&two, "a & b <c>").unwrap();
        assert!(text.contains("randread, 4k, 1 thread: commands a second"), "{text}");
        assert!(text.contains("a &amp; b") && text.trim_end().ends_with("</svg>"));
        assert_eq!(over_depth(&two).len(), 2);
        let deeper: Workload = "randread-4k-d8-t1".parse().unwrap();
        let more = two.runs.to_vec();
        two.plan.workloads.push(deeper);
        two.runs.extend(more.into_iter().map(|run| crate::block::Run { workload: deeper, ..run }));
        let panels = over_depth(&two);
        assert_eq!(panels.len(), 2, "depths share their panels");
        assert!(panels.iter().all(|panel| panel.lines.len() == 2 && panel.ticks.len() == 2));
        assert!(panels.iter().flat_map(|panel| &panel.lines).all(|(_, line)| line.len() == 2));
    }

    #[test]
    fn operations_over_time_are_medians_of_the_rounds() {
        let report = with_rocksdb();
        let rocksdb = report.rocksdb.as_ref().unwrap();
        let panels = over_time(&report, rocksdb);
        assert_eq!(panels.len(), 2);
        assert_eq!(panels[0].lines[0].1, [(1.0, 150.0), (2.0, 50.0)]);
        assert!(curves(&report, "").unwrap().contains("fillseq, 10 compaction threads"));
    }

    #[test]
    fn nothing_gives_no_picture() {
        assert!(curves(&report(&[]), "").is_err());
    }
}
