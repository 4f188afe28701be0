//! Starts at once beside as many starts one after the other.

use super::{Arm, ArmRound, ArmsReport};
use crate::duration::human;
use crate::slices;
use crate::statistics::{median, range};
use crate::table::titled;

/// Figures of a way in relation to single starts: medians of the rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SinglesFigures {
    /// Mean time of a single start, ns.
    pub single_ns: f64,
    /// Time from the common request until the last of those at once was there, ns.
    pub at_once_ns: f64,
    /// Time that processors were busy in all single starts together, ns.
    pub busy_ns: f64,
    /// `at_once_ns` over what the single starts take of all processors together: `busy_ns` divided
    /// by their number. 1 if starts at once need no more work and keep all processors busy.
    pub ratio: f64,
    /// The least and the greatest of the rounds' ratios.
    pub ratio_range: (f64, f64),
}

impl ArmsReport {
    /// Returns the figures of a way in relation to single starts, of a report with one point.
    /// Returns `None` if there were none.
    pub fn singles(&self, arm: Arm) -> Option<SinglesFigures> {
        let processors = f64::from(self.processors.max(1));
        let rounds: Vec<_> = self.of(arm).filter_map(|round| of_round(round, processors)).collect();
        let of = |figure: fn(&SinglesFigures) -> f64| median(rounds.iter().map(figure).collect());
        (!rounds.is_empty()).then(|| SinglesFigures {
            single_ns: of(|one| one.single_ns),
            at_once_ns: of(|one| one.at_once_ns),
            busy_ns: of(|one| one.busy_ns),
            ratio: of(|one| one.ratio),
            ratio_range: range(&rounds.iter().map(|one| one.ratio).collect::<Vec<_>>()),
        })
    }
}

fn of_round(round: &ArmRound, processors: f64) -> Option<SinglesFigures> {
    let singles = round.singles.as_ref()?;
    let at_once_ns = round.timelines.iter().map(slices::end_ns).max().unwrap_or(0) as f64;
    let busy_ns = singles.busy_ns as f64;
    let sum: f64 = singles.times_ns.iter().map(|ns| *ns as f64).sum();
    let ratio = at_once_ns / (busy_ns / processors).max(1.0);
    Some(SinglesFigures {
        single_ns: sum / singles.times_ns.len().max(1) as f64,
        at_once_ns,
        busy_ns,
        ratio,
        ratio_range: (ratio, ratio),
    })
}

/// The headings; the first is replaced by the number of sandboxes.
const HEADINGS: [&str; 5] = ["", "one alone", "CPU of all singles", "at once, until the last", ""];

/// Formats a row for each way of a report with one point, below a title. The text is empty if there
/// were no single starts.
pub(super) fn singles_table(report: &ArmsReport, title: &str, colour: bool) -> String {
    let row = |arm: &Arm| {
        let one = report.singles(*arm)?;
        let times = [one.single_ns, one.busy_ns, one.at_once_ns].map(|ns| human(ns as u64));
        let [single, busy, at_once] = times;
        let ratio = format!("{:.2} x CPU / {} processors", one.ratio, report.processors);
        Some([arm.name().to_owned(), single, busy, at_once, ratio])
    };
    let rows: Vec<_> = report.arms.iter().filter_map(row).collect();
    if rows.is_empty() {
        return String::new();
    }
    titled(&format!("{title}, and singly"), &HEADINGS, &rows, colour)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arms::Singles;
    use crate::arms::report::tests::report;

    #[test]
    fn starts_at_once_are_over_the_work_of_single_ones() {
        let mut report = report(&[(Arm::Slipway, [[100, 150], [120, 250]])]);
        assert_eq!(report.singles(Arm::Slipway), None);
        assert_eq!(singles_table(&report, "2 at once", false), "");
        for round in &mut report.rounds {
            round.singles = Some(Singles { times_ns: vec![70, 90], busy_ns: 200 });
        }
        let found = report.singles(Arm::Slipway).unwrap();
        // Two processors do the work of 200 ns in 100 ns.
        assert_eq!((found.single_ns, found.at_once_ns), (80.0, 200.0));
        assert_eq!((found.busy_ns, found.ratio, found.ratio_range), (200.0, 2.0, (1.5, 2.5)));
        let text = singles_table(&report, "2 at once", false);
        assert!(text.starts_with("2 at once, and singly"), "{text}");
        assert!(text.contains("2.00 x CPU / 2 processors"), "{text}");
    }
}
