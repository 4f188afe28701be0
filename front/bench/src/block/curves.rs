//! Draws reports of disks as curves: IOPS and latency over depth, and RocksDB's operations over
//! time.

use anyhow::Result;
use slipway_load::block_name;

use super::measure::{BlockFigure, IOPS, MEAN};
use super::{BlockReport, Pattern, RocksJob, RocksReport, Workload};
use crate::duration::{human, thousands};
use crate::panels::{CurvePoint, Panel, marks, panels};
use crate::turns::Described;

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
    let mut all = over_depth(report);
    if let Some(rocksdb) = &report.extra.rocksdb {
        all.extend(over_time(report, rocksdb));
    }
    let subjects: Vec<&str> = report.subjects.iter().map(|one| one.name.as_str()).collect();
    panels(title, &subjects, &all)
}

/// Returns the properties that the loads of one panel share.
fn family(workload: &Workload) -> (Pattern, u32, u32) {
    (workload.pattern, workload.block_size, workload.threads)
}

fn over_depth(report: &BlockReport) -> Vec<Panel> {
    let mut families: Vec<_> = report.plan.loads.iter().map(family).collect();
    families.sort_unstable();
    families.dedup();
    families.into_iter().flat_map(|family| depth_panels(report, family)).collect()
}

fn depth_panels(report: &BlockReport, wanted: (Pattern, u32, u32)) -> Vec<Panel> {
    let loads = report.plan.loads.iter().filter(|load| family(load) == wanted);
    let mut loads: Vec<Workload> = loads.copied().collect();
    loads.sort_unstable();
    loads.dedup();
    // Depths are multiples of each other, so even distances make the axis logarithmic.
    let places = || (0..).map(f64::from).zip(&loads);
    let ticks: Vec<_> = places().map(|(at, load)| (at, load.depth.to_string())).collect();
    let (pattern, block, threads) = wanted;
    let threads = if threads == 1 { "1 thread".to_owned() } else { format!("{threads} threads") };
    let name = format!("{}, {}, {threads}", pattern.name(), block_name(block));
    let panel = |figure: &BlockFigure| {
        let line = |(index, subject): (usize, &Described)| {
            let point = |(at, load): (f64, &Workload)| {
                let one = report.over_rounds(load, &subject.name, figure)?;
                Some(CurvePoint { at, value: one.median, range: one.range })
            };
            (index, places().filter_map(point).collect::<Vec<_>>())
        };
        let lines = report.subjects.iter().enumerate().map(line);
        let lines: Vec<_> = lines.filter(|(_, points)| !points.is_empty()).collect();
        let (title, more_is_better) = (format!("{name}: {}", figure.about), figure.more_is_better);
        let (label, ticks) = (figure.text, ticks.clone());
        Panel { title, more_is_better, below: "depth", label, ticks, lines }
    };
    let panels = [panel(&IOPS), panel(&MEAN)];
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
        let last = lines.iter().flat_map(|(_, points)| points).map(|point| point.at);
        let last = last.fold(1.0, f64::max);
        let tick = |at: f64| (at, human((at * 1e9) as u64));
        let threads = job.compaction_threads;
        let plural = if threads == 1 { "" } else { "s" };
        Panel {
            title: format!(
                "{}, {threads} compaction thread{plural}: operations a second",
                job.load
            ),
            more_is_better: true,
            below: "time",
            label: thousands,
            ticks: marks(last).map(tick).collect(),
            lines,
        }
    });
    panels.filter(|panel| !panel.lines.is_empty()).collect()
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
        two.plan.loads.push(deeper);
        two.runs.extend(more.into_iter().map(|run| crate::block::Run { load: deeper, ..run }));
        let panels = over_depth(&two);
        assert_eq!(panels.len(), 2, "depths share their panels");
        assert!(panels.iter().all(|panel| panel.lines.len() == 2 && panel.ticks.len() == 2));
        assert!(panels.iter().flat_map(|panel| &panel.lines).all(|(_, line)| line.len() == 2));
    }

    #[test]
    fn operations_over_time_are_medians_of_the_rounds() {
        let report = with_rocksdb();
        let rocksdb = report.extra.rocksdb.as_ref().unwrap();
        let panels = over_time(&report, rocksdb);
        assert_eq!(panels.len(), 2);
        let point = |at, value, range| CurvePoint { at, value, range };
        let points = [point(1.0, 150.0, (100.0, 200.0)), point(2.0, 50.0, (50.0, 50.0))];
        assert_eq!(panels[0].lines[0].1, points);
        assert!(curves(&report, "").unwrap().contains("fillseq, 10 compaction threads"));
    }

    #[test]
    fn nothing_gives_no_picture() {
        assert!(curves(&report(&[]), "").is_err());
    }
}
