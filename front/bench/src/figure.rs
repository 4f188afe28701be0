//! Figures: the numbers of a turn by which subjects are compared.

use crate::duration::human;
use crate::statistics::{median, range};

/// A figure of a turn. Reports show its median over the rounds.
pub struct Figure<L: 'static, M: 'static> {
    /// The name in tables and in comparisons.
    pub name: &'static str,
    /// The words for what its bars show.
    pub about: &'static str,
    /// `true` if a greater value is better.
    pub more_is_better: bool,
    /// Returns the value of a turn with a load, or `None` if the turn has none.
    pub of: fn(&L, &M) -> Option<f64>,
    /// Formats a value with its unit.
    pub text: fn(f64) -> String,
    /// Further figures in the text behind a bar.
    pub beside: &'static [Self],
}

impl<L: 'static, M: 'static> Figure<L, M> {
    /// Makes a figure of which less is better.
    pub const fn less(
        name: &'static str,
        about: &'static str,
        of: fn(&L, &M) -> Option<f64>,
        text: fn(f64) -> String,
    ) -> Self {
        Self { name, about, more_is_better: false, of, text, beside: &[] }
    }

    /// Makes a figure of which more is better.
    pub const fn more(
        name: &'static str,
        about: &'static str,
        of: fn(&L, &M) -> Option<f64>,
        text: fn(f64) -> String,
    ) -> Self {
        Self { name, about, more_is_better: true, of, text, beside: &[] }
    }
}

/// Formats a time of `ns` nanoseconds.
pub(crate) fn time(ns: f64) -> String {
    human(ns as u64)
}

/// Formats `bytes` as MiB.
pub(crate) fn mib(bytes: f64) -> String {
    format!("{:.2} MiB", bytes / f64::from(1 << 20))
}

/// Formats the ratio of a value to the first one, or `-` if the first one is zero.
pub(crate) fn ratio(value: f64, first: f64) -> String {
    if first > 0.0 { format!("{:.3}", value / first) } else { "-".to_owned() }
}

/// A figure over the rounds of one subject with one load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OverRounds {
    /// The median.
    pub median: f64,
    /// The least and the greatest.
    pub range: (f64, f64),
    /// The number of rounds that have the figure, at least 1.
    pub rounds: usize,
}

impl OverRounds {
    /// Returns the figure over `values`, one for each round, or `None` without any.
    pub(crate) fn of(values: Vec<f64>) -> Option<Self> {
        let (range, rounds) = (range(&values), values.len());
        (rounds > 0).then(|| Self { median: median(values), range, rounds })
    }

    /// Returns the range of the rounds relative to their median. Returns `None` of a single round,
    /// and if the median is zero.
    pub fn spread(&self) -> Option<f64> {
        let apart = self.range.1 - self.range.0;
        (self.rounds > 1 && self.median > 0.0).then(|| apart / self.median)
    }

    /// Formats the spread as percent, or `-` if there is none.
    pub(crate) fn spread_text(&self) -> String {
        self.spread().map_or_else(|| "-".to_owned(), |spread| format!("{:.0}%", spread * 100.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_over_rounds_has_a_median_and_a_spread() {
        let three = OverRounds::of(vec![30.0, 10.0, 20.0]).unwrap();
        assert_eq!((three.median, three.range, three.spread()), (20.0, (10.0, 30.0), Some(1.0)));
        let one = OverRounds::of(vec![7.0]).unwrap();
        assert_eq!((one.median, one.spread_text().as_str()), (7.0, "-"));
        assert_eq!(OverRounds::of(Vec::new()), None);
        let idle = OverRounds::of(vec![0.0, 0.0, 1e-6]).unwrap();
        assert_eq!((idle.median, idle.spread()), (0.0, None));
        assert_eq!([ratio(1.0, 2.0), ratio(1e-6, 0.0)], ["0.500", "-"]);
    }
}
