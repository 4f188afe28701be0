//! Compares two reports: which differences are more than noise.
//!
//! The noise is Welch's confidence interval ([`welch_half_width`]), for the stages of starts
//! ([`compare`]) as for figures ([`figure_row`]). A [`Verdict`] is the conclusion about a stage.

use slipway_telemetry::Timeline;

use crate::arms::ArmsReport;
use crate::duration::human;
use crate::statistics::{statistics, time_in};
use crate::table::{BOLD, PLAIN, grid};

/// The fewest rounds from which the noise between rounds can be told.
pub(crate) const LEAST_ROUNDS: usize = 3;

/// Returns the verdict on a difference of two means, which is above zero if the later one is
/// better. It counts as real if it exceeds the noise; too few rounds give no verdict.
fn verdict_on(difference: f64, noise: f64, rounds: usize) -> &'static str {
    match difference {
        _ if rounds < LEAST_ROUNDS => "needs three rounds",
        better if better > noise => "faster",
        worse if -worse > noise => "slower",
        _ => "noise",
    }
}

/// The text in place of a verdict on reports that have one round by design.
pub(crate) const ONE_ROUND: &str = "one round, noise unknown";
/// The text in place of a table without rows.
const NOTHING_IN_COMMON: &str = "The reports have nothing in common.\n";

/// The values that the noise is computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// The means of rounds. Sandboxes of one round share its processors, so only rounds are
    /// independent of each other.
    Rounds,
    /// Single sandboxes, if one of the reports has fewer than three rounds. Differences between
    /// rounds stay invisible, so this too easily calls a difference real.
    Sandboxes,
}

/// The conclusion of a comparison of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Takes less time, by more than the noise.
    Faster,
    /// Takes more time, by more than the noise.
    Slower,
    /// The difference is not larger than the noise.
    WithinNoise,
    /// There are too few values to know the noise.
    Unknown,
    /// Only the second report has the stage.
    Added,
    /// Only the first report has the stage.
    Removed,
}

/// The comparison of one stage of two reports.
#[derive(Clone, Debug, PartialEq)]
pub struct StageComparison {
    /// The stage's name, or `total` for the whole start.
    pub name: String,
    /// Mean in the first report, in nanoseconds; 0 if the stage is not there.
    pub before_ns: f64,
    /// Mean in the second report, in nanoseconds; 0 if the stage is not there.
    pub after_ns: f64,
    /// The largest difference that chance alone explains, in nanoseconds: half the width of the 99
    /// % confidence interval of the difference (Welch). `None` if there are too few values.
    pub noise_ns: Option<f64>,
    /// The conclusion.
    pub verdict: Verdict,
}

/// The comparison of two reports.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Stages in the order of the second report, then those that only the first report has, then
    /// `total`.
    pub stages: Vec<StageComparison>,
    /// The values that the noise is computed from.
    pub basis: Basis,
    /// Reasons why the reports may not be comparable (another machine, another number of
    /// sandboxes, another way), as sentences. Empty if there are none.
    pub warnings: Vec<String>,
}

/// Compares `before` with `after`, stage by stage.
///
/// A difference of two means counts as real if it is larger than half the 99 % confidence interval
/// of that difference. The interval is Welch's, which lets both sides have a variance of their own.
/// It is 99 % and not 95 %, since a report has about ten stages: at 95 % every second comparison of
/// two equal programs would name one. The values are means of rounds, or single sandboxes if there
/// are fewer than three rounds (see [`Basis`]).
pub fn compare(before: &ArmsReport, after: &ArmsReport) -> Comparison {
    let rounds = before.runs.len().min(after.runs.len());
    let basis = if rounds >= LEAST_ROUNDS { Basis::Rounds } else { Basis::Sandboxes };
    let row = |name: &str, time: &dyn Fn(&Timeline) -> Option<u64>| {
        compare_values(name, &values(before, basis, time), &values(after, basis, time))
    };
    let mut stages: Vec<StageComparison> = names(before, after)
        .iter()
        .map(|name| row(name, &|timeline| time_in(timeline, name)))
        .collect();
    stages
        .push(row("total", &|timeline| (!timeline.stages.is_empty()).then(|| timeline.total_ns())));
    Comparison { stages, basis, warnings: warnings(before, after) }
}

fn names(before: &ArmsReport, after: &ArmsReport) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for report in [after, before] {
        for stage in statistics(&report.timelines()).stages {
            if !names.contains(&stage.name) {
                names.push(stage.name);
            }
        }
    }
    names
}

/// Returns the values of one stage, in nanoseconds: a mean for each round, or one for each sandbox.
fn values(report: &ArmsReport, basis: Basis, time: &dyn Fn(&Timeline) -> Option<u64>) -> Vec<f64> {
    let of = |round: &Vec<Timeline>| -> Vec<f64> {
        round.iter().filter_map(time).map(|ns| ns as f64).collect()
    };
    let rounds = report.runs.iter().map(|run| of(&run.measured.timelines));
    match basis {
        Basis::Rounds => {
            rounds.filter(|round| !round.is_empty()).map(|round| mean(&round)).collect()
        }
        Basis::Sandboxes => rounds.flatten().collect(),
    }
}

fn compare_values(name: &str, before: &[f64], after: &[f64]) -> StageComparison {
    let (before_ns, after_ns) = (mean(before), mean(after));
    let noise_ns = welch_half_width(before, after);
    let difference = after_ns - before_ns;
    let verdict = match noise_ns {
        _ if before.is_empty() => Verdict::Added,
        _ if after.is_empty() => Verdict::Removed,
        None => Verdict::Unknown,
        Some(noise) if difference.abs() <= noise => Verdict::WithinNoise,
        Some(_) if difference < 0.0 => Verdict::Faster,
        Some(_) => Verdict::Slower,
    };
    StageComparison { name: name.to_owned(), before_ns, after_ns, noise_ns, verdict }
}

/// Returns half the width of Welch's 99 % confidence interval of the difference of two means, or
/// `None` with fewer than two values on a side.
pub(crate) fn welch_half_width(a: &[f64], b: &[f64]) -> Option<f64> {
    if a.len() < 2 || b.len() < 2 {
        return None;
    }
    // Squared standard errors of both means.
    let (error_a, error_b) = (variance(a) / a.len() as f64, variance(b) / b.len() as f64);
    let error = error_a + error_b;
    if error == 0.0 {
        return Some(0.0);
    }
    // Degrees of freedom by Welch and Satterthwaite.
    let part = |error: f64, count: usize| error * error / (count - 1) as f64;
    let freedom = error * error / (part(error_a, a.len()) + part(error_b, b.len()));
    Some(student_t(freedom) * error.sqrt())
}

/// Returns the 99.5th percentile of Student's t distribution for the largest tabulated degrees of
/// freedom not above `freedom`, so that the noise is never too small.
fn student_t(freedom: f64) -> f64 {
    const TABLE: [(f64, f64); 16] = [
        (1.0, 63.657),
        (2.0, 9.925),
        (3.0, 5.841),
        (4.0, 4.604),
        (5.0, 4.032),
        (6.0, 3.707),
        (7.0, 3.499),
        (8.0, 3.355),
        (9.0, 3.250),
        (10.0, 3.169),
        (12.0, 3.055),
        (15.0, 2.947),
        (20.0, 2.845),
        (30.0, 2.750),
        (60.0, 2.660),
        (120.0, 2.617),
    ];
    let fitting = TABLE.iter().rev().find(|(least, _)| *least <= freedom);
    fitting.unwrap_or(&TABLE[0]).1
}

/// Formats a row about a figure in two reports: the means, shown by `show`, how many times as good
/// the later one is, and whether it differs by more than the noise. A ratio to zero is `-`. Returns
/// `None` if a report lacks the figure.
pub(crate) fn figure_row(
    name: String,
    before: &[f64],
    now: &[f64],
    (show, more_is_better): (fn(f64) -> String, bool),
) -> Option<[String; 6]> {
    if before.is_empty() || now.is_empty() {
        return None;
    }
    let [was, is] = [before, now].map(mean);
    let (better, worse) = if more_is_better { (is, was) } else { (was, is) };
    let half = welch_half_width(before, now);
    let rounds = if half.is_some() { before.len().min(now.len()) } else { 0 };
    let verdict = verdict_on(better - worse, half.unwrap_or(0.0), rounds);
    // The noise is relative to the same mean as the speed is.
    let part = |sign: &str, value: f64| match worse > 0.0 {
        true => format!("{sign}{:.2}", value / worse),
        false => "-".to_owned(),
    };
    let noise = half.map_or_else(|| "?".to_owned(), |half| part("±", half));
    Some([name, show(was), show(is), part("", better), noise, verdict.to_owned()])
}

/// Formats rows of [`figure_row`] as a table with a newline at the end.
pub(crate) fn figure_table(rows: &[[String; 6]]) -> String {
    if rows.is_empty() {
        return NOTHING_IN_COMMON.to_owned();
    }
    grid(&["", "before", "now", "speed", "noise", ""], rows, |_, line| line)
}

pub(crate) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Returns the sample's unbiased variance; needs two values or more.
fn variance(values: &[f64]) -> f64 {
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    squares / (values.len() - 1) as f64
}

fn loads(report: &ArmsReport) -> String {
    report.plan.loads.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn subjects(report: &ArmsReport) -> String {
    report.subjects.iter().map(|one| one.name.as_str()).collect::<Vec<_>>().join(", ")
}

fn warnings(before: &ArmsReport, after: &ArmsReport) -> Vec<String> {
    let (a, b) = (&before.environment, &after.environment);
    let differ = |what: &str, before: &str, after: &str| {
        (before != after).then(|| format!("{what} differs: {before:?} against {after:?}"))
    };
    let mut warnings: Vec<String> = [
        differ("the machine", &a.machine, &b.machine),
        differ("the host's kernel", &a.kernel, &b.kernel),
        differ("the accelerator", &a.accelerator, &b.accelerator),
        differ("the load", &loads(before), &loads(after)),
        differ("the way", &subjects(before), &subjects(after)),
    ]
    .into_iter()
    .flatten()
    .collect();
    for (report, when) in [(before, "before"), (after, "after")] {
        let void = report.faults.iter().filter(|fault| !fault.failed).count();
        if void > 0 {
            warnings.push(format!("rounds of the report {when} are void: {void}"));
        }
    }
    if before.runs.len().min(after.runs.len()) < LEAST_ROUNDS {
        warnings.push(format!(
            "fewer than {LEAST_ROUNDS} rounds: the noise is that of single sandboxes, and what \
             differs from round to round is not seen"
        ));
    }
    warnings
}

impl Comparison {
    /// Formats aligned text: both means, the difference with its noise, the verdict; then the
    /// warnings. Real differences are bold if `colour`.
    pub fn table(&self, colour: bool) -> String {
        let headings = ["stage", "before", "after", "difference", "noise", "verdict"];
        let rows: Vec<[String; 6]> = self.stages.iter().map(StageComparison::cells).collect();
        let mut text = grid(&headings, &rows, |row, line| {
            let real = row.is_some_and(|row| {
                matches!(self.stages[row].verdict, Verdict::Faster | Verdict::Slower)
            });
            if colour && real { format!("{BOLD}{line}{PLAIN}") } else { line }
        });
        for warning in &self.warnings {
            text.push_str(&format!("note: {warning}\n"));
        }
        text
    }
}

impl std::fmt::Display for Comparison {
    /// Formats the table without colour.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.table(false).trim_end())
    }
}

impl StageComparison {
    fn cells(&self) -> [String; 6] {
        let time = |ns: f64| human(ns.abs().round() as u64);
        let present = |absent: Verdict, ns: f64| {
            if self.verdict == absent { "–".to_owned() } else { time(ns) }
        };
        let difference = self.after_ns - self.before_ns;
        let percent = match self.before_ns {
            0.0 => String::new(),
            before => format!(" ({:+.1} %)", difference / before * 100.0),
        };
        let sign = if difference < 0.0 { '−' } else { '+' };
        [
            self.name.clone(),
            present(Verdict::Added, self.before_ns),
            present(Verdict::Removed, self.after_ns),
            format!("{sign}{}{percent}", time(difference)),
            self.noise_ns.map_or("?".to_owned(), |noise| format!("±{}", time(noise))),
            self.verdict.text().to_owned(),
        ]
    }
}

impl Verdict {
    fn text(self) -> &'static str {
        match self {
            Self::Faster => "faster",
            Self::Slower => "slower",
            Self::WithinNoise => "within the noise",
            Self::Unknown => "too few values",
            Self::Added => "new",
            Self::Removed => "gone",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arms::{ArmMeasured, Point};
    use crate::turns::Fault;

    /// Makes a report with one sandbox and one stage for each value, and a round for each inner
    /// list.
    fn report(stage: &str, rounds: &[&[u64]]) -> ArmsReport {
        let timeline = |&ns: &u64| {
            let mut timeline = Timeline::new("a");
            timeline.record(stage, 0, ns);
            timeline
        };
        let count = rounds.first().map_or(0, |round| round.len() as u32);
        let subjects = [("sandboxes", rounds)];
        let loads = vec![Point { count, memory_bytes: 0 }];
        ArmsReport::sample_of("bench startup", loads, &subjects, |_, _, round| {
            let timelines = round.iter().map(timeline).collect();
            ArmMeasured { timelines, processors: 1, busy_ns: 1, singles: None }
        })
    }

    fn verdict(comparison: &Comparison, name: &str) -> Verdict {
        comparison.stages.iter().find(|stage| stage.name == name).expect("a stage").verdict
    }

    #[test]
    fn a_report_does_not_differ_from_itself() {
        let report = report("vmm", &[&[100, 120], &[90, 130], &[105, 95]]);
        let comparison = compare(&report, &report);
        assert_eq!(comparison.basis, Basis::Rounds);
        assert!(comparison.warnings.is_empty());
        assert!(comparison.stages.iter().all(|stage| stage.verdict == Verdict::WithinNoise));
    }

    #[test]
    fn a_large_difference_is_real_and_a_small_one_is_not() {
        let before = report("vmm", &[&[1000], &[1010], &[990], &[1005]]);
        let faster = report("vmm", &[&[500], &[510], &[505], &[495]]);
        let same = report("vmm", &[&[1015], &[1000], &[985], &[1010]]);
        assert_eq!(verdict(&compare(&before, &faster), "vmm"), Verdict::Faster);
        assert_eq!(verdict(&compare(&faster, &before), "total"), Verdict::Slower);
        assert_eq!(verdict(&compare(&before, &same), "vmm"), Verdict::WithinNoise);
    }

    #[test]
    fn noise_between_rounds_counts_not_the_number_of_sandboxes() {
        // Within a round all sandboxes are alike; rounds differ by far more than the two reports
        // do.
        let many = |round: u64| vec![round; 200];
        let rounds = |at: [u64; 3]| at.map(many);
        let (a, b) = (rounds([100, 200, 300]), rounds([150, 250, 350]));
        let slices = |rounds: &[Vec<u64>; 3]| -> ArmsReport {
            report("vmm", &rounds.iter().map(Vec::as_slice).collect::<Vec<_>>())
        };
        let comparison = compare(&slices(&a), &slices(&b));
        assert_eq!(comparison.basis, Basis::Rounds);
        assert_eq!(verdict(&comparison, "vmm"), Verdict::WithinNoise);
    }

    #[test]
    fn welch_agrees_with_a_worked_example() {
        // Variances 2.5 each, n = 5 each: freedom 8, standard error 1, t = 3.355.
        let a = [1.0, 2.0, 3.0, 4.0, 5.0];
        let half = welch_half_width(&a, &a).unwrap();
        assert!((half - 3.355).abs() < 1e-9, "{half}");
        assert_eq!(welch_half_width(&[1.0], &a), None);
        assert_eq!(welch_half_width(&[1.0, 1.0], &[2.0, 2.0]), Some(0.0));
    }

    #[test]
    fn a_mean_of_zero_has_a_verdict_and_no_ratio() {
        let row = |before: f64, now: f64| {
            let shown: (fn(f64) -> String, bool) = (|value| format!("{value}"), false);
            figure_row("x".to_owned(), &[before; 3], &[now; 3], shown).unwrap().join(" ")
        };
        assert_eq!(row(0.5, 0.0), "x 0.5 0 - - faster");
        assert_eq!(row(0.0, 0.5), "x 0 0.5 0.00 ±0.00 slower");
        assert_eq!(row(0.0, 0.0), "x 0 0 - - noise");
    }

    #[test]
    fn few_values_new_and_gone_stages_are_said() {
        let before = report("vmm", &[&[100]]);
        let after = report("kernel", &[&[120]]);
        let comparison = compare(&before, &after);
        assert_eq!(comparison.basis, Basis::Sandboxes);
        assert_eq!(verdict(&comparison, "vmm"), Verdict::Removed);
        assert_eq!(verdict(&comparison, "kernel"), Verdict::Added);
        assert_eq!(verdict(&comparison, "total"), Verdict::Unknown);
        assert!(comparison.warnings.iter().any(|warning| warning.contains("rounds")));
    }

    #[test]
    fn other_circumstances_are_warned_of() {
        let mut before = report("vmm", &[&[1], &[1], &[1]]);
        let after = report("vmm", &[&[1, 1], &[1, 1], &[1, 1]]);
        before.environment.accelerator = "kvm".into();
        let warnings = compare(&before, &after).warnings;
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        let (subject, load, reason) = ("a".to_owned(), "b".to_owned(), "stolen".to_owned());
        before.faults.push(Fault { subject, load, round: 0, reason, failed: false });
        let warnings = compare(&before, &after).warnings;
        assert!(warnings[2].ends_with("of the report before are void: 1"), "{warnings:?}");
        before.subjects[0].name = "none".to_owned();
        let warnings = compare(&before, &after).warnings;
        assert_eq!(warnings[2], "the way differs: \"none\" against \"sandboxes\"");
    }

    #[test]
    fn reads_as_a_table() {
        let before = report("vmm", &[&[1_000_000], &[1_010_000], &[990_000]]);
        let after = report("vmm", &[&[500_000], &[510_000], &[505_000]]);
        let text = compare(&before, &after).table(false);
        assert!(text.contains("−495 µs (-49.5 %)"), "{text}");
        assert!(text.contains("faster"), "{text}");
        assert!(compare(&before, &after).table(true).contains(BOLD));
    }
}
