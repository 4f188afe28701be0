//! Curves over a number of the loads, of reports whose loads have two numbers.

use crate::figure::Figure;
use crate::measurement::{Measured, Measurement};
use crate::panels::{CurvePoint, Panel};

/// A number that loads have.
pub(crate) struct Axis<L> {
    /// The name below an axis.
    pub name: &'static str,
    /// Returns the number of a load.
    pub of: fn(&L) -> f64,
    /// Formats the number for titles. The text is empty if it needs no words.
    pub words: fn(f64) -> String,
}

/// Loads that differ in one number, in its order.
pub(crate) struct Over<L> {
    /// The name of the number that grows.
    pub name: &'static str,
    /// Returns the number that grows.
    grows: fn(&L) -> f64,
    /// The words for the other number, with a comma before them; empty if it needs none.
    pub with: String,
    loads: Vec<L>,
}

/// Returns the loads over the number `grows` for each value of `stays` that `least` loads or more
/// have.
pub(crate) fn over<L: Copy + PartialEq>(
    loads: &[L],
    grows: &Axis<L>,
    stays: &Axis<L>,
    least: usize,
) -> Vec<Over<L>> {
    let mut values: Vec<f64> = loads.iter().map(stays.of).collect();
    values.sort_by(f64::total_cmp);
    values.dedup();
    let of_value = |value: f64| {
        let with = loads.iter().filter(|load| (stays.of)(load).total_cmp(&value).is_eq());
        let mut loads: Vec<L> = with.copied().collect();
        loads.sort_by(|one, other| (grows.of)(one).total_cmp(&(grows.of)(other)));
        loads.dedup();
        let words = (stays.words)(value);
        let with = if words.is_empty() { words } else { format!(", {words}") };
        let over = Over { name: grows.name, grows: grows.of, with, loads };
        (over.loads.len() >= least).then_some(over)
    };
    values.into_iter().filter_map(of_value).collect()
}

impl<M: Measured, E> Measurement<M::Load, M, E> {
    /// Returns the curve of a subject: medians of a figure over the number that grows.
    pub(crate) fn medians_over(
        &self,
        over: &Over<M::Load>,
        subject: &str,
        figure: &Figure<M::Load, M>,
    ) -> Vec<CurvePoint> {
        let point = |load: &M::Load| {
            let one = self.over_rounds(load, subject, figure)?;
            Some(CurvePoint { at: (over.grows)(load), value: one.median, range: one.range })
        };
        over.loads.iter().filter_map(point).collect()
    }

    /// Returns a panel with a curve for each subject, or `None` if no turn has the figure.
    pub(crate) fn panel(&self, over: &Over<M::Load>, figure: &Figure<M::Load, M>) -> Option<Panel> {
        let subjects = self.subjects.iter().enumerate();
        let lines =
            subjects.map(|(place, one)| (place, self.medians_over(over, &one.name, figure)));
        let lines: Vec<_> = lines.collect();
        let ticks = over.loads.iter().map(over.grows).map(|at| (at, at.to_string()));
        lines.iter().any(|(_, points)| !points.is_empty()).then(|| Panel {
            title: format!("{}{}", figure.about, over.with),
            more_is_better: figure.more_is_better,
            below: over.name,
            label: figure.text,
            ticks: ticks.collect(),
            lines,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_over_one_number_for_each_value_of_the_other() {
        let first =
            Axis { name: "first", of: |load: &(u8, u8)| load.0.into(), words: |_| "".into() };
        let words = |value: f64| format!("{value} of the second");
        let second = Axis { name: "second", of: |load: &(u8, u8)| load.1.into(), words };
        let loads = [(4, 1), (1, 1), (1, 1), (1, 2)];
        let found = over(&loads, &first, &second, 2);
        assert_eq!((found.len(), found[0].name), (1, "first"));
        assert_eq!(
            (found[0].with.as_str(), &found[0].loads[..]),
            (", 1 of the second", &[(1, 1), (4, 1)][..])
        );
        let found = over(&loads, &second, &first, 1);
        assert_eq!((found.len(), found[0].with.as_str()), (2, ""));
    }
}
