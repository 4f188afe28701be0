//! Draws a report of density.

use anyhow::Result;

use super::table::mib;
use super::{DensityPoint, DensityReport, MODELS, Quantity, Series, Starts, Unit};
use crate::figure::time;
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
    let sandboxes = report.series(Unit::Sandbox);
    let mut all = of_series(&sandboxes, "sandbox");
    if let Some(group) = all.first_mut() {
        group.bars.extend(MODELS.into_iter().filter_map(|count| model(&sandboxes, count)));
    }
    all.extend(of_series(&report.series(Unit::Replica), "container"));
    groups(title, all.into_iter())
}

/// Returns the groups of a series. `one` is what there are several of.
fn of_series(series: &Series, one: &str) -> Vec<Group> {
    let [_, _, there] = series.unit.names();
    let named = |point: &DensityPoint| format!("{} {there}{}", point.count, point.marks());
    let group = |name: String, bars: Vec<Bar>| Group { name, more_is_better: false, bars };
    // A pod without containers has no memory for each of them.
    let with = series.points.iter().filter(|point| point.count > 0);
    let name = format!("memory for each {one} (PSS), MiB");
    let mut all = vec![group(name, with.map(|point| memory(point, named(point))).collect())];
    let mut sizes: Vec<u32> = series.starts.iter().map(|(_, at_once, _)| *at_once).collect();
    sizes.sort_unstable();
    sizes.dedup();
    for size in sizes {
        let of_size = series.starts.iter().filter(|(_, at_once, _)| *at_once == size);
        let bars = of_size.filter_map(|(count, _, starts)| {
            let point = series.points.iter().find(|point| point.count == *count);
            let name = point.map_or_else(|| format!("{count} {there}"), named);
            last(starts, name)
        });
        all.push(group(format!("start of {size} more at once, until all run"), bars.collect()));
    }
    let name = "processor time of Slipway in a second of idleness, all together".to_owned();
    all.push(group(name, series.points.iter().map(|point| idle(point, named(point))).collect()));
    all
}

/// Makes a bar of what was measured.
fn bar(name: String, length: f64, range: (f64, f64), text: String) -> Bar {
    Bar { subject: MEASURED, name, length, range, text, modelled: false }
}

fn memory(point: &DensityPoint, name: String) -> Bar {
    let part = |quantity| point.each(quantity);
    let (guest, vmm) = (mib(part(Quantity::Guest)), mib(part(Quantity::Vmm)));
    let plane = mib(part(Quantity::Plane) + part(Quantity::Mapped));
    let length = part(Quantity::Pss);
    let text = format!("{}: guest {guest}, VMM {vmm}, plane {plane}", mib(length));
    bar(name, length, point.range(), text)
}

/// Returns the bar of the model for a number of sandboxes, if the points support one.
fn model(series: &Series, count: u32) -> Option<Bar> {
    let length = series.model(Quantity::Pss, count)?;
    let name = format!("{count}: model{}", series.mark());
    let text = format!("{} by the line", mib(length));
    Some(Bar { subject: MODELLED, modelled: true, ..bar(name, length, (length, length), text) })
}

/// Returns the bar of the time until the last one ran, the median over the requests.
fn last(starts: &Starts, name: String) -> Option<Bar> {
    let lasts = starts.lasts();
    let range = (*lasts.first()? as f64, *lasts.last()? as f64);
    let median = percentile(&lasts, 50) as f64;
    Some(bar(name, median, range, time(median)))
}

fn idle(point: &DensityPoint, name: String) -> Bar {
    let length = point.idle.in_a_second(point.idle.cpu.own());
    bar(name, length, (length, length), time(length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::density::report::tests::report;
    use crate::density::table::tests::spoil;
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
        // Memory, starts of 1, and idleness, of both; starts of 10 beside sandboxes.
        assert_eq!(text.matches("less is better").count(), 7);
    }

    #[test]
    fn what_a_busy_machine_spoils_is_marked() {
        let mut spoilt = report(&[1, 2, 4], &[]);
        spoil(&mut spoilt);
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
