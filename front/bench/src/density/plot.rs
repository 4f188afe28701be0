//! Draws a report of density.

use anyhow::Result;

use super::table::mib;
use super::{DensityPoint, DensityReport, MODELS, Quantity, Series};
use crate::duration::human;
use crate::groups::{Bar, Group, groups};
use crate::statistics::percentile;

/// The colours of what was measured, and of the model.
const MEASURED: usize = 1;
const MODELLED: usize = 3;

/// Draws `report`: the memory of a sandbox with each number of them, with the range over all of
/// them, and the model's; the time of starts beside them; the processor time of idle sandboxes;
/// the same for containers of a pod.
///
/// # Errors
/// If nothing was measured.
pub fn density_plot(report: &DensityReport, title: &str) -> Result<String> {
    let mut all = of_series(&report.sandboxes, "sandbox", "deployed");
    if let Some(group) = all.first_mut() {
        let bar = |count| model(&report.sandboxes, count);
        group.bars.extend(MODELS.into_iter().filter_map(bar));
    }
    all.extend(of_series(&report.replicas, "container", "in one pod"));
    groups(title, all.into_iter())
}

/// Returns the groups of a series, or none if it has no points. `one` is what there are several of.
fn of_series(series: &Series, one: &str, there: &str) -> Vec<Group> {
    if series.points.is_empty() {
        return Vec::new();
    }
    let named = |point: &DensityPoint| format!("{} {there}{}", point.count, point.marks());
    let group = |name: String, bars: Vec<Bar>| Group { name, more_is_better: false, bars };
    // A pod without containers has no memory for each of them.
    let with = || series.points.iter().filter(|point| point.count > 0);
    let mut all = vec![group(
        format!("memory for each {one} (PSS), MiB"),
        with().map(|point| memory(series, point, named(point))).collect(),
    )];
    for at_once in at_once(series) {
        let bars = series.points.iter().filter_map(|point| start(point, at_once, named(point)));
        all.push(group(format!("start of {at_once} more at once, until all run"), bars.collect()));
    }
    let name = "processor time of Slipway in a second of idleness, all together".to_owned();
    all.push(group(name, series.points.iter().map(|point| idle(point, named(point))).collect()));
    all
}

fn memory(series: &Series, point: &DensityPoint, name: String) -> Bar {
    let length = series.each(point, Quantity::Pss);
    let part = |quantity| series.each(point, quantity);
    let (guest, vmm) = (mib(part(Quantity::Guest)), mib(part(Quantity::Vmm)));
    let plane = mib(part(Quantity::Plane) + part(Quantity::Mapped));
    let text = format!("{}: guest {guest}, VMM {vmm}, plane {plane}", mib(length));
    Bar { subject: MEASURED, name, length, range: series.range(point), text, modelled: false }
}

/// Returns the bar of the model for a number of sandboxes, if the points support one.
fn model(series: &Series, count: u32) -> Option<Bar> {
    let length = series.model(Quantity::Pss, count)?;
    let name = format!("{count}: model{}", series.mark());
    let text = format!("{} by the line", mib(length));
    Some(Bar { subject: MODELLED, name, length, range: (length, length), text, modelled: true })
}

/// Returns how many were started at once in some point, in ascending order.
fn at_once(series: &Series) -> Vec<u32> {
    let bursts = series.points.iter().flat_map(|point| &point.bursts);
    let mut all: Vec<u32> = bursts.map(|burst| burst.at_once).collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn start(point: &DensityPoint, at_once: u32, name: String) -> Option<Bar> {
    let burst = point.bursts.iter().find(|burst| burst.at_once == at_once)?;
    let lasts = burst.lasts();
    let (least, most) = (*lasts.first()?, *lasts.last()?);
    let median = percentile(&lasts, 50);
    let (length, text) = (median as f64, human(median));
    let range = (least as f64, most as f64);
    Some(Bar { subject: MEASURED, name, length, range, text, modelled: false })
}

fn idle(point: &DensityPoint, name: String) -> Bar {
    let length = point.idle.own() as f64 / (point.idle_ns.max(1) as f64 / 1e9);
    let text = human(length as u64);
    Bar { subject: MEASURED, name, length, range: (length, length), text, modelled: false }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::density::report::tests::report;
    use crate::pictures::sound;

    #[test]
    fn memory_starts_and_idleness_are_drawn() {
        let text = density_plot(&report(&[1, 2, 4], &[0, 1, 2]), "a & b").unwrap();
        sound(&text).unwrap();
        let parts = [
            "4 deployed",
            "100: model",
            "2000: model",
            "11.00: guest 7.00, VMM 3.00, plane 1.00",
            "start of 10 more at once",
            "2 in one pod",
            "a &amp; b",
        ];
        for part in parts {
            assert!(text.contains(part), "{part}");
        }
        // Memory, starts of 1 and of 10, and idleness, of both.
        assert_eq!(text.matches("less is better").count(), 8);
    }

    #[test]
    fn what_a_busy_machine_spoils_is_marked() {
        let mut spoilt = report(&[1, 2, 4], &[]);
        spoilt.sandboxes.points[0].settled = false;
        spoilt.sandboxes.points[1].void = vec!["idle: others used 50 %".into()];
        let text = density_plot(&spoilt, "x").unwrap();
        for part in ["1 deployed BUSY", "2 deployed VOID", "2000: model VOID"] {
            assert!(text.contains(part), "{part}");
        }
        assert!(!text.contains("4 deployed BUSY") && !text.contains("4 deployed VOID"));
    }

    #[test]
    fn few_points_have_no_model_and_none_no_picture() {
        let text = density_plot(&report(&[1], &[]), "x").unwrap();
        assert!(!text.contains("model") && !text.contains("in one pod"));
        assert!(density_plot(&report(&[], &[]), "x").is_err());
    }
}
