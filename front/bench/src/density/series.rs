//! Sandboxes, or containers of one pod, by their number: figures for each, and the line through
//! them.

use super::{DensityReport, Idle, Quantity, Starts, Unit};
use crate::line::Line;

/// The number of sandboxes for which the model is asked: the greatest of RunD-V's figure 14.
pub const MODEL: u32 = 2000;
/// The numbers of sandboxes for which the model is asked, as far as they were not measured.
pub const MODELS: [u32; 4] = [100, 500, 1000, MODEL];
/// The fewest points that support a model.
const LEAST_POINTS: usize = 3;
/// The greatest distance of a point from the line that supports a model, as a part of the line's
/// value at the last point.
const MOST_OFF: f64 = 0.1;

/// The memory of a number of sandboxes, or of containers of one pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DensityPoint {
    /// How many there were.
    pub count: u32,
    /// The memory and processor time that they took while they idled.
    pub idle: Idle,
    /// Set if its turn, or one of starts beside it, was void.
    pub is_void: bool,
}

impl DensityPoint {
    /// Returns the marks behind the point's name, each after a space: "BUSY" if it was still at
    /// work, "VOID" if it does not count.
    pub(super) fn marks(&self) -> String {
        let busy = if self.idle.settled { "" } else { " BUSY" };
        let void = if self.is_void { " VOID" } else { "" };
        format!("{busy}{void}")
    }

    /// Returns a part of the memory of each, bytes.
    pub fn each(&self, quantity: Quantity) -> f64 {
        self.idle.each(quantity, self.count)
    }

    /// Returns the least and the greatest PSS of a sandbox, bytes: its VMM's, and what the others
    /// of Slipway's processes have for each.
    pub fn range(&self) -> (f64, f64) {
        let vmms = self.idle.taken.vmms.all() as f64;
        let rest = (self.idle.value(Quantity::Pss) - vmms) / f64::from(self.count.max(1));
        let (least, most) = self.idle.taken.vmm_range;
        (least as f64 + rest, most as f64 + rest)
    }
}

/// Points of a report, by their counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Series {
    /// The things that are counted.
    pub unit: Unit,
    /// The points.
    pub points: Vec<DensityPoint>,
    /// Starts, with the number that was there and how many started at once.
    pub starts: Vec<(u32, u32, Starts)>,
}

impl DensityReport {
    /// Returns the sandboxes or the containers of the report.
    pub fn series(&self, unit: Unit) -> Series {
        let (mut points, mut starts) = (Vec::new(), Vec::new());
        for load in self.plan.loads.iter().filter(|load| load.unit == unit) {
            let turns = self.runs.iter().filter(|run| run.load == *load).map(|run| &run.measured);
            let (name, beside) = (load.to_string(), format!("{load}, "));
            let is_void = self.faults.iter().any(|fault| {
                !fault.failed && (fault.load == name || fault.load.starts_with(&beside))
            });
            let idle = turns.clone().find_map(|turn| turn.idle);
            points.extend(idle.map(|idle| DensityPoint { count: load.count, idle, is_void }));
            let all = Starts(turns.flat_map(|turn| turn.starts.0.clone()).collect());
            if !all.is_empty() {
                starts.push((load.count, load.more.max(1), all));
            }
        }
        Series { unit, points, starts }
    }
}

impl Series {
    /// Returns the line through a figure of all points, bytes over counts, or `None` if there are
    /// no two counts.
    pub fn line(&self, quantity: Quantity) -> Option<Line> {
        let point = |one: &DensityPoint| (f64::from(one.count), one.idle.value(quantity));
        Line::through(&self.points.iter().map(point).collect::<Vec<_>>())
    }

    /// Returns the mark of what is computed from all points: " VOID" if one of them has a mark.
    pub(super) fn mark(&self) -> &'static str {
        let is_marked = |point: &DensityPoint| !point.marks().is_empty();
        if self.points.iter().any(is_marked) { " VOID" } else { "" }
    }

    /// Returns the line's value for each of `count` sandboxes, bytes. Returns `None` if so many
    /// were measured, or the points support no line.
    pub fn model(&self, quantity: Quantity, count: u32) -> Option<f64> {
        let last = self.points.iter().map(|point| point.count).max()?;
        let line = self.line(quantity)?;
        let off = line.farthest <= MOST_OFF * line.at(last.into());
        let supported = self.points.len() >= LEAST_POINTS && off && line.slope > 0.0;
        (supported && last < count).then(|| line.at(count.into()) / f64::from(count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::density::Rollup;
    use crate::density::report::tests::{MIB, report};

    fn series(counts: &[u32]) -> Series {
        report(counts, &[]).series(Unit::Sandbox)
    }

    #[test]
    fn parts_add_up_to_what_is_beyond_the_start() {
        let all = series(&[1, 4]);
        let each = |quantity| all.points[1].each(quantity) / MIB as f64;
        let found = Quantity::ALL.map(each);
        assert_eq!(found, [11.0, 10.0, 7.0, 3.0, 1.0, 0.0, 0.0, 13.0]);
        assert_eq!(all.points[1].range(), ((10 * MIB) as f64, (13 * MIB) as f64));
        let starts: Vec<_> = all.starts.iter().map(|(count, more, _)| (*count, *more)).collect();
        assert_eq!(starts, [(1, 1), (1, 10), (4, 1), (4, 10)]);
        assert_eq!(all.starts[1].2.lasts(), [10_000_000; 2]);
    }

    #[test]
    fn huge_pages_of_a_guest_count_once() {
        let mut point = series(&[2]).points[0];
        point.idle.taken.vmms = Rollup { hugetlb: 4 * MIB, ..point.idle.taken.vmms };
        assert_eq!(point.each(Quantity::Guest), (9 * MIB) as f64);
        assert_eq!(point.each(Quantity::Pss), (13 * MIB) as f64);
    }

    #[test]
    fn a_model_is_for_more_than_was_measured_on_a_line() {
        let all = series(&[1, 2, 4]);
        let line = all.line(Quantity::Pss).unwrap();
        assert!((line.slope - (11 * MIB) as f64).abs() < 1.0 && line.residual < 1.0, "{line:?}");
        let model = all.model(Quantity::Pss, MODEL).unwrap();
        assert!((model - (11 * MIB) as f64).abs() < 1.0, "{model}");
        assert_eq!(all.model(Quantity::Pss, 4), None, "that was measured");
        assert_eq!(series(&[1, 2]).model(Quantity::Pss, MODEL), None, "two points are a line");
        let mut bent = series(&[1, 2, 4]);
        bent.points[2].idle.taken.vmms.pss *= 3;
        assert_eq!(bent.model(Quantity::Pss, MODEL), None);
        assert!(bent.line(Quantity::Pss).is_some());
        assert_eq!(series(&[]).model(Quantity::Pss, MODEL), None);
    }
}
